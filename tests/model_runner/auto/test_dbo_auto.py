"""`--dbo-auto` as the runner asks it: what is timed, exchanged and begun with, alone and on two ranks."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_qwen3_moe_checkpoint

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest
from model_runner.auto.dbo_auto import DboAuto
from model_runner.auto.dbo_model import Seen
from model_runner.auto.dbo_policy import Policy
from model_runner.step.dp import BatchShape
from ranks import run_ranks
from serving.engine import EngineOptions
from serving.engine.rank.build import make_core, make_runner
from serving.options import read_serve_command
from serving.scheduler import SchedulerConfig
from ubatch import CommGroup, ConfigError, Decision, DeclineReason, ForwardMode, UBatchConfig, fingerprint
from ubatch.schedules.cost_table import SERIAL_ARM, Setting
from ubatch.schedules.modes import ModeSettings


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="enable_dbo is off"):
        DboAuto(UBatchConfig(enable_dbo=False), None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="require_overlap is set"):
        DboAuto(UBatchConfig(require_overlap=True), None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="every mode is serial"):
        DboAuto(UBatchConfig(schedule="serial"), None, torch.device("cpu"))


def decided(*rows: int, engaged: bool = False, mode: ForwardMode = ForwardMode.DECODE) -> Decision:
    """What ranks with so many tokens agreed on."""
    return Decision(engaged, None, None, tuple((tokens,) for tokens in rows), modes=(fingerprint(mode),) * len(rows))


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
    auto = DboAuto(UBatchConfig(), None, torch.device("cuda"))
    for _ in range(40):
        auto.settings(BatchShape([1] * 64, ForwardMode.DECODE))
        with auto.timed(decided(64)):
            log.append("forward")
    waits = 0
    for place, what in enumerate(log):
        waits += what == "wait"
        assert log[:place].count("forward") >= waits + 4 or what != "wait"  # the last four may still run
    assert 20 <= auto._policy._told <= waits <= 36
    assert auto.statistics().seconds == pytest.approx(auto._policy._told * 0.003)


def test_what_is_measured_before_the_load_decides_how_it_begins() -> None:
    """And again after a reset, when all else is forgotten."""
    auto = DboAuto(UBatchConfig(), None, torch.device("cpu"))
    batch = BatchShape([1] * 64, ForwardMode.DECODE)
    auto.begin()  # nothing was measured
    assert auto.settings(batch).for_mode(ForwardMode.DECODE).token_threshold > 10**9
    serial, lanes = (auto.arm_settings("decode", arm) for arm in (SERIAL_ARM, "mlp_shared_overlap in 2 lanes"))
    assert serial.for_mode(ForwardMode.DECODE).token_threshold > 10**9
    assert lanes.for_mode(ForwardMode.DECODE).token_threshold == 2
    engaged = replace(
        decided(64), engaged=True, schedule=fingerprint(lanes.for_mode(ForwardMode.DECODE).schedule.describe())
    )
    for _ in range(4):
        for decision, seconds in ((decided(64), 0.02), (engaged, 0.002)):
            with auto.measured(decision):
                time.sleep(seconds)
    assert auto.statistics().reasons["decode"] == "as it was set; nothing is measured yet"
    auto.begin()
    for _ in range(2):
        assert auto.statistics().steps == 0
        assert auto.statistics().settings["decode"] == Setting("mlp_shared_overlap in 2 lanes", 64)
        assert auto.settings(batch).for_mode(ForwardMode.DECODE).token_threshold == 64
        assert auto.statistics().settings["prefill"] == Setting()
        auto._restart()


class BrokenGroup:
    """Two ranks; another connection is another group."""

    rank, size, connection = 0, 2, object()

    def usable_connection(self) -> object:
        return self.connection


def test_what_was_measured_when_the_group_broke_is_not_exchanged() -> None:
    """A rank that failed in a step that was measured has one less than the others."""
    group = BrokenGroup()
    auto = DboAuto(UBatchConfig(), group, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(3):
        with auto.measured(decided(64, 64)):
            pass
    assert len(auto._before) == 3
    group.connection = object()
    auto.begin()  # an exchange would need a real group
    assert not auto._known
    assert not auto._before


def test_a_step_that_fails_has_no_time() -> None:
    auto = DboAuto(UBatchConfig(), None, torch.device("cpu"))
    for step in range(21):
        auto.settings(BatchShape([1] * 64, ForwardMode.DECODE))
        with suppress(ZeroDivisionError), auto.timed(decided(64)):
            1 // (step % 2)
    assert auto.statistics().steps == 21
    assert 0 < auto._policy._told <= 10  # every other one


def test_ranks_begin_anew_after_a_reset() -> None:
    """They may have counted differently when the group broke."""
    group = BrokenGroup()
    auto = DboAuto(UBatchConfig(), group, torch.device("cpu"))  # type: ignore[arg-type]
    for _ in range(3):
        auto.settings(BatchShape([1] * 64, ForwardMode.DECODE))
        with auto.timed(decided(64, 64)):
            pass
    assert auto.statistics().steps == 3
    group.connection = object()
    auto.settings(BatchShape([1] * 64, ForwardMode.DECODE))
    assert auto.statistics().steps == 0


def test_the_flag(tmp_path: Path) -> None:
    words = ["examples/models/tiny-moe", "--data-parallel-size", "2", "--enable-expert-parallel", "--dbo-auto"]
    with pytest.raises(ConfigError, match="--dbo-auto decides when steps overlap, but they may not"):
        read_serve_command("serve", "", words)
    assert read_serve_command("serve", "", [*words, "--enable-dbo"]).settings["dbo_auto"]
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    options = EngineOptions(path, dbo=UBatchConfig(), dbo_auto=True, scheduler=SchedulerConfig(max_model_len=64))
    with make_runner(options) as runner:
        told = make_core(options, runner).statistics().dbo_auto
    assert told == dict.fromkeys(("decode", "prefill", "verify"), "as it was set; nothing is measured yet")


# -- the runner -----------------------------------------------------------------------------------------------------


def decode_steps(rank: int, world_size: int, path: str) -> dict[str, object]:
    """Two ranks decode; the arms' times are made up: a policy that is told that lanes take half the time."""
    group = CommGroup.from_process_group(timeout_s=20)
    told: list[int] = []

    class Optimist(Policy):
        def learn(self, times: dict[int, tuple[Seen, float]]) -> None:  # type: ignore[override]
            told.append(len(times))
            super().learn({n: (seen, 1.0 if seen.arm == SERIAL_ARM else 0.5) for n, (seen, _) in times.items()})

    dbo = UBatchConfig(modes={"prefill": ModeSettings(token_threshold=4)})
    with ModelRunner(path, group=group, num_kv_blocks=96, block_size=8, dbo=dbo, dbo_auto=True) as runner:
        runner.step_settings = DboAuto(runner.dbo, group, runner.device, max_chunks=2, policy=Optimist)
        requests = [
            Request(index, [1 + rank, 2, 3], SamplingParams(max_tokens=99)) for index in range(8 if rank else 9)
        ]
        for request in requests:
            runner.admit(request, 60)
        tokens, modes = [], []
        for _ in range(50):
            step = runner.execute([ScheduledRequest(each, each.num_uncomputed_tokens) for each in requests])
            modes.append((step.decision.engaged, step.decision.num_lanes))
            for request, new in zip(requests, step.tokens, strict=True):
                request.advance(request.num_uncomputed_tokens, new[0])
            tokens.append(step.tokens)
        found = runner.step_settings.statistics()
        declined = runner.statistics().declined
    return {"tokens": tokens, "modes": modes, "found": found, "told": told, "declined": declined}


