"""What benchmarks reckon from what they measured: bounds, best settings, pooled forwards, gaps, parts of a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from repository import TINY_MOE

from model_runner import RandomQwen3Moe, make_random_qwen3_moe
from model_runner.decoder.repeated import RepeatedLayers
from moe import EmulatedLink
from serving import LLM
from serving.ranks import run_ranks
from serving.workbench.arms.cells import SERIAL_ARM, Cell, Setting
from serving.workbench.bench.generate import completions
from serving.workbench.bench.runtime import auto, overlap
from serving.workbench.bench.server import fairness, step
from serving.workbench.bench.server import load as serve_load
from serving.workbench.bench.server.load import ServedModel, Spread
from serving.workbench.bench.server.requests import Outcome, Server, Status, Task
from serving.workbench.bench.server.step import _BOUNDARIES, Kind, Stopwatch
from serving.workbench.bench.statistics import interleave_arms, table
from serving.workbench.bench.step_setting import Setting as StepSetting
from serving.workbench.bench.step_setting import open_setting
from ubatch import SCHEDULES, Schedule, UBatchConfig, UBatchError
from ubatch.schedules.simulator import Compute

pytestmark = pytest.mark.long

SMALL = RandomQwen3Moe(hidden_size=64, num_hidden_layers=2, vocab_size=512)
PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
OF_LAYERS = {Kind.ATTENTION, Kind.PROJECTIONS, Kind.EXPERTS, Kind.ROUTER, Kind.SMALL}


def test_arms_run_there_and_back_and_may_have_several_figures() -> None:
    order: list[str] = []

    def one() -> float:
        order.append("a")
        return float(len(order))

    def two() -> dict[str, float]:
        order.append("b")
        return {"time": 1.0, "share": float(len(order))}

    found = interleave_arms({"one": one, "two": two}, 2, show=False)
    assert "".join(order) == "ab" + 2 * "abba", "after a round that does not count"
    assert found == {"one": [4.5, 8.5], "time": [1.0, 1.0], "share": [4.5, 8.5]}


def test_a_table_has_a_format_for_each_column_and_dashes() -> None:
    assert table({"": "", "ms": ".1f", "share": ".0%"}, [("one", 2.0, 0.5), ("two", 10.0, None)], 0).splitlines() == [
        "       ms  share",
        "one   2.0    50%",
        "two  10.0      -",
    ]


# -- overlap -----------------------------------------------------------------------------------------------------------


def test_no_step_passes_the_bound() -> None:
    """Lanes one after the other may compute for longer than the overlapped step takes: it reads weights once."""
    step, link = [100.0, 104.0, 98.0], [90.0] * 3
    for split, own in ((120.0, 95.0), (90.0, 97.0), (60.0, 60.0)):
        arms = {"serial_unsplit": [190.0] * 3, "serial_4": [200.0] * 3, "overlapped_4": step, "ideal_4": [99.0] * 3}
        arms |= {"compute_unsplit": [100.0] * 3, "split_compute_4": [split] * 3}
        arms |= {"own_compute_4": [own] * 3, "communication_4": link}
        result = overlap._lane_result(arms, 4, [4])
        compute = min(split, own)
        assert result.efficiency.median == pytest.approx(max(compute, 90.0) / 100.0)
        assert result.hidden.median == pytest.approx((compute + 90.0 - 100.0) / min(compute, 90.0))
        assert result.efficiency.high <= 1.0
        assert result.speedup.median == 1.9
        assert result.of_bound.median == pytest.approx(1.9 / (190.0 / max(split, 90.0)))


def test_the_ideal_machine_computes_as_long_as_the_bound_takes_for_compute() -> None:
    """Else each lane more made a step look better than ideal, and void: four lanes, one by one, took 4% longer."""
    steps = [[[[Compute(0.03)], [Compute(0.03)]]] * 2]
    arms = {"split_compute_2": [60.0, 62.0, 60.0], "own_compute_2": [54.0, 54.0, 70.0]}
    assert overlap._ideal_ms(arms, 2, steps, SCHEDULES["mlp_shared_overlap"]) == pytest.approx(54.0)
    arms["own_compute_2"] = [80.0] * 3
    assert overlap._ideal_ms(arms, 2, steps, SCHEDULES["mlp_shared_overlap"]) == pytest.approx(60.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_schedule_that_computes_something_else_is_refused(dtype: torch.dtype) -> None:
    plain = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    wrong = plain.clone()
    wrong[5] = plain[6]

    class WrongInThree(StepSetting):
        def step(self, schedule: Schedule) -> torch.Tensor:
            return wrong if schedule.lanes == 3 else plain

    setting = WrongInThree(torch.nn.Identity(), UBatchConfig(), None, EmulatedLink(0.0, 1.0))
    setting.check_equal([setting.schedule(2)])
    with pytest.raises(UBatchError, match="computes something else"):
        setting.check_equal([setting.schedule(2), setting.schedule(3)])


@pytest.mark.wide
def test_the_ranks_compute_in_the_dtype_asked_for(tmp_path: Path) -> None:
    make_random_qwen3_moe(tmp_path, size=SMALL)
    options = overlap.Options(model=tmp_path, sequences=2, sequence_length=32, dtype="bfloat16")
    assert run_ranks(_dtype_in_lanes, 2, options, tmp_path) == "torch.bfloat16"


@torch.inference_mode()
def _dtype_in_lanes(rank: int, world_size: int, options: overlap.Options, model: Path) -> str:
    with open_setting(rank, options, model) as setting:
        setting.check_equal([setting.schedule(2)])
        return str(setting.step(setting.schedule(2)).dtype)


# -- auto --------------------------------------------------------------------------------------------------------------


def test_the_load_is_mixed_and_the_same_on_every_rank() -> None:
    options = auto.Options(model=TINY_MOE)
    load = list(auto.mixed_load(options))
    assert load == list(auto.mixed_load(options))
    assert len(load) == options.steps
    prefills = [cell.tokens for cell in load if cell.mode == "prefill"]
    decodes = [cell.tokens for cell in load if cell.mode == "decode"]
    assert 0.1 < len(prefills) / len(load) < 0.5
    assert max(prefills) == options.max_prefill_tokens
    assert max(decodes) <= options.max_decode_tokens
    assert max(decodes) - min(decodes) > 30


def test_the_best_fixed_setting_is_reckoned() -> None:
    load = [Cell("decode", tokens) for tokens in (8, 16, 32, 64)] + [Cell("prefill", 64)]
    seconds = {
        SERIAL_ARM: [1.0, 2.0, 3.0, 4.0, 1.0],
        "two": [2.0, 2.5, 2.5, 3.0, 2.0],
        "three": [3.0, 3.0, 2.9, 2.9, 3.0],
    }
    assert auto.best_fixed(load, seconds) == {"decode": Setting("two", 32), "prefill": Setting()}


def test_arms_that_ran_alike_are_pooled() -> None:
    """Auto ran the first step serially, with a little luck, and the second like an arm that was declined."""
    forwards = {SERIAL_ARM: [1.0, 2.0], "two": [0.6, 2.4], "auto": [0.8, 1.6]}
    before = {SERIAL_ARM: 0.1, "two": 0.2, "auto": 0.4}
    seconds = {name: [each + before[name] for each in values] for name, values in forwards.items()}
    schedules = {SERIAL_ARM: ["", ""], "two": ["2 lanes", ""], "auto": ["", ""]}
    found = auto.pooled(seconds, forwards, schedules)
    assert found[SERIAL_ARM] == pytest.approx([1.0, 2.1])
    assert found["two"] == pytest.approx([0.8, 2.2])
    assert found["auto"] == pytest.approx([1.3, 2.4])


# -- fairness ----------------------------------------------------------------------------------------------------------


def test_only_gaps_while_prompts_are_served_count() -> None:
    stream = Outcome(0, Status.OK, sent_s=1.0, latency_s=2.0, ttft_s=0.5, gaps_s=(0.1, 0.2, 0.3, 0.4))
    # Its tokens come at 1.5, 1.6, 1.8, 2.1 and 2.5.
    assert stream.gaps_between(1.7, 2.0) == [0.2, 0.3]
    assert stream.gaps_between(0.0, 9.0) == [0.1, 0.2, 0.3, 0.4]
    assert stream.gaps_between(5.0, 9.0) == [], "it had ended"


def test_a_visit_is_written_without_every_gap() -> None:
    alone, mixed = Spread.of([0.01] * 99 + [0.02] * 2), Spread.of([0.01] * 50 + [0.06] * 50)
    expected = {"median_alone_ms": 10.0, "p99_alone_ms": 20.0, "median_mixed_ms": 35.0, "p99_mixed_ms": 60.0}
    assert fairness.Round(alone, mixed, 7.0).as_json() == pytest.approx(expected | {"tokens_per_s": 7.0})


def fake_run(monkeypatch: pytest.MonkeyPatch, gap_s: float) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Let `run` measure nothing; returns what is sent, as (arm, prompts), while it runs."""
    sent: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
    numbers = count()

    @contextmanager
    def running(model: Path, flags: list[str]) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(base_url=f"http://arm{next(numbers)}")

    async def served(server: Server, name: str | None) -> ServedModel:
        return ServedModel("tiny", None)

    async def tokens(server: Server) -> list[int]:
        return list(range(100))

    async def send(server: Server, tasks: list[Task], *, max_concurrency: int | None = None) -> list[Outcome]:
        sent.append((server.base_url, tuple(tuple(map(int, task.prompt)) for task in tasks)))
        return [
            Outcome(task.index, Status.OK, task.start_s, 0.2, ttft_s=0.0, gaps_s=(gap_s,) * 4, output_tokens=5)
            for task in tasks
        ]

    monkeypatch.setattr(fairness, "running_server", running)
    monkeypatch.setattr(fairness, "served_model", served)
    monkeypatch.setattr(serve_load, "token_pool", tokens)
    monkeypatch.setattr(fairness, "send_and_check", send)
    monkeypatch.setattr(fairness._Arm, "overlapped", lambda arm: 0.0)
    return sent


