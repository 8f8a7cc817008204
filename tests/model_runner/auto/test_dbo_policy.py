"""What `--enable-dbo` and `--dbo-auto` decide: the policy on a simulated machine, over loads and links."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from model_runner.auto.dbo_policy import Policy, Seen
from model_runner.auto.step_stages import Stages
from ubatch import SCHEDULES, ConfigError
from ubatch.schedules.cost_table import SERIAL_ARM, CostTable, Setting, choose

TWO = SCHEDULES["mlp_shared_overlap"]
ARMS = {kind: {"2": TWO, "3": TWO.with_lanes(3)} for kind in ("decode", "prefill")}
DECODES = {"decode": {"2": TWO}}
STEPS = 2000
NOISE = 0.05
LINKS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


def true_seconds(kind: str, tokens: int, arm: str, link: float) -> float:
    """A machine whose lanes each pay again for what does not grow with tokens; its link takes `link` x compute."""
    compute, communication = _parts(kind, tokens, link)
    if arm == SERIAL_ARM:
        return compute + communication
    lanes = int(arm)
    split = compute + (0.2 * lanes - 0.2) * _fixed(kind) + lanes * 3e-4
    return 1.04 * max(split, communication + lanes * 2e-4) + 0.5 * min(split, communication) / lanes


def _fixed(kind: str) -> float:
    return 0.004 if kind == "decode" else 0.005


def _parts(kind: str, tokens: int, link: float) -> tuple[float, float]:
    compute = _fixed(kind) + (2e-5 if kind == "decode" else 3e-5) * tokens
    return compute, link * 0.9 * compute


def told(kind: str, tokens: int, arm: str, link: float, scale: float = 1.0) -> Stages:
    """What the ranks tell each other of a step whose time is `scale` x the true one."""
    compute, communication = _parts(kind, tokens, link)
    seconds = scale * true_seconds(kind, tokens, arm, link)
    if arm != SERIAL_ARM:  # its waits say little; how long its transfers travelled is known
        return Stages(seconds, travel=communication, layers=8)
    half = scale * communication / 2
    return Stages(seconds, 0.4 * scale * compute, 0.6 * scale * compute, half, half, 0.0, communication, 8)


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
    """A policy that serves a load, and the times (without their noise) of that and of fixed settings."""

    policy: Policy
    link: float
    spread: float = NOISE
    seed: int = 0
    blind: bool = False  # only whole times are told, as on a GPU
    steps: list[tuple[str, int, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    pending: dict[int, tuple[Seen, Stages | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.noise = random.Random(-self.seed - 1)

    def step(self, kind: str, tokens: int) -> str:
        """One step: exchange if the policy wants it, decide, run. A decision knows nothing of the two latest steps."""
        due = self.policy.wants_times(len(self.pending))
        coming, self.pending = (self.pending, {}) if due else ({}, self.pending)
        arm = self.policy.arm(kind, tokens)
        seen = Seen(kind, tokens, arm)
        stages = told(kind, tokens, arm, self.link, math.exp(self.noise.gauss(0.0, self.spread)))
        number = self.policy.saw(seen)
        if number is not None:
            self.pending[number] = seen, Stages(stages.seconds) if self.blind else stages
        self.policy.learn(coming)
        self.steps.append((kind, tokens, arm))
        self.seconds.append(true_seconds(kind, tokens, arm, self.link))
        return arm

    def against(self, arm_for: Callable[[str, int], str] | None = None, first: int = 0) -> float:
        """Time of another way to run these steps / time of this one; the best arm of every step if none is given."""
        total = 0.0
        for kind, tokens, _ in self.steps[first:]:
            arms = (SERIAL_ARM, *ARMS[kind]) if arm_for is None else (arm_for(kind, tokens),)
            total += min(true_seconds(kind, tokens, arm, self.link) for arm in arms)
        return total / sum(self.seconds[first:])


def serial(kind: str, tokens: int) -> str:
    return SERIAL_ARM


def serve(link: float, seed: int, spread: float = NOISE, steps: int = STEPS, *, blind: bool = False) -> Served:
    served = Served(Policy(ARMS), link, spread, seed, blind)
    for kind, tokens in mixed_load(seed, steps):
        served.step(kind, tokens)
    return served


@pytest.mark.sample(6)
@pytest.mark.parametrize("link", LINKS)
def test_never_below_serial_and_close_to_the_best_arm_of_every_step(link: float) -> None:
    for seed in range(2):
        served = serve(link, seed)
        found = served.policy.statistics()
        assert served.against(serial) >= 0.99, found
        assert served.against() >= 0.97, found
        assert found.lost_s <= 0.02 * found.seconds
        if link >= 1:
            assert served.against(serial) > 1.1  # it does overlap
        if link == 0:
            assert found.probes <= 12  # nothing to hide, so hardly anything is tried


@pytest.mark.parametrize("link", LINKS)
def test_a_new_load_is_right_within_twenty_steps(link: float) -> None:
    """Of one kind and size; after that, and over 500 steps with all trials."""
    for tokens in (16, 100, 256):
        served = Served(Policy(ARMS), link, seed=tokens)
        for _ in range(500):
            served.step("decode", tokens)
        assert served.against(first=20) >= 0.97, (tokens, served.policy.reasons)
        assert served.against(serial) >= 0.985


@pytest.mark.parametrize(("before", "after"), [(2.0, 0.0), (0.0, 2.0), (0.5, 4.0), (4.0, 0.5)])
def test_a_link_that_changes_is_noticed_within_twenty_steps(before: float, after: float) -> None:
    served = Served(Policy(ARMS), before)
    for step in range(600):
        if step == 300:
            served.link = after
        served.step("decode", 200)
    own = Served(Policy(ARMS), after, steps=served.steps[320:], seconds=served.seconds[320:])
    assert own.against() >= 0.97, served.policy.reasons


@pytest.mark.parametrize("link", [0.0, 1.0])
def test_a_noisy_machine_does_not_mislead_it(link: float) -> None:
    """Step times that scatter by 15%, as beside other work."""
    for seed in range(2):
        served = serve(link, seed, 3 * NOISE)
        assert served.against(serial) >= 0.98
        assert served.against() >= 0.94


@pytest.mark.parametrize("disturbed", [2, 4, 40])
def test_an_arm_that_other_work_disturbed_is_tried_again(disturbed: int) -> None:
    served = Served(Policy(DECODES), 1.0, spread=0.01)
    arms = []
    for step in range(500):
        slow = 100 <= step < 100 + disturbed and served.policy.arm("decode", 64) != SERIAL_ARM
        quiet, served.noise = served.noise, Slow() if slow else served.noise
        arms.append(served.step("decode", 64))
        served.noise = quiet
    assert arms[80:100].count("2") >= 19
    assert SERIAL_ARM in arms[100:120]
    assert arms[400:].count("2") >= 95


class Slow(random.Random):
    """Every step takes three times its time."""

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return math.log(3.0)


@pytest.mark.parametrize("link", [0.0, 1.0, 4.0])
def test_where_only_whole_times_are_known_trials_decide(link: float) -> None:
    """On a GPU the host does not see the transfers."""
    served = serve(link, 0, blind=True)
    assert served.against(serial) >= 0.98
    assert served.against() >= 0.93
    assert served.policy.statistics().probes > 2


def test_without_transfers_nothing_is_tried() -> None:
    """As on one rank: lanes have nothing to hide, and it says so."""
    served = Served(Policy(DECODES), 0.0)
    assert {served.step("decode", 64) for _ in range(200)} == {SERIAL_ARM}
    reasons = served.policy.reasons["decode"]
    assert reasons.startswith("by tokens: 64: serial (5.")
    assert "0% waiting; 2 0." in reasons
    assert reasons.endswith("x expected)")


def test_it_says_which_kinds_changed_and_its_reasons_are_made_once() -> None:
    """Every step of a server asks for the reasons."""
    policy = Policy(DECODES)
    told_of = []
    for _ in range(12):
        arm = policy.arm("decode", 64)
        seen = Seen("decode", 64, arm)
        number = policy.saw(seen)
        told_of += policy.learn({} if number is None else {number: (seen, told("decode", 64, arm, 2.0))})
        assert policy.reasons is policy.reasons
    assert told_of == ["decode"]
    assert policy.statistics().arms == {"decode": {64: "2"}}
    assert "64: 2 (" in policy.reasons["decode"]


def test_a_size_close_to_a_known_one_runs_serially_once() -> None:
    served = Served(Policy(DECODES), 2.0, spread=0.0)
    for _ in range(60):
        served.step("decode", 128)
    arms = [served.step("decode", 256) for _ in range(6)]
    assert arms == ["2", SERIAL_ARM, "2", "2", "2", "2"]  # the first is like the step before it


def test_ranks_with_somewhat_different_batches_ask_for_the_same_arm() -> None:
    served = Served(Policy(DECODES), 2.0)
    for _ in range(60):
        served.step("decode", 64)
    assert served.policy.arm("decode", 63) == served.policy.arm("decode", 64) == served.policy.arm("decode", 90) == "2"
    assert served.policy.arm("decode", 3) == SERIAL_ARM  # far away: never seen


def test_a_first_step_that_warms_up_is_not_believed() -> None:
    """The first overlapped step starts threads: five times as long as the next ones."""
    policy, arms = Policy(DECODES), []
    for step in range(30):
        arm = policy.arm("decode", 64)
        first = arm == "2" and "2" not in arms
        arms.append(arm)
        seen = Seen("decode", 64, arm)
        number = policy.saw(seen)
        stages = told("decode", 64, arm, 2.0, 5.0 if first or step == 0 else 1.0)
        policy.learn({} if number is None else {number: (seen, stages)})
    assert arms[-10:] == ["2"] * 10


def test_a_step_that_failed_says_nothing() -> None:
    policy = Policy(DECODES)
    for stages in (None, Stages(0.0)):
        seen = Seen("decode", 64, SERIAL_ARM)
        number = policy.saw(seen)
        assert number is not None
        policy.learn({number: (seen, stages)})
    assert policy.statistics().steps == 2
    assert policy.statistics().seconds == 0
    assert policy.reasons["decode"] == "serial: nothing is measured yet"


def test_all_ranks_decide_the_same_from_the_same_times() -> None:
    first, second = serve(1.0, 3, steps=300), serve(1.0, 3, steps=300)
    assert first.steps == second.steps


def test_ranks_that_round_differently_exchange_at_the_same_steps() -> None:
    """One that exchanged alone would take the others' vote for their times, and hang."""
    served, other, draw = Served(Policy(ARMS), 0.7), Policy(ARMS), random.Random(1)
    for kind, tokens in mixed_load(4, 1500):
        due = served.policy.wants_times(len(served.pending))
        assert other.wants_times(len(served.pending)) == due
        assert other.eager == served.policy.eager
        coming = dict(served.pending) if due else {}
        arm = served.step(kind, tokens)
        other.saw(Seen(kind, tokens, arm))
        rounded = {
            number: (seen, None if stages is None else replace(stages, seconds=stages.seconds * draw.uniform(0.9, 1.1)))
            for number, (seen, stages) in coming.items()
        }
        other.learn(rounded)


