"""`--dbo-auto`: the policy on a simulated machine over loads and links, and the runner that asks it on two ranks."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_qwen3_moe_checkpoint

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest
from model_runner.dbo_auto import DboAuto
from model_runner.dbo_model import Seen
from model_runner.dbo_policy import Policy
from model_runner.dp import BatchShape
from ranks import run_ranks
from serving.engine import EngineOptions
from serving.engine.build import make_core, make_runner
from serving.options import read_serve_command
from serving.scheduler import SchedulerConfig
from ubatch import CommGroup, ConfigError, Decision, DeclineReason, ForwardMode, UBatchConfig, fingerprint
from ubatch.cost_table import SERIAL_ARM, CostTable, Setting, choose
from ubatch.modes import ModeSettings

ARMS = {"decode": ("2", "3"), "prefill": ("2", "3")}
STEPS = 6000
NOISE = 0.05


def true_seconds(kind: str, tokens: int, arm: str, link: float) -> float:
    """A machine whose lanes each pay again for what does not grow with tokens; its link takes `link` x compute."""
    fixed, per_token = (0.004, 2e-5) if kind == "decode" else (0.005, 3e-5)
    compute = fixed + per_token * tokens
    communication = link * 0.9 * compute
    if arm == SERIAL_ARM:
        return compute + communication
    lanes = int(arm)
    split = (0.2 + 0.8 * lanes) * fixed + per_token * tokens + lanes * 3e-4
    return 1.04 * max(split, communication + lanes * 2e-4) + 0.5 * min(split, communication) / lanes


def mixed_load(seed: int, steps: int) -> Iterator[tuple[str, int]]:
    """Decodes of a slowly changing batch, between few, many and hardly any prefills."""
    draw = random.Random(seed)
    decoding, phase = 100, min(400, steps // 6)
    for step in range(steps):
        if draw.random() < (0.15, 0.02, 0.6)[step // phase % 3]:
            yield "prefill", draw.choice([2048] * 6 + [draw.randint(64, 2048)])
        else:
            decoding = max(4, min(256, decoding + draw.randint(-3, 3)))
            yield "decode", decoding


@dataclass
class Served:
    """A policy that served a load, and the times (without their noise) of that and of fixed settings."""

    policy: Policy
    link: float
    steps: list[tuple[str, int]] = field(default_factory=list)
    auto_s: float = 0.0

    def step(self, kind: str, tokens: int) -> tuple[int, Seen, float]:
        arm = self.policy.setting(kind, tokens).arm_for(tokens)
        seen = Seen(kind, tokens, tokens, arm)
        seconds = true_seconds(kind, tokens, arm, self.link)
        self.steps.append((kind, tokens))
        self.auto_s += seconds
        return self.policy.saw(seen), seen, seconds

    def fixed_s(self, settings: dict[str, Setting]) -> float:
        return sum(true_seconds(kind, n, settings[kind].arm_for(n), self.link) for kind, n in self.steps)

    def best_fixed_s(self) -> float:
        """The best threshold and arm of every kind: all are tried, four thresholds a doubling."""
        thresholds = sorted({round(2 ** (power / 4)) for power in range(4, 52)})
        everything = [Setting(), *(Setting(arm, threshold) for arm in "23" for threshold in thresholds)]
        total = 0.0
        for kind in ARMS:
            own = [n for each, n in self.steps if each == kind]
            total += min(
                sum(true_seconds(kind, n, setting.arm_for(n), self.link) for n in own) for setting in everything
            )
        return total


def serve(link: float, seed: int, policy: Policy, spread: float = NOISE, steps: int = STEPS) -> Served:
    served, noise = Served(policy, link), random.Random(-seed - 1)
    pending: list[tuple[int, Seen, float]] = []
    for kind, tokens in mixed_load(seed, steps):
        number, seen, seconds = served.step(kind, tokens)
        pending.append((number, seen, seconds * math.exp(noise.gauss(0.0, spread))))
        if len(pending) >= 64 or policy.wants_times(number + 1):
            policy.learn({each: (what, took) for each, what, took in pending})
            pending = []
    return served


@pytest.mark.parametrize("link", [0.0, 0.25, 0.5, 1.0, 2.0, 4.0])
def test_never_below_serial_and_close_to_the_best_fixed_setting(link: float) -> None:
    for seed in range(2):
        served = serve(link, seed, Policy(ARMS))
        serial_s = served.fixed_s(dict.fromkeys(ARMS, Setting()))
        assert serial_s / served.auto_s >= 0.99, (seed, served.policy.statistics())
        assert served.best_fixed_s() / served.auto_s >= 0.97, (seed, served.policy.statistics())
        found = served.policy.statistics()
        assert found.probes >= 10
        assert found.lost_s <= 0.005 * found.seconds + 8 * found.seconds / found.steps
        if link >= 1:
            assert serial_s / served.auto_s > 1.1  # it does overlap


@pytest.mark.parametrize("link", [0.0, 0.5, 1.0, 4.0])
def test_a_short_load_on_a_noisy_machine(link: float) -> None:
    """500 steps, of which it knows nothing when they begin; the mean of some loads."""
    loads = [serve(link, seed, Policy(ARMS), spread=2 * NOISE, steps=500) for seed in range(4)]
    auto_s = sum(load.auto_s for load in loads)
    assert sum(load.fixed_s(dict.fromkeys(ARMS, Setting())) for load in loads) / auto_s >= 0.985
    assert sum(load.best_fixed_s() for load in loads) / auto_s >= 0.97


def measured_steps(link: float, seed: int, spread: float) -> list[tuple[Seen, float]]:
    """Before a load: steps of three or four sizes, four times in every arm."""
    noise = random.Random(seed)
    return [
        (Seen(kind, tokens, tokens, arm), true_seconds(kind, tokens, arm, link) * math.exp(noise.gauss(0.0, spread)))
        for kind, sizes in (("decode", (256, 64, 16)), ("prefill", (2048, 512, 128, 32)))
        for tokens in sizes
        for _ in range(4)
        for arm in (SERIAL_ARM, *ARMS[kind])
    ]


@pytest.mark.parametrize("link", [0.0, 0.25, 0.5, 1.0, 2.0, 4.0])
def test_a_short_load_after_a_measurement(link: float) -> None:
    """It begins with settings that are nearly right; the mean of some loads, on a noisy machine."""
    loads, blind = [], []
    for seed in range(6):
        policy = Policy(ARMS)
        scale = (0.4, 1.0, 1.5)[
            seed % 3
        ]  # the requests of the load are longer than those that were made up, or shorter
        policy.measured([(seen, scale * seconds) for seen, seconds in measured_steps(link, seed, 2 * NOISE)])
        assert policy.statistics().steps == 0
        overlaps = [setting.threshold is not None for setting in policy.statistics().settings.values()]
        assert all(overlaps) or link < 2
        assert not any(overlaps) or link > 0
        loads.append(serve(link, seed, policy, spread=2 * NOISE, steps=500))
        blind.append(serve(link, seed, Policy(ARMS), spread=2 * NOISE, steps=500))
    auto_s = sum(load.auto_s for load in loads)
    assert sum(load.fixed_s(dict.fromkeys(ARMS, Setting())) for load in loads) / auto_s >= 0.99
    assert sum(load.best_fixed_s() for load in loads) / auto_s >= 0.975
    assert auto_s < 0.99 * sum(load.auto_s for load in blind) or link != 2


def test_an_arm_far_from_what_was_expected_is_believed_before_the_load() -> None:
    for seconds, found in ((0.002, Setting("2", 64)), (0.02, Setting())):
        policy = Policy({"decode": ("2",)})
        policy.measured([(Seen("decode", 64, 64, arm), s) for arm, s in ((SERIAL_ARM, 0.01), ("2", seconds))] * 4)
        assert policy.statistics().settings["decode"] == found
        assert f"64: {'2 4.' if seconds < 0.01 else '2 0.5'}" in policy.reasons["decode"], policy.reasons


def test_sizes_are_half_a_doubling_apart() -> None:
    sizes = [
        Seen("decode", tokens, tokens, SERIAL_ARM).size for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 95, 96, 1000)
    ]
    assert sizes == [1, 2, 3, 4, 4, 6, 6, 8, 8, 12, 64, 96, 768]


@pytest.mark.parametrize("link", [0.0, 1.0])
def test_a_noisy_machine_does_not_mislead_it(link: float) -> None:
    """Step times that scatter by 15%, as beside other work."""
    for seed in range(3):
        served = serve(link, seed, Policy(ARMS), spread=3 * NOISE)
        assert served.fixed_s(dict.fromkeys(ARMS, Setting())) / served.auto_s >= 0.98
        assert served.best_fixed_s() / served.auto_s >= 0.97


def test_a_bad_beginning_is_left() -> None:
    """Settings that overlap everything, where nothing travels: serial soon, and it says why."""
    policy = Policy(ARMS, dict.fromkeys(ARMS, Setting("3", 4)))
    served = serve(0.0, 0, policy)
    found = policy.statistics()
    assert served.fixed_s(dict.fromkeys(ARMS, Setting())) / served.auto_s > 0.98
    assert found.settings["decode"] == found.settings["prefill"] == Setting()
    assert found.changes >= 2
    assert found.reasons["decode"].startswith("serial; against serial, by tokens: ")


def test_a_link_that_changes_is_noticed() -> None:
    policy = Policy({"decode": ("2",)})
    settings = []
    for link in (2.0, 0.0):
        for _ in range(250):
            times = {}
            for _ in range(16):
                arm = policy.setting("decode", 200).arm_for(200)
                seen = Seen("decode", 200, 200, arm)
                times[policy.saw(seen)] = seen, true_seconds("decode", 200, arm, link)
            policy.learn(times)
        settings.append(policy.statistics().settings["decode"])
    assert settings == [Setting("2", 192), Setting()]


def test_without_gain_by_the_hysteresis_nothing_changes() -> None:
    policy = Policy({"decode": ("2",)}, hysteresis=0.05)
    for _ in range(100):
        times = {}
        for _ in range(16):
            arm = policy.setting("decode", 64).arm_for(64)
            seen = Seen("decode", 64, 64, arm)
            times[policy.saw(seen)] = seen, 1.0 if arm == SERIAL_ARM else 0.97
        policy.learn(times)
    found = policy.statistics()
    assert found.changes == 0
    assert found.probes > 2
    assert found.reasons["decode"].endswith("another setting is not better by enough")


def test_a_trial_that_meets_other_sizes_is_given_up() -> None:
    policy = Policy({"decode": ("2",)})
    for _ in range(20):
        first = Seen("decode", 64, 64, SERIAL_ARM)
        policy.learn({policy.saw(first): (first, 1.0)})
        if policy.setting("decode", 64) != Setting():
            break
    assert policy.setting("decode", 64) == Setting("2", 64)
    assert policy.setting("decode", 1000) == Setting()  # not for sizes far from it
    for _ in range(13):
        policy.saw(Seen("decode", 8, 8, SERIAL_ARM))
    assert policy.setting("decode", 64) == Setting()


def test_a_trial_that_another_rank_did_not_go_along_with_is_over() -> None:
    """The ranks' sizes differ: they voted for different arms, and the step was serial."""
    policy = Policy({"decode": ("2",)}, dict.fromkeys(("decode",), Setting("2", 256)))
    serial = Seen("decode", 64, 300, SERIAL_ARM)
    for _ in range(20):
        policy.learn({policy.saw(serial): (serial, 1.0)})
        if policy.setting("decode", 64) == Setting("2", 64):
            break
    assert policy.setting("decode", 64) == Setting("2", 64)
    policy.saw(serial)
    assert policy.setting("decode", 64) == Setting("2", 256)
    assert policy.statistics().probes == 0


