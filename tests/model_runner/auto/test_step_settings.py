"""`--enable-dbo` as the runner asks it: what is timed and told in the votes, alone and on two ranks."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_qwen3_moe_checkpoint
from request_steps import admitted, step

import model_runner
from model_runner import ModelRunner, ScheduledRequest
from model_runner.auto import step_settings
from model_runner.auto.dbo_policy import Policy, Seen
from model_runner.auto.step_settings import Proposal, StepSettings
from model_runner.auto.step_stages import Stages
from ranks import run_ranks
from serving.engine import EngineOptions
from serving.engine.rank.build import make_core, make_runner
from serving.options import read_serve_command
from serving.scheduler import SchedulerConfig
from tests.support.shaped_steps import shaped_step
from ubatch import SCHEDULES, CommGroup, Decision, DeclineReason, ForwardMode, UBatchConfig, fingerprint
from ubatch.schedules.modes import ModeSettings

DECODES, PREFILL = shaped_step([1] * 64, ForwardMode.DECODE), shaped_step([128], ForwardMode.PREFILL)


def decided(*rows: int, told: tuple[int, ...] = ()) -> Decision:
    """What ranks with so many decodes agreed on, and what each of them told."""
    modes = (fingerprint(ForwardMode.DECODE),) * len(rows)
    return Decision(False, None, None, tuple((tokens,) for tokens in rows), modes=modes, told=(told,) * len(rows))


def test_on_a_gpu_the_time_is_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for them until they are old."""
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    auto = StepSettings(UBatchConfig(), None, torch.device("cuda"))
    for _ in range(40):
        told = auto.settings(DECODES).told
        with auto.timed(decided(64, told=told)):
            log.append("forward")
    waits = 0
    for place, what in enumerate(log):
        waits += what == "wait"
        assert log[:place].count("forward") >= waits + 4 or what != "wait"  # the last four may still run
    found = auto.policy
    assert 5 <= found.timed == waits <= 36
    assert found.kinds["decode"].sizes[64].seconds.value == pytest.approx(math.log(0.003))


@pytest.mark.parametrize(
    "config",
    [
        UBatchConfig(enable_dbo=False),
        UBatchConfig(require_overlap=True),
        UBatchConfig(schedule="serial"),
        UBatchConfig(modes=dict.fromkeys(("decode", "prefill", "verify"), ModeSettings(token_threshold=64))),
    ],
)
def test_where_nothing_is_to_be_decided_the_runners_settings_stand(config: UBatchConfig) -> None:
    auto = StepSettings(config, None, torch.device("cpu"))
    assert auto.settings(DECODES) == auto.settings(PREFILL) == Proposal()
    with auto.timed(decided(64)):
        pass
    assert (dict(auto.reasons()), auto.policy.timed) == ({}, 0)


def test_a_kind_with_a_threshold_keeps_it() -> None:
    config = UBatchConfig(num_ubatches=3, modes={"prefill": ModeSettings(token_threshold=64)})
    auto = StepSettings(config, None, torch.device("cpu"), kinds=("decode", "prefill"))
    proposal = auto.settings(PREFILL)
    assert proposal.settings is not None
    assert not proposal.no_gain
    assert proposal.settings.for_mode(ForwardMode.PREFILL).token_threshold == 64
    assert auto.settings(DECODES).no_gain  # nothing is known yet
    assert proposal.settings.for_mode(ForwardMode.DECODE).schedule.lanes == 3
    assert proposal.settings.for_mode(ForwardMode.DECODE).token_threshold == 3  # if it is not declined, it overlaps
    assert list(auto.reasons()) == ["decode"]