def test_every_arm_of_a_sweep_gets_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = fake_run(monkeypatch, gap_s=0.1)
    fairness.run(fairness.Options(model=TINY_MOE, rounds=2))
    visits = [(sent[at][0], [prompts for _, prompts in sent[at : at + 3]]) for at in range(12, len(sent), 3)]
    assert len(visits) == 4 * 4
    sweeps = [visits[at : at + 4] for at in range(0, 16, 4)]
    for sweep in sweeps:
        assert len({arm for arm, _ in sweep}) == 4
        assert all(requests == sweep[0][1] for _, requests in sweep)
    assert len({str(sweep[0][1]) for sweep in sweeps}) == 4, "else the prefix cache has them"


def test_streams_that_end_before_the_first_prompt_comes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(monkeypatch, gap_s=0.001)
    with pytest.raises(UBatchError, match="raise --output-len"):
        fairness.run(fairness.Options(model=TINY_MOE, rounds=2))


# -- step --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(step.time, "perf_counter", lambda: now[0])
    return now


def test_a_moment_counts_once(clock: list[float]) -> None:
    """For what began last; the gate's product is the router's, and the experts' own is not the projections'."""
    watch = Stopwatch()

    def spend(seconds: float, *inner: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for each in inner:
                each()
            clock[0] += seconds

        return run

    product = watch.timed(Kind.PROJECTIONS, spend(1.0))
    gate = watch.timed(Kind.ROUTER, spend(2.0, product))
    experts = watch.timed(Kind.EXPERTS, spend(4.0, product))
    spend(8.0, gate, experts, product)()
    watch._charge()
    expected = {Kind.ROUTER: 3.0, Kind.EXPERTS: 4.0, Kind.PROJECTIONS: 2.0, Kind.OTHER: 8.0}
    assert {kind: seconds for kind, seconds in watch._seconds.items() if seconds} == expected


@needs_c
@pytest.mark.parametrize("backend", ["native", "grouped"])
def test_every_kind_of_work_is_found(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps whose recorded kernel calls are repeated, too. Afterwards all functions are what they were."""
    models: list[RepeatedLayers] = []
    make = RepeatedLayers.__init__
    monkeypatch.setattr(RepeatedLayers, "__init__", lambda self, *args: models.append(self) or make(self, *args))
    before = [vars(owner)[name] for _, owner, names in _BOUNDARIES for name in names]
    options: dict[str, Any] = {"moe_backend": backend, "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(TINY_MOE, **options) as llm:
        watch = Stopwatch()
        with watch.steps(split=True) as steps:
            completions(llm, PROMPTS, 10)
        assert sum(each.repetitions for each in models) == (6 if backend == "native" else 0)
        with watch.steps(split=False) as plain:
            completions(llm, PROMPTS, 3)
    assert [vars(owner)[name] for _, owner, names in _BOUNDARIES for name in names] == before
    assert len(steps) == 10
    for each in steps:
        assert all(each[kind] > 0 for kind in Kind), each
    assert len(plain) == 3
    repeated = {kind for each in plain for kind, seconds in each.items() if seconds}
    assert repeated == ({Kind.OTHER} | OF_LAYERS if backend == "native" else {Kind.OTHER})  # recorded with clocks