def test_the_times_of_steps_in_a_rare_arm_are_wanted_at_once() -> None:
    """Of a trial's, that is; two arms that take turns are nothing rare."""
    policy = Policy({"decode": ("2",)})

    def run(arm: str, seconds: float) -> int:
        seen = Seen("decode", 64, 64, arm)
        number = policy.saw(seen)
        assert policy.wants_times(number) is False  # not for steps on which a GPU may still work
        wanted[number] = policy.wants_times(number + 1)
        policy.learn({number: (seen, seconds)})
        assert not policy.wants_times(number + 1)
        return number

    wanted: dict[int, bool] = {}
    for _ in range(20):
        run(SERIAL_ARM, 1.0)
    assert wanted[run("2", 1.5)]
    assert not wanted[run(SERIAL_ARM, 1.0)]
    for _ in range(10):
        run("2", 1.5)
        last = run(SERIAL_ARM, 1.0)
    assert not wanted[last]
    assert not wanted[last - 1]


def test_a_kind_that_no_longer_comes_holds_nothing_up() -> None:
    """A few large prefills, then decodes alone: those are probed, and soon overlap."""
    policy = Policy(ARMS)
    for step in range(160):
        kind, tokens = ("prefill", 2048) if step < 8 else ("decode", 128)
        arm = policy.setting(kind, tokens).arm_for(tokens)
        seen = Seen(kind, tokens, tokens, arm)
        policy.learn({policy.saw(seen): (seen, true_seconds(kind, tokens, arm, 1.5))})
    assert policy.statistics().settings["decode"].threshold == 128


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one arm"):
        Policy({"decode": ()})
    with pytest.raises(ConfigError, match="hysteresis must be between 0 and 1, not 2"):
        Policy(ARMS, hysteresis=2)
    with pytest.raises(ConfigError, match="enable_dbo is off"):
        DboAuto(UBatchConfig(enable_dbo=False), None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="require_overlap is set"):
        DboAuto(UBatchConfig(require_overlap=True), None, torch.device("cpu"))
    with pytest.raises(ConfigError, match="every mode is serial"):
        DboAuto(UBatchConfig(schedule="serial"), None, torch.device("cpu"))


def test_what_is_chosen_from_a_table_is_the_best_there_is() -> None:
    table = CostTable(
        {8: {SERIAL_ARM: 1.0, "2": 1.5}, 16: {SERIAL_ARM: 2.0, "2": 1.9, "3": 1.895}, 32: {SERIAL_ARM: 4.0, "2": 2.5}}
    )
    assert choose(table, ("2", "3")).setting == Setting("2", 16)  # 3 lanes are hardly better, and not at 32
    assert table.regret(Setting()) == pytest.approx((1 + 2.0 / 1.895 + 1.6) / 3 - 1)
    weighted = CostTable(table.seconds, {8: 1.0, 16: 1e-9, 32: 1e-9})
    assert choose(weighted).setting == Setting()
    with pytest.raises(ConfigError, match="no serial time at 8 tokens"):
        CostTable({8: {"2": 1.0}})


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
