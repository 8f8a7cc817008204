"""`ubatch tune`: what it chooses against an exhaustive sweep, what it writes, and one run on two ranks."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import make_qwen3_moe_checkpoint
from repository import TINY_MOE

import serving.workbench.tuning.tune
from moe import All2AllTraits, EmulatedLink
from ranks import run_ranks
from serving.cli import main
from serving.options import read_serve_command
from serving.workbench.arms import programs as lane_programs
from serving.workbench.arms.cells import SERIAL_ARM, Arm, Cell, CostTable, Grid, Setting, library_arms
from serving.workbench.arms.stages import LayerStages, StageModel, best_schedules, layer_times, slowest_layer_times
from serving.workbench.tuning.measure import State, load_state, save_state
from serving.workbench.tuning.report import Result, can_draw_png, make_result, write_html, write_png
from ubatch import CommGroup, ConfigError, ForwardMode, Schedule, Transfer, UBatchConfig, get_schedule
from ubatch.schedules import Compute, Launch, LayerTimes, Op, Pass, Wait, layer_program
from ubatch.schedules.schedule import KNOWN_POINTS, Point
from ubatch.trace.spans import Event, EventKind, SpanKind, current_trace, traced_step

TINY = str(TINY_MOE)
GRID = Grid(("decode", "prefill"), 256, 1024, 64, 128, 3)
ARMS = library_arms((2, 3), chunks=True)
Machine = Callable[[str, int], float]


def machine(link: float, per_lane: float) -> Machine:
    """True seconds of an arm at a number of tokens: lanes pay `per_lane` each, communication is `link` x compute."""

    def seconds(arm: str, tokens: int) -> float:
        compute = 0.003 + 2.5e-5 * tokens
        communication = link * compute
        if arm == SERIAL_ARM:
            return compute + communication
        if arm == "single_batch":
            return max(compute, communication) + 0.7 * min(compute, communication) + per_lane
        lanes = int(arm[-1])
        split = compute + lanes * per_lane
        return max(split, communication) + min(split, communication) / lanes

    return seconds


def measured(true: Machine, seed: int, rounds: int = 9, noise: float = 0.04) -> State:
    """What the rounds see of it: a drift that all arms of a round share, and noise that is each one's own."""
    draw = random.Random(seed)
    state = State({})
    for cell in GRID.cells():
        samples: dict[str, Any] = {arm.name: [] for arm in ARMS}
        for _ in range(rounds):
            drift = math.exp(draw.gauss(0, 0.1))
            for name, own in samples.items():
                own.append(true(name, cell.tokens) * drift * math.exp(draw.gauss(0, noise)))
        state.samples[str(cell)] = samples
    return state


@pytest.mark.parametrize(("link", "per_lane"), list(product((0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0), (2e-4, 1e-3, 3e-3))))
def test_against_an_exhaustive_sweep(link: float, per_lane: float) -> None:
    """Within a power of two of the optimum, or as good; regret at most 2%, over sizes between the measured ones too."""
    true = machine(link, per_lane)
    for smallest, largest, mode in ((2, 256, 0), (16, 1024, 1)):
        sizes = sorted({int(smallest * 2 ** (step / 4)) for step in range(40) if smallest * 2 ** (step / 4) <= largest})
        sweep = CostTable({size: {arm.name: true(arm.name, size) for arm in ARMS} for size in sizes})
        thresholds = (Setting(arm.name, size) for arm in ARMS if not arm.is_serial for size in sizes)
        best = min([Setting(), *thresholds], key=sweep.regret)
        for seed in range(3):
            result = make_result(GRID.cells(), dict.fromkeys(GRID.modes, ARMS), measured(true, seed), {}).modes[mode]
            chosen = result.choice
            worse = sweep.regret(chosen) - sweep.regret(best)
            assert worse <= 0.02, (result.sentence(), best)
            if chosen.threshold is not None and best.threshold is not None and chosen.arm == best.arm:
                near = best.threshold / 2 <= chosen.threshold <= 2 * best.threshold
                assert near or worse < 0.003, (result.sentence(), best)