def test_an_idle_rank_knows_the_schedules_of_the_others() -> None:
    own = replace(SCHEDULES["two_batch_decode"].with_lanes(3), name="mine")
    auto = StepSettings(UBatchConfig(modes={"decode": ModeSettings(own)}), None, torch.device("cpu"))
    config, declined, _ = auto.settings(shaped_step([], ForwardMode.IDLE))
    assert not declined
    assert config is not None
    agreed = replace(decided(64, 0), engaged=True, schedule=fingerprint(own.describe()), tokens=((1,) * 3,) * 2)
    assert config.agreed_schedule(agreed, ForwardMode.IDLE).describe() == own.describe()


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), ("decode", "prefill", "verify")),
        (("--dbo-decode-token-threshold", "32"), ("prefill",)),
        (("--dbo-prefill-token-threshold", "512"), ("decode", "verify")),
        (("--dbo-decode-token-threshold", "8", "--dbo-prefill-token-threshold", "64"), ()),
    ],
)
def test_given_thresholds_are_obeyed(words: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    serve = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel"]
    assert read_serve_command("serve", "", [*serve, "--enable-dbo", *words]).engine.dbo_kinds == kinds
    assert read_serve_command("serve", "", serve).engine.dbo_kinds == ()


def test_a_threshold_in_the_file_is_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    file.write_text("decode:\n  token-threshold: 24\nprefill:\n  schedule: two_batch_prefill\n")
    words = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo"]
    engine = read_serve_command("serve", "", [*words, "--config", str(file)]).engine
    assert engine.dbo_kinds == ("prefill", "verify")


class TwoRanks:
    """Another connection is another group."""

    rank, size, connection = 0, 2, object()

    def usable_connection(self) -> object:
        return self.connection


def test_a_step_that_fails_has_no_time() -> None:
    auto = StepSettings(UBatchConfig(), None, torch.device("cpu"))
    for number in range(8):
        told = auto.settings(DECODES).told
        assert bool(told) == (number % 2 == 1)  # every other one failed
        with suppress(ZeroDivisionError), auto.timed(decided(64, told=told)):
            1 // ((number + 1) % 2)
    assert auto.policy.timed == 4


def test_a_step_is_learned_only_if_every_rank_tells_its_time() -> None:
    auto = StepSettings(UBatchConfig(), TwoRanks(), torch.device("cpu"))  # type: ignore[arg-type]
    for others, timed in (((), 0), ((), 0), (None, 1)):
        told = auto.settings(DECODES).told
        with auto.timed(replace(decided(64, 64), told=(told, told if others is None else others))):
            pass
        assert auto.policy.timed == timed


def test_ranks_begin_anew_after_a_reset() -> None:
    """They may have counted differently when the group broke."""
    group = TwoRanks()
    auto = StepSettings(UBatchConfig(), group, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(3):
        told = auto.settings(DECODES).told
        with auto.timed(decided(64, 64, told=told)):
            pass
    assert auto.policy.timed == 2
    group.connection = object()
    assert auto.settings(DECODES).told == ()
    assert auto.policy.timed == 0


def test_the_old_flag_is_deprecated(tmp_path: Path) -> None:
    """What it decided, `--enable-dbo` decides."""
    words = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo"]
    settings = read_serve_command("serve", "", [*words, "--dbo-auto"]).settings
    assert any(each.startswith("--dbo-auto (true) has no effect: it is gone in the next") for each in settings.notes)
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    with (
        pytest.warns(DeprecationWarning, match="dbo_auto is gone in the next release"),
        ModelRunner(path, num_kv_blocks=8, dbo=UBatchConfig(), dbo_auto=True) as runner,
    ):
        assert list(runner.step_settings.reasons()) == ["decode", "prefill", "verify"]


def test_statistics_of_an_engine_say_what_is_decided(tmp_path: Path) -> None:
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    scheduler = SchedulerConfig(max_model_len=64)
    with make_runner(EngineOptions(path, dbo=UBatchConfig(), dbo_kinds=("decode",), scheduler=scheduler)) as runner:
        told = make_core(EngineOptions(path, scheduler=scheduler), runner).statistics().dbo_auto
    assert told == {"decode": "serial: nothing is measured yet"}


# -- the runner -----------------------------------------------------------------------------------------------------


MEASURED: list[Stages] = []


class Optimist(Policy):
    """Told that lanes take half the time."""

    def learn(self, step: Seen, stages: Stages) -> bool:
        if not step.overlapped:
            MEASURED.append(stages)
        made_up = Stages(0.5) if step.overlapped else Stages(1.0, 0.2, 0.2, 0.3, 0.3, layers=4)
        return super().learn(step, made_up)


def decode_steps(rank: int, world_size: int, path: str) -> dict[str, object]:
    """Two ranks decode; the times are made up."""
    group = CommGroup.from_process_group(timeout_s=20)
    MEASURED.clear()
    dbo = UBatchConfig(modes={"prefill": ModeSettings(token_threshold=4)})
    with ModelRunner(path, group=group, num_kv_blocks=96, block_size=8, dbo=dbo) as runner:
        step_settings.Policy = Optimist
        runner.step_settings = StepSettings(runner.dbo, group, runner.device)
        tokens, modes = run_steps(runner, rank)
        policy = runner.step_settings.policy
        overlapping = {size: own.overlaps for size, own in policy.kinds["decode"].sizes.items()}
        found = {"timed": policy.timed, "overlapping": overlapping}
        declined = runner.statistics().declined
    return {"tokens": tokens, "modes": modes, "found": found, "declined": declined, "measured": list(MEASURED)}


def plain_steps(rank: int, world_size: int, path: str) -> list[object]:
    group = CommGroup.from_process_group(timeout_s=20)
    with ModelRunner(path, group=group, num_kv_blocks=96, block_size=8, dbo=UBatchConfig(enable_dbo=False)) as runner:
        assert not runner.step_settings.reasons()
        return run_steps(runner, rank)[0]


def run_steps(runner: ModelRunner, rank: int) -> tuple[list[object], list[tuple[bool, int]]]:
    """A prefill and 49 decodes; the new tokens, and whether each step overlapped, in how many lanes."""
    requests = admitted(runner, [[1 + rank, 2, 3]] * (8 if rank else 9))
    outputs = [
        step(runner, [ScheduledRequest(each, each.num_uncomputed_tokens) for each in requests]) for _ in range(50)
    ]
    modes = [(output.decision.engaged, output.decision.num_lanes) for output in outputs]
    return [output.tokens for output in outputs], modes


def test_two_ranks_decide_alike(tmp_path: Path) -> None:
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    first, second = run_ranks(decode_steps, 2, str(path))
    assert first["modes"] == second["modes"]
    assert first["found"] == second["found"]
    assert first["modes"][0] == (True, 2)  # the prefill, by its own threshold
    assert not first["modes"][1][0]  # decodes begin serially
    assert first["modes"][-1][0]
    assert first["found"]["overlapping"] == {8: True}
    assert first["found"]["timed"] >= 10
    assert set(first["declined"]) == {DeclineReason.NO_GAIN_EXPECTED}
    assert first["measured"] == second["measured"]  # all ranks learn the same of a step
    assert all(each.attention > 0 and each.experts > 0 and each.layers > 0 for each in first["measured"])
    assert all(0 <= each.waits < each.seconds for each in first["measured"])
    reference, _ = run_ranks(plain_steps, 2, str(path))
    assert first["tokens"] == reference


def test_the_old_name_still_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"It is model_runner\.StepSettings"):
        assert model_runner.DboAuto is StepSettings
