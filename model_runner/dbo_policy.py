"""What `--dbo-auto` decides: which arm, from how many tokens on, for every kind of step. No clock, no ranks, no torch.

It sees what all ranks know of a step (kind, fewest tokens of a busy rank, which arm it ran in) and, later and for many
steps at once, how long it took on the slowest rank. Every rank tells it the same, so all decide alike.

    a size that costs time and whose estimate is weak or old   -> probe it, if the budget allows
    a probe                                                    -> in use, other, other, in use: four steps of one size
    its four times                                             -> one estimate of log(other / in use)
    estimates of a kind                                        -> `ubatch.cost_table.choose`
    the setting in use is worse than that by the hysteresis    -> change it

Times of different steps are never compared: requests grow longer and machines drift. Only those of a probe are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from model_runner.dbo_probes import LEAST_PROBES, UNKNOWN_LOSS, Estimate, Probe, Seen
from ubatch.cost_table import SERIAL_ARM, CostTable, Setting, choose
from ubatch.errors import ConfigError

__all__ = ["Policy", "PolicyStatistics"]

_ALLOWANCE_STEPS = 6.0
"""Steps' worth of time that probes may lose before the load has lasted; long loads do not notice."""
_ALIKE = 0.2
"""Steps of a probe whose tokens differ by more than this share are not compared."""
_WORTH_ALL = 0.02
"""A probe worth less may spend only its share of the budget, so that something is left for those worth more."""
_PATIENCE = 12
"""So many steps of the kind but of other sizes end a probe, and one that ran in its arm for nothing."""
_REACH = 3
"""Ranks with up to so many times its size go along with a probe, until one ran for nothing."""
_LOSS_PER_HALVING = 0.1
"""What log(arm / serial) is taken to rise by from a size that was measured to one of half as many tokens."""
_LOSS_OF_ANOTHER = 0.1
"""What an arm that was never tried is taken to lose against the simplest, once that one is known."""
_LEAST_SHARE = 0.01
_STALE_STEPS = 500
_FORGET = 0.95
_REMEMBERED = 512


@dataclass(frozen=True)
class PolicyStatistics:
    """What it decided, and why.

    Attributes:
        steps: seen.
        seconds: that they took.
        probes: that were completed.
        lost_s: seconds by which probed steps were slower than those in use.
        changes: of a setting.
        settings: kind -> what is in use.
        reasons: kind -> a sentence.
    """

    steps: int
    seconds: float
    probes: int
    lost_s: float
    changes: int
    settings: Mapping[str, Setting]
    reasons: Mapping[str, str]