def a_result(searched: bool = True) -> tuple[State, list[Cell], dict[str, list[Arm]]]:
    state = measured(machine(1.0, 3e-4), 0)
    own = Schedule("searched_prefill_1", lanes=3, chunks=2, lead=1, points_off=frozenset({Point.LAYER}))
    arms = {"decode": list(ARMS), "prefill": [*ARMS, Arm(own.name, own)] if searched else list(ARMS)}
    for cell in GRID.cells():
        if cell.mode == "prefill" and searched:
            serial: Any = state.samples[str(cell)][SERIAL_ARM]
            state.samples[str(cell)][own.name] = None if cell.tokens < 32 else [each / 2 for each in serial]
    return state, GRID.cells(), arms


def test_the_file_is_read_by_serve_and_generate(tmp_path: Path) -> None:
    state, cells, arms = a_result()
    result = make_result(cells, arms, state, {"machine": "two cores", "measured": "yesterday"})
    path = tmp_path / "dbo.yaml"
    result.write(path)
    config = UBatchConfig.from_yaml(path)
    assert config.enable_dbo
    prefill = config.for_mode(ForwardMode.MIXED)
    assert prefill.schedule == arms["prefill"][-1].schedule
    assert prefill.token_threshold == 32
    decode = config.for_mode(ForwardMode.DECODE)
    chosen = result.modes[0]
    assert decode.schedule.lanes == chosen.arm.schedule.lanes > 1
    assert decode.token_threshold == max(chosen.choice.threshold or 0, decode.schedule.lanes)
    text = path.read_text(encoding="utf-8")
    assert "# machine: two cores" in text
    assert f"# {chosen.sentence()}" in text
    assert "1024" in text.split("enable-dbo")[0]  # the measurements
    words = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel", "--config", str(path)]
    served = read_serve_command("serve", "", words).settings
    assert served["enable_dbo"]
    assert served["prefill"]["token_threshold"] == 32


def steps_of(times: Mapping[int, Sequence[tuple[float, float]]]) -> Result:
    """A result for decode steps; by tokens and round, milliseconds of the serial and the overlapped step."""
    state = State({})
    for tokens, rounds in times.items():
        cell = str(Cell("decode", tokens))
        serial, overlapped = zip(*rounds, strict=True)
        state.samples[cell] = {SERIAL_ARM: [ms / 1e3 for ms in serial], ARMS[2].name: [ms / 1e3 for ms in overlapped]}
    cells = [Cell("decode", tokens) for tokens in times]
    return make_result(cells, {"decode": ARMS}, state, {})


QUIET = {8: [(4.0, 4.8), (4.1, 4.9)], 16: [(6.0, 5.2), (6.1, 5.3)], 32: [(9.0, 6.0), (9.1, 6.1)]}


def test_a_threshold_that_the_times_support_has_no_warning() -> None:
    result = steps_of(QUIET)
    assert result.modes[0].choice.threshold == 16
    assert result.sentences() == [result.modes[0].sentence()]