def test_times_are_wanted_at_once_only_while_something_is_new() -> None:
    served = Served(Policy(DECODES), 0.0, spread=0.0)
    for _ in range(40):
        served.step("decode", 64)
    assert not served.policy.wants_times(1)
    assert not served.policy.wants_times(3)
    assert served.policy.wants_times(4)
    assert not served.policy.wants_times(0)
    served.step("decode", 8)
    assert served.policy.wants_times(1)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one arm"):
        Policy({"decode": {}})
    with pytest.raises(ConfigError, match="probe_share must be between 0 and 1, not 2"):
        Policy(ARMS, probe_share=2)


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


def test_stages_scale_with_the_step() -> None:
    """Two serial steps of a size: the later one's length, and stages half way between them."""
    policy = Policy(DECODES)
    for stages in (told("decode", 64, SERIAL_ARM, 1.0), told("decode", 64, SERIAL_ARM, 3.0)):
        seen = Seen("decode", 64, SERIAL_ARM)
        number = policy.saw(seen)
        assert number is not None
        policy.learn({number: (seen, stages)})
    (own,) = policy._sizes["decode"].values()
    assert own.stages is not None
    latest = told("decode", 64, SERIAL_ARM, 3.0)
    assert own.stages.seconds == pytest.approx(latest.seconds)
    shares = [each.waits / each.seconds for each in (told("decode", 64, SERIAL_ARM, 1.0), own.stages, latest)]
    assert shares[1] == pytest.approx((shares[0] + shares[2]) / 2)
    assert replace(own.stages, seconds=latest.seconds).layers == 8