class Policy:
    """Decides for the kinds of steps it is given.

    Args:
        arms: kind -> arms beside the serial one, the simplest first.
        start: kind -> the setting to begin with; serial where there is none.
        probe_share: most of the time that probes may lose.
        hysteresis: a setting changes where another one is faster by more than this share.

    Raises:
        ConfigError: no arms, or shares outside 0 to 1.
    """

    def __init__(
        self,
        arms: Mapping[str, Sequence[str]],
        start: Mapping[str, Setting] | None = None,
        *,
        probe_share: float = 0.005,
        hysteresis: float = 0.01,
    ) -> None:
        if not arms or not all(arms.values()):
            raise ConfigError("an automatic policy needs at least one arm for every kind of step.")
        for name, value in (("probe_share", probe_share), ("hysteresis", hysteresis)):
            if not 0 < value < 1:
                raise ConfigError(f"{name} must be between 0 and 1, not {value}.")
        self._arms = {kind: tuple(each) for kind, each in arms.items()}
        self._settings = {kind: Setting() for kind in arms} | dict(start or {})
        self._reasons = dict.fromkeys(arms, "as it was set; nothing is measured yet")
        self._probe_share = probe_share
        self._hysteresis = hysteresis
        self._estimates: dict[tuple[str, int, str], Estimate] = {}
        self._load: dict[tuple[str, int], float] = {}
        self._count: dict[tuple[str, int], float] = {}
        self._recent: dict[int, float] = {}
        self._in_vain: dict[tuple[str, int], int] = {}
        self._active: dict[str, Probe] = {}  # by kind: a load without prefills must not hold up decodes
        self._done: list[Probe] = []
        self._steps = self._probes = self._changes = 0
        self._seconds = self._lost_s = 0.0

    # -- before a step, and after its vote ---------------------------------------------------------------------

    def setting(self, kind: str, tokens: int) -> Setting:
        """What a step of this kind, with so many tokens on this rank, is to run under: a probe's arm while one is on.

        Ranks may hold different sizes, so a little more than the probe's own goes along.
        """
        probe = self._active.get(kind)
        if probe is None or probe.wanted == probe.used:
            return self._settings[kind]
        reach = 2 if (kind, probe.size) in self._in_vain else _REACH
        if not probe.size <= tokens < reach * probe.size:
            return self._settings[kind]
        return Setting() if probe.other == SERIAL_ARM else Setting(probe.other, probe.size)

    def saw(self, step: Seen) -> int:
        """A step was voted on; returns its number, by which `learn` tells its time."""
        number, self._steps = self._steps, self._steps + 1
        probe = self._active.get(step.kind)
        if probe is None:
            return number
        alike = not probe.steps or abs(step.most - probe.most[0]) <= _ALIKE * probe.most[0]
        if step.size == probe.size and step.arm == probe.wanted and alike:
            probe.steps.append(number)
            probe.most.append(step.most)
            if probe.complete:
                self._done.append(probe)
                self._end_probe(step.kind)
                if self._once_more(probe):
                    self._active[step.kind] = Probe(probe.kind, probe.size, probe.used, probe.other)
        else:
            probe.strangers += 1
            for_nothing = step.arm == probe.wanted != probe.used
            if for_nothing:
                mean_s = self._mean_s(probe.kind, step.size)
                self._lost_s += mean_s * self._expected_loss(probe.kind, probe.size, probe.used, probe.other)
            if for_nothing or probe.strangers > _PATIENCE:
                key = probe.kind, probe.size
                self._in_vain[key] = self._in_vain.get(key, 0) + 1
                self._end_probe(step.kind)
        return number

    def _end_probe(self, kind: str) -> None:
        self._active.pop(kind, None)

    # -- now and then ------------------------------------------------------------------------------------------

    def learn(self, times: Mapping[int, tuple[Seen, float]]) -> None:
        """Times of steps, by number, on their slowest rank; then settings and probes are thought over.

        Args:
            times: of every step since the last call, the same on every rank.
        """
        for key in self._load:
            self._load[key] *= _FORGET
            self._count[key] *= _FORGET
        for number, (seen, seconds) in times.items():
            self._recent[number] = seconds
            self._seconds += seconds
            if seen.kind in self._arms:
                key = (seen.kind, seen.size)
                self._load[key] = self._load.get(key, 0.0) + seconds
                self._count[key] = self._count.get(key, 0.0) + 1.0
        waiting, self._done = self._done, []
        for probe in waiting:
            if probe.steps[-1] in self._recent:
                self._measure(probe)
            else:
                self._done.append(probe)
        oldest = self._steps - _REMEMBERED
        self._recent = {number: seconds for number, seconds in self._recent.items() if number >= oldest}
        self._reasons = dict(self._reasons)
        for kind in self._arms:
            self._decide(kind)
            if kind not in self._active:
                self._begin_probe(kind)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Kind -> what is in use, and why; a new mapping where anything changed."""
        return self._reasons

    def statistics(self) -> PolicyStatistics:
        """The state, and the totals so far."""
        return PolicyStatistics(
            steps=self._steps,
            seconds=self._seconds,
            probes=self._probes,
            lost_s=self._lost_s,
            changes=self._changes,
            settings=dict(self._settings),
            reasons=dict(self._reasons),
        )

    def _measure(self, probe: Probe) -> None:
        if any(step not in self._recent for step in probe.steps):
            return  # too far apart to be compared
        first, second, third, fourth = (
            self._recent[step] / math.sqrt(most) for step, most in zip(probe.steps, probe.most, strict=True)
        )  # part of a step's time grows with its tokens, and part does not
        used, other = first + fourth, second + third
        if used <= 0 or other <= 0:
            return
        self._probes += 1
        self._lost_s += max(0.0, other - used) * math.sqrt(probe.most[0])
        log = math.log(other / used)
        if probe.other == SERIAL_ARM:
            self._estimate(probe.kind, probe.size, probe.used).add(-log, self._steps)
            return
        base = 0.0 if probe.used == SERIAL_ARM else self._estimate(probe.kind, probe.size, probe.used).log
        self._estimate(probe.kind, probe.size, probe.other).add(base + log, self._steps)

    def _estimate(self, kind: str, size: int, arm: str) -> Estimate:
        return self._estimates.setdefault((kind, size, arm), Estimate())

    # -- settings ----------------------------------------------------------------------------------------------

    def _table(self, kind: str) -> CostTable | None:
        """Times relative to serial at every size of the load; a size without an estimate has its neighbour's."""
        sizes = sorted({size for each, size in self._load if each == kind})
        weights = {size: self._load[kind, size] for size in sizes}
        seconds: dict[int, dict[str, float]] = {size: {SERIAL_ARM: 1.0} for size in sizes}
        for arm in self._arms[kind]:
            in_use = self._settings[kind].arm == arm
            known = {
                size: each.log if in_use else each.log + each.doubt  # what is not in use must surely be better
                for (k, size, a), each in self._estimates.items()
                if (k, a) == (kind, arm) and each.known
            }
            for size in sizes if known else ():
                nearest = _nearest_size(known, size)
                log = known[nearest] + _LOSS_PER_HALVING * max(0.0, math.log2(nearest / size))
                if nearest >= size or log < 0:  # of larger steps nothing is known where smaller ones lose
                    seconds[size][arm] = math.exp(log)
        measured = any(len(arms) > 1 for arms in seconds.values())
        return CostTable(seconds, weights) if measured and sum(weights.values()) > 0 else None

    def _decide(self, kind: str) -> None:
        table = self._table(kind)
        if table is None:
            return
        best = choose(table, self._arms[kind]).setting
        now = self._settings[kind]
        if best == now:
            self._reasons[kind] = self._why(kind, table, now)
            return
        if table.gain(best) > table.gain(now) * (1 + self._hysteresis):
            self._settings[kind] = best
            self._changes += 1
            self._reasons[kind] = self._why(kind, table, best)
            self._end_probe(kind)  # it compares with what is no longer in use
        else:
            self._reasons[kind] = self._why(kind, table, now) + "; another setting is not better by enough"

    def _why(self, kind: str, table: CostTable, setting: Setting) -> str:
        sizes = []
        for tokens in table.sizes:
            arms = {arm: value for arm, value in table.seconds[tokens].items() if arm != SERIAL_ARM}
            if arms:
                arm = min(arms, key=lambda name: arms[name])
                count = len(self._estimate(kind, tokens, arm).logs)
                sizes.append(f"{tokens}: {arm} {1 / arms[arm]:.2f}x ({count} probes)")
        what = "serial" if setting.threshold is None else f"{setting.arm} from {setting.threshold} tokens on"
        return f"{what}; against serial, by tokens: {', '.join(sizes)}"

    # -- probes ------------------------------------------------------------------------------------------------

    def _begin_probe(self, kind: str) -> None:
        """The one that tells most, of those that the budget has time for."""
        total = sum(self._load.values())
        if not self._steps or total <= 0:
            return
        left = self._probe_share * self._seconds + _ALLOWANCE_STEPS * self._seconds / self._steps - self._lost_s
        found: tuple[float, Probe] | None = None
        for (each, size), load in self._load.items():
            share = load / total
            if each != kind or share < _LEAST_SHARE:
                continue
            mean_s = self._mean_s(kind, size)
            used = self._settings[kind].arm_for(size)
            for other in (SERIAL_ARM, *self._arms[kind]):
                if other == used or not self._worth_trying(kind, size, used, other):
                    continue
                worth = share * self._worth(kind, size, used, other) / 2 ** self._in_vain.get((kind, size), 0)
                loss = 2 * self._expected_loss(kind, size, used, other) * mean_s
                if loss <= left * min(1.0, worth / _WORTH_ALL) and (found is None or worth > found[0]):
                    found = worth, Probe(kind, size, used, other)
        if found is not None:
            self._active[kind] = found[1]

    def _mean_s(self, kind: str, size: int) -> float:
        """Of a step, lately."""
        count = self._count.get((kind, size), 0.0)
        return self._load[kind, size] / count if count else self._seconds / max(1, self._steps)

    def _once_more(self, probe: Probe) -> bool:
        """Whether the same again makes it known."""
        arm = probe.used if probe.other == SERIAL_ARM else probe.other
        coming = sum((each.kind, each.size) == (probe.kind, probe.size) for each in self._done)
        return len(self._estimate(probe.kind, probe.size, arm).logs) + coming < LEAST_PROBES

    def _worth_trying(self, kind: str, size: int, used: str, other: str) -> bool:
        """What is in use is compared with serial before it is with others; more lanes only where fewer were not bad."""
        if other == SERIAL_ARM:
            return True
        if used != SERIAL_ARM and not self._estimate(kind, size, used).known:
            return False
        if other == self._arms[kind][0]:
            return True
        first = self._estimate(kind, size, self._arms[kind][0])
        return first.known and first.log < 0.05

    def _worth(self, kind: str, size: int, used: str, other: str) -> float:
        """How much the estimate of `other` against `used` may change what is decided; grows with its age."""
        estimate = self._estimate(kind, size, used if other == SERIAL_ARM else other)
        base = 0.0 if SERIAL_ARM in (used, other) else self._estimate(kind, size, used).log
        distance = abs(estimate.log - base)
        age = (self._steps - estimate.step) / _STALE_STEPS
        doubt = estimate.doubt * (1 + age)
        return doubt if distance < 3 * doubt else 0.05 * doubt * min(age, 1.0)

    def _expected_loss(self, kind: str, size: int, used: str, other: str) -> float:
        """Of a step, as a share of its time; nothing where the other arm should be faster."""
        logs = {SERIAL_ARM: 0.0}
        simplest = self._nearest(kind, size, self._arms[kind][0])
        untried = UNKNOWN_LOSS if simplest is None else simplest + _LOSS_OF_ANOTHER
        for arm in (used, other):
            if arm != SERIAL_ARM:
                nearest = self._nearest(kind, size, arm)
                logs[arm] = untried if nearest is None else nearest
        if used != SERIAL_ARM and self._nearest(kind, size, used) is None:
            logs[used] = 0.0  # nobody knows whether what is in use is any good
        return max(0.0, math.exp(logs[other] - logs[used]) - 1.0)

    def _nearest(self, kind: str, size: int, arm: str) -> float | None:
        known = {s: each.log for (k, s, a), each in self._estimates.items() if (k, a) == (kind, arm) and each.logs}
        return known[_nearest_size(known, size)] if known else None


def _nearest_size(known: Mapping[int, float], size: int) -> int:
    return min(known, key=lambda other: (abs(math.log2(other / size)), other))