@pytest.mark.parametrize(
    ("times", "doubt"),
    [
        (
            QUIET | {16: [(10.0, 5.2), (10.1, 5.3)]},
            "decode: 16 tokens took longer than 32 (serial, 10.05 ms against 9.05 ms).",
        ),
        (
            QUIET | {16: [(8.0, 7.0), (8.0, 7.0)]},
            f"decode: 16 tokens took longer than 32 ({ARMS[2].name}, 7.00 ms against 6.05 ms).",
        ),
        (
            QUIET | {16: [(7.0, 5.0), (5.0, 5.2)]},
            "decode: at 16 tokens the gain is not beyond noise, 1.18 [0.96, 1.40]x.",
        ),
        (
            {size: rounds[:1] for size, rounds in QUIET.items()},
            "decode: 16 tokens were measured once, so nobody knows whether 1.15x is noise.",
        ),
        (
            QUIET | {8: [(7.0, 8.0), (7.1, 8.1)]},  # right below
            "decode: 8 tokens took longer than 16 (serial, 7.05 ms against 6.05 ms).",
        ),
    ],
)
def test_a_threshold_from_noise_has_a_warning(
    times: Mapping[int, Sequence[tuple[float, float]]], doubt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the output, the file and the page, with what to do."""
    result = steps_of(times)
    assert result.modes[0].choice.threshold == 16
    result.print()
    printed = capsys.readouterr().out.splitlines()
    assert f"warning: {doubt}" in printed
    assert printed[-1].startswith("These thresholds are from noise: measure again")
    comments = [line.removeprefix("# ") for line in result.yaml().splitlines() if line.startswith("#")]
    assert f"warning: {doubt}" in comments
    assert printed[-1] in comments
    write_html(result, tmp_path / "dbo.html")
    assert f"<p>warning: {doubt}</p>" in (tmp_path / "dbo.html").read_text(encoding="utf-8")


def test_what_is_far_below_the_threshold_or_serial_needs_no_warning() -> None:
    times = {2: [(9.0, 9.9), (9.0, 9.9)], 4: [(3.0, 3.8), (3.0, 3.8)], **QUIET}
    assert steps_of(times).modes[0].doubts == ()
    nothing = steps_of({16: [(9.0, 9.9), (9.0, 9.9)], 32: [(8.0, 9.0), (8.0, 9.0)]})
    assert nothing.modes[0].choice.threshold is None
    assert nothing.modes[0].doubts == ()


def test_nothing_to_gain_is_written_as_serial(tmp_path: Path) -> None:
    state = measured(machine(0.0, 3e-3), 0)
    result = make_result(GRID.cells(), dict.fromkeys(GRID.modes, ARMS), state, {})
    settings = yaml.safe_load(result.yaml())
    assert settings == {"enable-dbo": False, "decode": {"schedule": "serial"}, "prefill": {"schedule": "serial"}}
    assert result.modes[0].sentence().startswith("decode: serial; no arm is faster by enough")


def test_the_page_shows_every_arm_and_needs_nothing_else(tmp_path: Path) -> None:
    state, cells, arms = a_result()
    result = make_result(cells, arms, state, {"model": "a <model> & more"})
    write_html(result, tmp_path / "dbo.html")
    page = (tmp_path / "dbo.html").read_text(encoding="utf-8")
    assert "a &lt;model&gt; &amp; more" in page
    assert page.count("<svg") == 2
    assert page.count("<polyline") == len(result.modes[0].table.arms) + len(result.modes[1].table.arms)
    assert "searched_prefill_1, 32 tokens: 2.00x" in page
    assert "http" not in page  # no script, font or picture from elsewhere
    assert "nan" not in page


@pytest.mark.skipif(not can_draw_png(), reason="matplotlib is not installed; `pip install '.[tune]'` brings it")
def test_a_png_is_drawn(tmp_path: Path) -> None:
    state, cells, arms = a_result()
    write_png(make_result(cells, arms, state, {}), tmp_path / "dbo.png")
    assert (tmp_path / "dbo.png").read_bytes().startswith(b"\x89PNG")


# -- stages ---------------------------------------------------------------------------------------------------------


def test_stage_times_come_back_from_a_program() -> None:
    times = LayerTimes(attn_prepare=1.0, attn_core=2.0, dispatch=0.5, experts=4.0, combine=0.7, shared=1.5)
    one_by_one = Schedule("one by one", points_off=KNOWN_POINTS)
    program: list[Op] = []
    for op in layer_program(times, 3, one_by_one):  # as traced: behind every launch what the transport computed
        program += [op, Compute(0.25)] if isinstance(op, Launch) else [op]
    stages = layer_times(program)
    assert stages.kinds == ("",) * 3
    assert vars(stages.times[""]) == pytest.approx({**vars(times), "attn_core": 2.25, "experts": 4.25})
    without = layer_times(layer_program(LayerTimes(attn_core=2.0, experts=4.0, dispatch=1, combine=1), 2, one_by_one))
    assert without.times[""].shared == 0
    with pytest.raises(ConfigError, match="no MoE layer"):
        layer_times([])


@pytest.mark.long
def test_stage_times_of_other_numbers_of_lanes() -> None:
    traits = All2AllTraits(True, True, False, None, 4, 1, True, cuts_combine=True)

    def of_lanes(lanes: int) -> LayerTimes:
        return LayerTimes(
            attn_core=0.1 + 1.0 / lanes,
            experts=0.2 + 2.0 / lanes,
            dispatch=0.5 / lanes,
            combine=0.6 / lanes,
            shared=0.1 / lanes,
        )

    def stages(lanes: int) -> LayerStages:
        return LayerStages({"": of_lanes(lanes)}, ("",) * 4)

    model = StageModel.fit((2, stages(2)), (4, stages(4)), 32, 4, traits)
    for lanes in (1, 3):
        times = vars(model.times(lanes, 1, True)[0])
        assert {name: times[name] for name in vars(of_lanes(lanes))} == pytest.approx(vars(of_lanes(lanes)))
    chunked = model.times(2, 2, True)[0]
    assert chunked.experts == pytest.approx(0.4 + 1.0)  # a chunk costs again what a lane costs
    assert chunked.dispatch == pytest.approx(1.48 * 0.25, rel=0.01)  # and sends some tokens twice
    assert model.times(2, 2, False)[0].dispatch == pytest.approx(0.25)
    once = StageModel.fit((2, stages(2)), (4, stages(4)), 32, 4, replace(traits, once=True)).times(2, 2, True)[3]
    assert once.dispatch == pytest.approx(0.25)  # a token travels once, most with the first chunk
    assert (once.dispatch_shares[0], once.combine_shares[1]) == pytest.approx((0.74, 0.74), abs=0.01)
    found = best_schedules(model, "prefill", [], max_lanes=2, max_chunks=1, keep=2)
    assert [arm.name for arm in found] == ["searched_prefill_1", "searched_prefill_2"]
    assert found[0].schedule.lanes == 2
    assert best_schedules(model, "prefill", [], max_lanes=1, max_chunks=1, keep=2) == []  # only ways of serial
    others = best_schedules(model, "prefill", [Arm("known", found[0].schedule)], max_lanes=2, max_chunks=1, keep=1)
    assert others[0].schedule.describe().partition(":")[2] == found[1].schedule.describe().partition(":")[2]


# -- what a traced step tells the simulator, and what it leaves out ---------------------------------------------------


@pytest.mark.parametrize("emulated", [True, False])
def test_a_step_is_traced_with_nothing_to_wait_for(emulated: bool) -> None:
    link = EmulatedLink(3600.0, 1.0)

    def step() -> None:
        with traced_step():
            trace: Any = current_trace()
            sent: Transfer[int] = Transfer("sent", (), lambda: 7, bytes_sent=1, bytes_received=1)
            assert link.carry(sent).done() is emulated
            trace.add(SpanKind.TRANSFER, "sent", 0, 1.0, 9.0)  # arrives after the lanes, or before: no part of them
            trace.add(SpanKind.COMPUTE, "dispatch", 0, 2.0, 3.0)
            trace.add(SpanKind.WAIT, "sent", 0, 3.0, 3.5)
            trace.add(SpanKind.COMPUTE, "end", 1, 4.0, 5.0)
            trace.events.append(Event(trace.step, 0, EventKind.POINT, "dispatch", 0.75))
            trace.events.append(Event(trace.step, 1, EventKind.END, "end", 0.5))

    traced = lane_programs.traced_step(step, link if emulated else None)
    assert traced.programs == [[Compute(0.75), Pass("dispatch")], [Compute(0.5)]]
    assert traced.lanes_s == 3.0
    late: Transfer[int] = Transfer("late", (), lambda: 7, bytes_sent=1)
    assert not link.carry(late).done()  # afterwards the link takes its time again


def test_prediction_is_of_every_step_with_all_ranks_together() -> None:
    """Two ranks, each slow in another of two layers; in the third step both are slow throughout."""
    schedule = get_schedule("single_batch").one_by_one()

    def layer(number: int, experts: float) -> list[Op]:
        there, back = f"dispatch.{number}", f"combine.{number}"
        prepare: list[Op] = [Compute(1.0), Launch(there, 0.0), Compute(0.0), Pass("dispatch"), Wait(there)]
        return [*prepare, Compute(experts), Launch(back, 0.0), Compute(0.0), Pass("combine"), Wait(back)]

    def rank(*experts: float) -> list[list[Op]]:
        return [[op for number, each in enumerate(experts) for op in layer(number, each)]]

    even = [rank(2.0, 2.0), rank(2.0, 2.0)]
    uneven = [rank(4.0, 2.0), rank(2.0, 4.0)]
    slow = [rank(8.0, 8.0), rank(8.0, 8.0)]
    assert lane_programs.predict_step([even], schedule) == 6.0
    assert lane_programs.predict_step([uneven], schedule) == 10.0  # either alone needs 8
    assert lane_programs.predict_step([even, uneven, slow], schedule) == 10.0
    stages = slowest_layer_times([even, uneven, slow])
    assert (stages.times[""].experts, stages.times[""].attn_prepare, stages.kinds) == (3.0, 1.0, ("", ""))


def test_steps_in_a_file_predict_the_same() -> None:
    """Of any number of steps, those in the middle are enough."""
    schedule = get_schedule("mlp_shared_overlap")

    def rank(seconds: float) -> list[list[Op]]:
        there = Launch("dispatch of layer 0", 0.25, 0.5, hooked=False)
        lane: list[Op] = [Compute(seconds), there, Pass("dispatch"), Wait(there.key), Launch("x", 0.125, 0.125)]
        return [lane, lane]

    for count in (1, 2, 5, 6):
        steps = [[rank(1.0 + 7 * step % count), rank(2.0)] for step in range(count)]
        kept = lane_programs.middle_steps(steps, schedule)
        assert len(kept) == 2 - count % 2
        assert lane_programs.read_steps(lane_programs.write_steps(kept)) == kept
        assert lane_programs.predict_step(kept, schedule) == lane_programs.predict_step(steps, schedule)
    with pytest.raises(ValueError, match="'nonsense 1' is no operation of a lane"):
        lane_programs.read_steps([[[["nonsense 1"]]]])


def gather(rank: int, ranks: int) -> tuple[list[str], list[list[list[list[Op]]]]]:
    mine: list[list[list[Op]]] = [[[Compute(0.5 + rank), Pass("dispatch")], [Launch("sent", 0.25)]], [[Wait("sent")]]]
    group = CommGroup.from_process_group()
    return lane_programs.gather_texts("ü" * 3 * rank, group), lane_programs.gather_steps(mine, group)


def test_every_rank_gets_what_all_have_measured() -> None:
    first, second = run_ranks(gather, 2)
    assert first == second
    texts, steps = first
    assert texts == ["", "üüü"]
    assert [[programs[0] for programs in step] for step in steps] == [
        [[Compute(0.5), Pass("dispatch")], [Compute(1.5), Pass("dispatch")]],
        [[Wait("sent")], [Wait("sent")]],
    ]


# -- the command ----------------------------------------------------------------------------------------------------


def test_state_is_of_one_run_only(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert load_state(path, {"model": 1}) is None
    schedule = Schedule("searched_decode_1", chunks=2)
    state = State(
        {"model": 1}, {"decode/2": {SERIAL_ARM: [1.0], "x4": None}}, {"decode": [Arm(schedule.name, schedule)]}, 1, 5.0
    )
    save_state(path, state)
    assert load_state(path, {"model": 1}) == state
    assert load_state(path, {"model": 2}) is None
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="Remove it to start anew"):
        load_state(path, {"model": 1})


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two short runs on two ranks: the second begins where the time of the first was up."""
    model = make_qwen3_moe_checkpoint(tmp_path / "model")
    out = tmp_path / "dbo.yaml"
    words = ["tune", str(model), "--out", str(out), "--lanes", "2", "--modes", "decode", "verify", "--search-best", "1"]
    words += ["--max-decode-tokens", "8", "--context", "8", "--emulated-link", "100", "50", "--draft-tokens", "1"]
    kept: list[State] = []

    def keep(path: Path, missing_ok: bool) -> None:  # in place of removing the state at the end
        state = load_state(path, serving.workbench.tuning.tune._key(command))
        assert state is not None
        kept.append(state)

    command = serving.workbench.tuning.tune.read("ubatch tune", "", [*words[1:], "--rounds", "1"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", keep)
        assert main([*words, "--rounds", "1"]) == 0
    assert kept[0].rounds == 1
    capsys.readouterr()
    assert main([*words, "--rounds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "going on after" in shown
    assert "2 whole rounds" in out.read_text(encoding="utf-8")
    assert "single_batch" in shown
    assert not out.with_name("dbo.yaml.state.json").exists()
    assert out.with_suffix(".html").exists()
    UBatchConfig.from_yaml(out)


def test_pages_may_be_larger_than_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """They are the scheduler's steps, and there is none: it has no flag for them."""
    assert main(["tune", TINY, "--block-size", "4096", "--print-config"]) == 0
    assert "block-size: 4096" in capsys.readouterr().out
