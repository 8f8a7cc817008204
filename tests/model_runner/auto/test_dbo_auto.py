"""`--enable-dbo` and `--dbo-auto` as the runner asks them: what is timed and exchanged, alone and on two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_qwen3_moe_checkpoint

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest
from model_runner.auto.dbo_auto import DboAuto
from model_runner.auto.dbo_policy import Policy, Seen
from model_runner.auto.step_stages import Stages
from model_runner.step.dp import BatchShape
from ranks import run_ranks
from serving.engine import EngineOptions
from serving.engine.rank.build import make_core, make_runner
from serving.options import read_serve_command
from serving.scheduler import SchedulerConfig
from ubatch import CommGroup, ConfigError, Decision, DeclineReason, ForwardMode, UBatchConfig, fingerprint
from ubatch.schedules.cost_table import SERIAL_ARM
from ubatch.schedules.modes import ModeSettings


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="enable_dbo is off"):
        DboAuto(UBatchConfig(enable_dbo=False), None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="require_overlap is set"):
        DboAuto(UBatchConfig(require_overlap=True), None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="there is none"):
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
    assert 5 <= auto._policy._told <= waits <= 36
    assert auto.statistics().seconds == pytest.approx(auto._policy._told * 0.003)


def test_arms_of_the_flags() -> None:
    """`--enable-dbo` has the configured schedule, `--dbo-auto` three more; a tuned kind has none."""
    config = UBatchConfig(modes={"prefill": ModeSettings(token_threshold=64), "verify": ModeSettings("serial")})
    plain = DboAuto(config, None, torch.device("cpu"), explore=False)
    assert list(plain.arms("decode")) == ["mlp_shared_overlap in 2 lanes"]
    assert plain.arms("prefill") == plain.arms("verify") == {}
    auto = DboAuto(config, None, torch.device("cpu"), max_chunks=2)
    names = ["in 2 lanes", "in 3 lanes", "single_batch", "2_chunks in 2 lanes"]
    assert [each.endswith(name) for each, name in zip(auto.arms("decode"), names, strict=True)] == [True] * 4
    forced = auto.arm_settings("decode", "mlp_shared_overlap in 3 lanes").for_mode(ForwardMode.DECODE)
    assert (forced.schedule.lanes, forced.token_threshold) == (3, 3)
    with pytest.raises(ConfigError, match=r"prefill steps have no arm 'mine'\. They have: none"):
        auto.arm_settings("prefill", "mine")
    assert auto.settings(BatchShape([128], ForwardMode.PREFILL))[1] is False  # its own threshold decides
    assert auto.settings(BatchShape([1] * 64, ForwardMode.DECODE))[1] is True  # nothing is known yet


def test_an_idle_rank_knows_every_schedule_that_the_others_may_try() -> None:
    auto = DboAuto(UBatchConfig(), None, torch.device("cpu"), max_chunks=2)
    config, declined = auto.settings(BatchShape([], ForwardMode.IDLE))
    assert not declined
    for schedule in auto.arms("decode").values():
        print_of = fingerprint(schedule.describe())
        agreed = replace(decided(64, 0), engaged=True, schedule=print_of, tokens=((1,) * schedule.lanes,) * 2)
        assert config.agreed_schedule(agreed, ForwardMode.IDLE).describe() == schedule.describe()


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


class BrokenGroup:
    """Two ranks; another connection is another group."""

    rank, size, connection = 0, 2, object()

    def usable_connection(self) -> object:
        return self.connection


def test_a_step_that_fails_has_no_time() -> None:
    auto = DboAuto(UBatchConfig(), None, torch.device("cpu"))
    for step in range(21):
        auto.settings(BatchShape([1] * 64, ForwardMode.DECODE))
        with suppress(ZeroDivisionError), auto.timed(decided(64)):
            1 // (step % 2)
    assert auto.statistics().steps == 21
    assert 0 < auto._policy._told <= 10  # every other one


def test_ranks_begin_anew_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have counted differently when the group broke."""
    monkeypatch.setattr(Policy, "wants_times", lambda *_: False)  # an exchange would need a real group
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
    assert told == dict.fromkeys(("decode", "prefill", "verify"), "serial: nothing is measured yet")


# -- the runner -----------------------------------------------------------------------------------------------------


def decode_steps(rank: int, world_size: int, path: str) -> dict[str, object]:
    """Two ranks decode; the arms' times are made up: a policy that is told that lanes take half the time."""
    group = CommGroup.from_process_group(timeout_s=20)
    told: list[int] = []
    measured: list[Stages] = []

    class Optimist(Policy):
        def learn(self, times: Mapping[int, tuple[Seen, Stages | None]]) -> list[str]:
            told.append(len(times))
            measured.extend(stages for seen, stages in times.values() if stages and seen.arm == SERIAL_ARM)
            made_up = {SERIAL_ARM: Stages(1.0, 0.2, 0.2, 0.3, 0.3, layers=4)}
            return super().learn({n: (seen, made_up.get(seen.arm, Stages(0.5))) for n, (seen, _) in times.items()})

    dbo = UBatchConfig(modes={"prefill": ModeSettings(token_threshold=4)})
    with ModelRunner(path, group=group, num_kv_blocks=96, block_size=8, dbo=dbo, dbo_auto=True) as runner:
        runner.step_settings = DboAuto(runner.dbo, group, runner.device, explore=False, policy=Optimist)
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
    return {"tokens": tokens, "modes": modes, "found": found, "told": told, "declined": declined, "measured": measured}


def test_two_ranks_decide_alike(tmp_path: Path) -> None:
    path = make_qwen3_moe_checkpoint(tmp_path / "model")
    first, second = run_ranks(decode_steps, 2, str(path))
    assert first["modes"] == second["modes"]
    assert first["found"].arms == second["found"].arms
    assert first["told"] == second["told"]
    assert first["modes"][0] == (True, 2)  # the prefill, by its own threshold
    assert not first["modes"][1][0]  # decodes begin serially
    assert first["modes"][-1][0]
    assert first["found"].arms["decode"] == {8: "mlp_shared_overlap in 2 lanes"}
    assert first["found"].probes >= 1
    assert set(first["declined"]) == {DeclineReason.NO_GAIN_EXPECTED}
    assert first["measured"] == second["measured"]  # all ranks learn the same of a step
    assert all(each.attention > 0 and each.experts > 0 and each.layers > 0 for each in first["measured"])
    assert all(0 <= each.waits < each.seconds for each in first["measured"])
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
