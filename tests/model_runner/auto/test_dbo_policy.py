"""What `--dbo-auto` decides: the policy on a simulated machine, over loads and links."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from model_runner.auto.dbo_model import Seen
from model_runner.auto.dbo_policy import Policy
from ubatch import ConfigError
from ubatch.schedules.cost_table import SERIAL_ARM, CostTable, Setting, choose

pytestmark = pytest.mark.long

ARMS = {"decode": ("2", "3"), "prefill": ("2", "3")}
STEPS = 6000
NOISE = 0.05


@functools.cache
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
            own = Counter(n for each, n in self.steps if each == kind)
            total += min(
                sum(count * true_seconds(kind, n, setting.arm_for(n), self.link) for n, count in own.items())
                for setting in everything
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


@pytest.mark.sample(6)
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


@pytest.mark.sample(2)
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


@pytest.mark.sample(6)
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("link", [1.0, 0.0])
def test_a_noisy_machine_does_not_mislead_it(link: float) -> None:
    """Step times that scatter by 15%, as beside other work."""
    for seed in range(2):
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
