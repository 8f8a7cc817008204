"""`--dbo-auto` and the search: a schedule that promises more than the usual arms becomes one, alike on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from checkpoints import make_qwen3_moe_checkpoint

from model_runner import DboAuto, ModelRunner, SamplingParams, generate
from model_runner.auto.dbo_model import Seen
from model_runner.auto.dbo_policy import Policy
from moe import All2AllTraits
from ranks import run_ranks
from serving.engine import EngineOptions
from serving.engine.rank.build import make_runner, warm_up
from serving.scheduler import SchedulerConfig
from serving.tuning import auto as auto_search
from serving.tuning.auto import Room, prepare_auto
from serving.tuning.cells import Arm, Cell, Grid
from serving.tuning.stages import StageModel, better_schedule
from serving.tuning.steps import ArmSteps
from ubatch import SCHEDULES, CommGroup, ConfigError, Schedule, UBatchConfig
from ubatch.schedules.cost_table import Setting
from ubatch.schedules.layer_program import LayerTimes
from ubatch.schedules.modes import ModeSettings

pytestmark = pytest.mark.long

DEFAULT = SCHEDULES["mlp_shared_overlap"]
USUAL = (DEFAULT, DEFAULT.with_lanes(3), SCHEDULES["single_batch"])
MINE = Schedule("mine", lanes=2, chunks=2)


def stages(attention: float, experts: float, *, max_chunks: int = 4) -> StageModel:
    """Communication as long as compute; nothing is paid twice."""
    traits = All2AllTraits(True, True, False, None, max_chunks, 1, True, cuts_combine=True, once=True)
    half = (attention + experts) / 2
    whole = LayerTimes(attn_core=attention, experts=experts, dispatch=half, combine=half)
    nothing = LayerTimes(attn_core=0.0, experts=0.0, dispatch=0.0, combine=0.0)
    return StageModel(nothing, whole, 24, 32, 4, traits)


@pytest.mark.slow
def test_only_what_promises_more_than_the_usual_arms() -> None:
    found = better_schedule(stages(0.3, 0.7), "prefill", USUAL)
    assert found is not None
    assert (found.name, found.schedule.name) == ("searched_prefill", "searched_prefill")
    assert found.schedule.lanes * found.schedule.chunks > 2  # two lanes reach 0.83 of the bound here
    assert better_schedule(stages(0.3, 0.7), "prefill", (*USUAL, found.schedule)) is None
    assert better_schedule(stages(0.5, 0.5), "prefill", USUAL) is None  # two lanes reach 0.99
    spared = tuple(replace(each, comm_sms=16) for each in USUAL)  # as a configuration may have it
    assert better_schedule(stages(0.5, 0.5), "prefill", spared) is None
    dear = replace(stages(0.3, 0.7), fixed=LayerTimes(attn_core=9.0, experts=9.0, dispatch=9.0, combine=9.0))
    assert better_schedule(dear, "prefill", USUAL) is None  # serial is best


def test_an_arm_is_added_before_the_first_step() -> None:
    auto = DboAuto(UBatchConfig(modes={"prefill": ModeSettings("serial")}), None, torch.device("cpu"), max_chunks=2)
    assert tuple(auto.arms("decode").values()) == USUAL
    assert auto.arms("prefill") == {}
    auto.add_arm("decode", MINE)
    assert tuple(auto.arms("decode").values()) == (*USUAL, MINE)
    assert tuple(auto.arms("verify").values()) == USUAL
    with pytest.raises(ConfigError, match="decode steps cannot get the arm 'mine': they have one of this name"):
        auto.add_arm("decode", MINE)
    with pytest.raises(ConfigError, match=r"prefill steps have no arm 'mine'\. They have: none"):
        auto.arm_settings("prefill", "mine")
    with pytest.raises(ConfigError, match="prefill steps cannot get the arm 'mine': they do not overlap"):
        auto.add_arm("prefill", MINE)


class Sure(Policy):
    """Runs every decode in the arm that was found, and nothing else overlapped."""

    told: Sequence[tuple[Seen, float]] = ()

    def measured(self, times: Sequence[tuple[Seen, float]]) -> None:
        self.told = times

    def setting(self, kind: str, tokens: int) -> Setting:
        return Setting("mine", 4) if kind == "decode" else Setting()


def serve_on_rank(rank: int, world_size: int, path: str) -> dict[str, object]:
    """What the search says is made up, on rank 0; that it is asked, and what becomes of its answer, is real."""
    group = CommGroup.from_process_group(timeout_s=20)
    dbo = UBatchConfig(timeout_s=20, modes={"prefill": ModeSettings(token_threshold=64)})
    scheduler = SchedulerConfig(max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64)
    options = EngineOptions(
        Path(path), dbo=dbo, dbo_auto=True, scheduler=scheduler, data_parallel_size=2, enable_expert_parallel=True
    )
    asked: list[tuple[StageModel, str, tuple[str, ...]]] = []

    def better(model: StageModel, mode: str, known: tuple[Schedule, ...]) -> Arm:
        asked.append((model, mode, tuple(each.name for each in known)))
        return Arm("mine", MINE)

    with make_runner(options, group) as runner:
        assert isinstance(runner.step_settings, DboAuto)
        runner.step_settings._make_policy = Sure
        free = runner.free_kv_tokens
        with mock.patch.object(auto_search, "better_schedule", better):
            warm_up(options, runner)
        assert runner.free_kv_tokens == free
        assert runner.step_settings.statistics().steps == 0  # those of warming up say nothing
        arms = {kind: tuple(runner.step_settings.arms(kind).values()) for kind in ("decode", "prefill", "verify")}
        measured = runner.step_settings._policy.told
        tokens, engaged = decode(runner)
    return {"asked": asked, "arms": arms, "tokens": tokens, "engaged": engaged, "measured": measured}


PREFILLS = ["prefill/512", "prefill/128", "prefill/32", "prefill/8"]
ROOMS: list[tuple[Room, int, int, list[str], list[str]]] = [
    (Room(1, 512), 256, 90, [], []),  # a prefill that fits into one request is cut into two
    (Room(2, 512), 63, 4, [], []),  # an odd one into three
    (Room(16, 512, draft_tokens=3), 4, 90, [], []),  # drafts do not fit into the longest request
    (Room(16, 512, draft_tokens=3), 1, 90, [], []),
    (
        *(Room(15, 4, draft_tokens=8), 256, 150, ["decode/15", "verify/135"]),
        ["decode/15", "verify/135", "verify/33"],  # in 8 tokens there is no request with its drafts
    ),
    (Room(7, 512), 256, 90, ["prefill/512"], PREFILLS),  # too few decodes to cut
    (Room(2, 252), 63, 90, ["prefill/126"], ["prefill/126"]),  # a quarter of it would be cut into three
    # as many as fit on the rank with less memory
    (Room(16, 512), 256, 63, ["decode/12", "prefill/512"], ["decode/12", *PREFILLS]),
    (
        *(Room(16, 512, draft_tokens=3), 256, 90, ["decode/16", "prefill/512", "verify/64"]),
        ["decode/16", *PREFILLS, "verify/64", "verify/16"],
    ),
]
"""Room, longest request, blocks of 16 tokens on the first rank; what is searched for, and what is run in all arms."""


def small_rooms_on_rank(rank: int, world_size: int, path: str) -> list[tuple[list[str], list[str], bool]]:
    """Ranks with unequal memory, and limits that leave no room for one kind of step or another."""
    group = CommGroup.from_process_group(timeout_s=20)
    search, measure, found = auto_search._search, auto_search._measure, []

    def measuring(auto: DboAuto, runner: ModelRunner, cell: Cell, grid: Grid) -> None:
        measured.append(str(cell))
        measure(auto, runner, cell, grid)

    def searching(auto: DboAuto, runner: ModelRunner, steps: ArmSteps, cell: Cell, grid: Grid) -> Arm | None:
        asked.append(str(cell))
        return search(auto, runner, steps, cell, grid)

    for room, longest, blocks, *_ in ROOMS:
        asked: list[str] = []
        measured: list[str] = []
        with (
            ModelRunner(
                path,
                group=group,
                dbo=UBatchConfig(timeout_s=20),
                dbo_auto=True,
                max_num_seqs=room.max_num_seqs,
                max_model_len=longest,
                num_kv_blocks=blocks + 40 * rank,
            ) as runner,
            mock.patch.object(auto_search, "better_schedule", return_value=None),
            mock.patch.object(auto_search, "_search", searching),
            mock.patch.object(auto_search, "_measure", measuring),
            mock.patch.object(auto_search, "_below_threshold", return_value=0),
        ):
            assert isinstance(runner.step_settings, DboAuto)
            assert prepare_auto(runner.step_settings, runner, room) == {}
            free = runner.request_table.num_free_rows == room.max_num_seqs and not runner.allocator.num_used
            known = {(seen.kind, seen.most) for seen, _ in runner.step_settings._known}
            assert len(known) == len(measured)
        found.append((asked, measured, free))
    return found


@pytest.mark.slow
def test_ranks_with_little_room_leave_out_the_same_kinds(tmp_path: Path) -> None:
    path = str(make_qwen3_moe_checkpoint(tmp_path / "model"))
    first, second = run_ranks(small_rooms_on_rank, 2, path)
    expected = [(asked, measured) for *_, asked, measured in ROOMS]
    for found in (first, second):
        assert [(asked, measured) for asked, measured, _ in found] == expected
        assert all(free for *_, free in found), "rows and blocks are given back"


def test_one_rank_alone_measures_its_arms(tmp_path: Path) -> None:
    """Nothing travels and nothing is searched; on a CPU lanes gain nothing then."""
    with ModelRunner(make_qwen3_moe_checkpoint(tmp_path / "model"), dbo_auto=True, max_num_seqs=8) as runner:
        auto = runner.step_settings
        assert isinstance(auto, DboAuto)
        assert prepare_auto(auto, runner, Room(8, 16)) == {}
        sizes = {(seen.kind, seen.most) for seen, _ in auto._known}
        assert sizes - {("prefill", 8)} == {("decode", 8), ("prefill", 16)}
        assert all(seconds > 0 for _, seconds in auto._known)
        assert auto.reasons()["decode"].split(";")[1].startswith(" against serial, by tokens: 8: ")
        assert auto.statistics().steps == 0


def test_the_size_below_the_smallest_that_overlaps_is_measured_too() -> None:
    cells = [Cell("decode", tokens) for tokens in (128, 64, 32, 16, 8)]  # the first, third and fifth were
    for threshold, expected in ((None, 0), (128, 64), (96, 64), (32, 16), (24, 16), (8, 0), (1000, 0)):
        auto = mock.Mock(spec=DboAuto)
        auto.statistics().settings = {"decode": Setting("two", threshold)}
        assert auto_search._below_threshold(auto, "decode", cells) == expected


def decode(runner: ModelRunner) -> tuple[list[tuple[int, ...]], int]:
    before = runner.statistics().engaged
    results = generate(runner, [[1 + each, 2, 3] for each in range(8)], SamplingParams(max_tokens=6, ignore_eos=True))
    return [result.token_ids for result in results], runner.statistics().engaged - before


def plain_on_rank(rank: int, world_size: int, path: str) -> list[tuple[int, ...]]:
    group = CommGroup.from_process_group(timeout_s=20)
    with ModelRunner(path, group=group, dbo=UBatchConfig(enable_dbo=False)) as runner:
        return decode(runner)[0]


def test_what_was_found_at_the_start_runs_on_all_ranks(tmp_path: Path) -> None:
    path = str(make_qwen3_moe_checkpoint(tmp_path / "model"))
    first, second = run_ranks(serve_on_rank, 2, path)
    assert [mode for _, mode, _ in first["asked"]] == ["decode"]  # prefills are tuned, and nothing verifies
    model, _, known = first["asked"][0]
    assert known == tuple(each.name for each in USUAL)
    assert model.layers > 0
    assert model.times(2, 1, True).compute_s > 0  # of what grows with the tokens a model so small shows only noise
    assert not second["asked"]
    assert first["measured"] == second["measured"]  # times of the slowest rank
    runs = Counter((seen.kind, seen.fewest, seen.arm) for seen, _ in first["measured"])
    assert {(kind, tokens) for kind, tokens, _ in runs} == {("decode", 16)}  # a quarter of it is too few
    two, three = (f"{DEFAULT.name} in {lanes} lanes" for lanes in (2, 3))
    assert {arm for *_, arm in runs} == {"serial", two, three, "single_batch", "mine"}
    assert min(runs.values()) >= 2
    for told in (first, second):
        assert told["arms"] == {"decode": (*USUAL, MINE), "prefill": USUAL, "verify": USUAL}
        assert told["engaged"] == 5  # every decode step; the prefill gives the first token
    assert [first["tokens"], second["tokens"]] == run_ranks(plain_on_rank, 2, path)