def test_two_ranks_decide_alike(tmp_path: Path) -> None:
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    first, second = run_ranks(decode_steps, 2, str(path))
    assert first["modes"] == second["modes"]
    assert first["found"].settings == second["found"].settings
    assert first["told"] == second["told"]
    assert first["modes"][0] == (True, 2)  # the prefill, by its own threshold
    assert not first["modes"][1][0]  # decodes begin serially
    assert first["modes"][-1][0]
    assert first["found"].settings["decode"].threshold == 8
    assert first["found"].probes >= 1
    assert set(first["declined"]) <= {DeclineReason.BELOW_DECODE_THRESHOLD, DeclineReason.PEER_DECLINED}
    reference, _ = run_ranks(plain_steps, 2, str(path))
    assert first["tokens"] == reference


def plain_steps(rank: int, world_size: int, path: str) -> list[object]:
    group = CommGroup.from_process_group(timeout_s=20)
    with ModelRunner(path, group=group, num_kv_blocks=96, block_size=8, dbo=UBatchConfig(enable_dbo=False)) as runner:
        assert runner.step_settings.statistics() is None
        requests = [
            Request(index, [1 + rank, 2, 3], SamplingParams(max_tokens=99)) for index in range(8 if rank else 9)
        ]
        for request in requests:
            runner.admit(request, 60)
        tokens = []
        for _ in range(50):
            step = runner.execute([ScheduledRequest(each, each.num_uncomputed_tokens) for each in requests])
            for request, new in zip(requests, step.tokens, strict=True):
                request.advance(request.num_uncomputed_tokens, new[0])
            tokens.append(step.tokens)
    return tokens
