"""The decisions of `--dbo-auto`: which arm, from how many tokens on, for every kind of step. No clock, ranks or torch.

The policy gets what all ranks know of a step (kind, fewest tokens of a busy rank, arm) and, later and for many steps
at once, its time on the slowest rank. Every rank passes the same values, so all ranks decide the same.

    each step with its time                            -> `StepModel`: expected time of each arm at each size, and doubt
    expected times of a kind's sizes                   -> `ubatch.schedules.cost_table.choose`
    the setting in use is worse than the chosen one by the hysteresis    -> change it
    a trial in another arm is worth more than it costs, within the budget    -> the next step of that size tries it
    for long, only the arm in use has run at that size and close to it       -> the same

The worth of a trial: the time that the load would gain, over as long as it has lasted, if the arm proved better than
expected by as much as one step can show. Its cost: how much slower the step is expected to be.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model_runner.auto.dbo_model import Seen, StepModel, Sum, mean_below
from ubatch.errors import ConfigError
from ubatch.schedules.cost_table import SERIAL_ARM, CostTable, Setting, choose

__all__ = ["Policy", "PolicyStatistics"]

_Vector = NDArray[np.float64]

_ALLOWANCE_STEPS = 6.0
"""Time that trials may lose at the start, in mean steps; later `probe_share` of the load's time adds to it."""
_HORIZON_STEPS = 2000
"""A load is expected to last as long again as it has lasted, but at most this number of steps."""
_LEAST_COST = 0.01
"""Lowest cost of a trial, as a share of its step's time."""
_PRICE = 2.0
"""A trial must be worth at least this multiple of its cost."""
_CAUTION = 0.5
"""Standard deviations added to the expected time of an arm that is not in use."""
_PATIENCE = 12
"""A trial ends after this number of steps of its kind with other sizes."""
_REACH = 3
"""A rank joins a trial if its batch is less than three times the trial's size; less than twice, after a failed one."""
_LEAST_SHARE = 0.01
"""A size with a smaller share of the load's time gets no trials."""
_LEAST_STEPS = 0.01
"""A size with a smaller weight (unseen for some 1,500 steps) is no longer part of the load."""
_MADE_UP = 0.1
"""Weight, in steps, of a size that was measured before serving."""
_STALE_STEPS = 500
"""A size is stale if for this number of steps only the arm in use has run there."""
_FORGET = 0.997
"""Decay of a step's weight per later step."""
_FEWEST_TOLD, _SHARE_TOLD = 4, 4
"""Times are exchanged after at least four steps, and a quarter of the number known: an exchange costs time."""
_EARLY_STEPS = 128
"""Number of steps with known times up to which the time of a rare arm is wanted at once."""
_LATEST = 8
"""An arm is rare if it ran fewer than a third of the latest eight steps of a size."""


@dataclass
class _Trial:
    """The next step of a size is to run in another arm than the one in use."""

    kind: str
    size: int
    arm: str
    used: str
    strangers: int = 0


@dataclass
class _Load:
    """Recent load of one size: decaying sums of seconds, steps and the logs of their tokens; the number of its first
    step, and of the last step in each arm.
    """

    since: int
    seconds: float = 0.0
    steps: float = 0.0
    fewest: float = 0.0
    most: float = 0.0
    last: dict[str, int] = field(default_factory=dict)

    def add(self, seen: Seen, seconds: float, weight: float = 1.0) -> None:
        self.seconds += weight * seconds
        self.steps += weight
        self.fewest += weight * math.log(seen.fewest)
        self.most += weight * math.log(seen.most)

    @property
    def tokens(self) -> float:
        return math.exp(self.fewest / self.steps)

    def step(self, kind: str, arm: str) -> Seen:
        """A step of this size's mean token counts."""
        return Seen(kind, round(self.tokens), round(math.exp(self.most / self.steps)), arm)

    @property
    def mean_s(self) -> float:
        return self.seconds / self.steps


@dataclass(frozen=True)
class PolicyStatistics:
    """The decisions so far, and why.

    Attributes:
        steps: number of steps voted on.
        seconds: total of the step times known so far.
        probes: number of trials, steps run in another arm than the one in use.
        lost_s: estimated seconds that trials were slower than the arm in use.
        changes: number of times a setting changed.
        settings: kind -> the setting in use.
        reasons: kind -> a sentence with the reason.
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
        start: kind -> the setting to begin with; serial if there is none.
        probe_share: largest share of the time that trials may lose.
        hysteresis: a setting changes if another one is faster by more than this share.

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
        self._model = StepModel(self._arms)
        self._load: dict[str, dict[int, _Load]] = {kind: {} for kind in arms}
        self._ran: dict[str, set[str]] = {kind: set() for kind in arms}  # kind -> arms
        self._in_vain: dict[tuple[str, int], int] = {}
        self._trials: dict[str, _Trial] = {}  # by kind: a load without prefills must not hold up decodes
        self._waiting: set[int] = set()  # trials whose times are not known yet
        self._latest: dict[tuple[str, int], deque[str]] = {}  # kind and size -> arms of the latest steps
        self._rare: set[int] = set()  # steps in a rare arm whose times are not known yet
        self._steps = self._told = self._probes = self._changes = 0
        self._last_told = -1
        self._seconds = self._lost_s = 0.0

    # -- before a step, and after its vote ---------------------------------------------------------------------

    def setting(self, kind: str, tokens: int) -> Setting:
        """The setting for a step of this kind with `tokens` tokens on this rank: a trial's arm while a trial is on.

        Ranks may have batches of different sizes, so a trial includes batches somewhat larger than its own size.
        """
        trial = self._trials.get(kind)
        if trial is None:
            return self._settings[kind]
        reach = 2 if (kind, trial.size) in self._in_vain else _REACH
        if not trial.size <= tokens < reach * trial.size:
            return self._settings[kind]
        return Setting() if trial.arm == SERIAL_ARM else Setting(trial.arm, trial.size)

    def saw(self, step: Seen) -> int:
        """Records a step after its vote; returns its number, under which `learn` passes its time."""
        number, self._steps = self._steps, self._steps + 1
        latest = self._latest.setdefault((step.kind, step.size), deque(maxlen=_LATEST))
        latest.append(step.arm)
        if 3 * latest.count(step.arm) < len(latest):
            self._rare.add(number)
        trial = self._trials.get(step.kind)
        if trial is None:
            return number
        if step.arm == trial.arm != self._settings[step.kind].arm_for(step.fewest):
            del self._trials[step.kind]
            self._waiting.add(number)
            return number
        trial.strangers += 1
        if step.size == trial.size or trial.strangers > _PATIENCE:
            key = trial.kind, trial.size
            self._in_vain[key] = self._in_vain.get(key, 0) + 1
            del self._trials[step.kind]
        return number

    def wants_times(self, before: int) -> bool:
        """Whether the times of the steps before number `before` are needed now; else they can wait.

        The answer depends only on votes and on which times were exchanged, so it is the same on ranks that round
        differently.
        """
        if self._told < _EARLY_STEPS and any(number < before for number in self._rare):
            return True
        return before > self._last_told + max(_FEWEST_TOLD, self._told // _SHARE_TOLD)

    # -- at the start, and now and then ------------------------------------------------------------------------

    def measured(self, times: Sequence[tuple[Seen, float]]) -> None:
        """Learns measurement steps that ran before serving, with their seconds on the slowest rank, and chooses the
        first settings as if the load had a step of each of their sizes. Pass the same on every rank.
        """
        groups: dict[tuple[str, str, int], list[tuple[Seen, float]]] = {}
        for seen, seconds in filter(lambda each: self._knows(each[0]), times):
            groups.setdefault((seen.kind, seen.arm, seen.size), []).append((seen, seconds))
        for (kind, arm, size), group in groups.items():
            self._model.see(group, tried=True)
            self._ran[kind].add(arm)
            if arm == SERIAL_ARM:
                mean_s = sum(seconds for _, seconds in group) / len(group)
                self._load[kind].setdefault(size, _Load(0)).add(group[0][0], mean_s, _MADE_UP)
        self._model.begin_load()
        for kind in self._arms:
            self._decide(kind)

    def learn(self, times: Mapping[int, tuple[Seen, float]]) -> None:
        """Learns step times, then decides on settings and trials.

        Args:
            times: number -> step and its seconds on the slowest rank, for every step since the last call; the same on
                every rank.
        """
        if not times:
            return
        self._told += len(times)
        self._last_told = max(times)
        self._model.pass_time(len(times))
        self._weigh(times)
        for group in self._groups(times):
            self._model.see([times[number] for number in group], tried=group[0] in self._waiting)
        for number, (seen, _) in times.items():
            if number in self._waiting:
                self._probes += 1
                self._lost_s += self._loss(seen.kind, seen.fewest, seen.arm) * self._load[seen.kind][seen.size].mean_s
        self._waiting = {number for number in self._waiting if number > self._last_told}
        self._rare = {number for number in self._rare if number > self._last_told}
        self._reasons = dict(self._reasons)
        for kind in dict.fromkeys(seen.kind for seen, _ in times.values()):
            if kind not in self._arms:
                continue
            self._decide(kind)
            if kind not in self._trials:
                self._begin_trial(kind)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Kind -> the setting in use, and why; a new mapping after every change."""
        return self._reasons

    def statistics(self) -> PolicyStatistics:
        """The current settings, and the totals so far."""
        return PolicyStatistics(
            steps=self._steps,
            seconds=self._seconds,
            probes=self._probes,
            lost_s=self._lost_s,
            changes=self._changes,
            settings=dict(self._settings),
            reasons=dict(self._reasons),
        )

    def _weigh(self, times: Mapping[int, tuple[Seen, float]]) -> None:
        """Adds these steps to the recent load, and lets older steps decay."""
        forget = _FORGET ** len(times)
        for kind, sizes in self._load.items():
            for load in sizes.values():
                load.seconds, load.steps, load.fewest, load.most = (
                    value * forget for value in (load.seconds, load.steps, load.fewest, load.most)
                )
            self._load[kind] = {size: load for size, load in sizes.items() if load.steps > _LEAST_STEPS}
        for number, (seen, seconds) in times.items():
            self._seconds += seconds
            if seen.kind not in self._arms:
                continue
            load = self._load[seen.kind].setdefault(seen.size, _Load(number))
            load.add(seen, seconds)
            load.last[seen.arm] = number
            self._ran[seen.kind].add(seen.arm)

    def _knows(self, seen: Seen) -> bool:
        return seen.kind in self._arms and seen.arm in (SERIAL_ARM, *self._arms[seen.kind])

    def _groups(self, times: Mapping[int, tuple[Seen, float]]) -> Iterator[list[int]]:
        """Groups of step numbers to learn from together: one kind, arm and size; then each trial by itself."""
        groups: dict[tuple[str, str, int], list[int]] = {}
        for number, (seen, _) in times.items():
            if self._knows(seen) and number not in self._waiting:
                groups.setdefault((seen.kind, seen.arm, seen.size), []).append(number)
        yield from groups.values()
        yield from ([number] for number in times if number in self._waiting)

    # -- settings ----------------------------------------------------------------------------------------------

    def _decide(self, kind: str) -> None:
        believed = self._believed(kind)
        if not believed:
            return
        now = self._settings[kind]
        table = self._table(kind, believed)
        best = choose(table, self._arms[kind]).setting
        found, note = now, ""
        if best != now:
            if table.gain(best) > table.gain(now) * (1 + self._hysteresis):
                self._settings[kind] = found = best
                self._changes += 1
                self._trials.pop(kind, None)  # it compares with an arm that is no longer in use
            else:
                note = "; another setting is not better by enough"
        self._reasons[kind] = _in_words(found, believed) + note

    def _believed(self, kind: str) -> dict[int, dict[str, tuple[float, float]]]:
        """Size -> arm -> log(arm / serial) and its standard deviation, for arms that ran; empty until serial ran."""
        arms = [arm for arm in self._arms[kind] if arm in self._ran[kind]]
        cells = [(size, arm) for size in sorted(self._load[kind]) for arm in arms]
        if not cells or SERIAL_ARM not in self._ran[kind]:
            return {}
        load = self._load[kind]
        ratios = [self._model.difference(kind, arm, SERIAL_ARM, load[size].tokens) for size, arm in cells]
        found: dict[int, dict[str, tuple[float, float]]] = {size: {} for size in load}
        logs, doubts = self._model.expected(ratios).tolist(), self._model.doubts(ratios).tolist()
        for (size, arm), log, doubt in zip(cells, logs, doubts, strict=True):
            found[size][arm] = log, doubt
        return found

    def _table(self, kind: str, believed: Mapping[int, Mapping[str, tuple[float, float]]]) -> CostTable:
        """Times relative to serial; an arm that is not in use is charged for its uncertainty."""
        seconds = {}
        for size, arms in believed.items():
            used = self._settings[kind].arm_for(size)
            seconds[size] = {SERIAL_ARM: 1.0} | {
                arm: math.exp(log if arm == used else log + _CAUTION * doubt) for arm, (log, doubt) in arms.items()
            }
        return CostTable(seconds, {size: load.seconds for size, load in self._load[kind].items()})

    # -- trials ------------------------------------------------------------------------------------------------

    def _begin_trial(self, kind: str) -> None:
        """Begins the trial with the largest worth minus cost among those within the budget, if any pays."""
        total = sum(load.seconds for sizes in self._load.values() for load in sizes.values())
        sizes = {size: load for size, load in self._load[kind].items() if load.seconds > _LEAST_SHARE * total}
        if not sizes:
            return
        mean_s = self._seconds / self._told
        left = self._probe_share * self._seconds + _ALLOWANCE_STEPS * mean_s - self._lost_s
        horizon_s = min(self._told, _HORIZON_STEPS) * mean_s
        trials = self._possible_trials(kind, sizes)
        differences = [self._model.difference(kind, each.arm, each.used, sizes[each.size].tokens) for each in trials]
        expected = self._model.expected(differences)
        worth = self._worth(trials, sizes, expected, differences) * horizon_s / total
        likeliest = {size: min(expected[[each.size == size for each in trials]]) for size in sizes}
        found: tuple[float, _Trial] | None = None
        for trial, log, gain_s in zip(trials, expected.tolist(), worth.tolist(), strict=True):
            load = sizes[trial.size]
            cost_s = max(_LEAST_COST, math.expm1(log)) * load.mean_s
            gain_s /= 2 ** self._in_vain.get((kind, trial.size), 0)
            if self._is_stale(trial) and log == likeliest[trial.size]:
                gain_s = max(gain_s, cost_s * (_PRICE + load.seconds / total))
            if _PRICE * cost_s < gain_s and cost_s <= left and (found is None or gain_s - cost_s > found[0]):
                found = gain_s - cost_s, trial
        if found is not None:
            self._trials[kind] = found[1]

    def _possible_trials(self, kind: str, sizes: Mapping[int, _Load]) -> list[_Trial]:
        """For every size, all arms except the one in use."""
        return [
            _Trial(kind, size, arm, used)
            for size, used in ((size, self._settings[kind].arm_for(size)) for size in sizes)
            for arm in (SERIAL_ARM, *self._arms[kind])
            if arm != used
        ]

    def _worth(
        self, trials: Sequence[_Trial], sizes: Mapping[int, _Load], expected: _Vector, differences: Sequence[Sum]
    ) -> _Vector:
        """Mean seconds that the recent load would have gained after each trial, `[trials]`.

        A trial moves every expected log ratio by a normal deviate. A change gains what then lies below minus the
        hysteresis.

        Args:
            trials: all possible trials, size by size.
            sizes: the recent load.
            expected, differences: log(arm / in use) of each trial, as a number and as a sum.
        """
        steps = [sizes[each.size].step(each.kind, each.arm) for each in trials]
        moves = np.maximum(self._model.moves(differences, steps), 1e-9)
        gains = moves * mean_below((expected + self._hysteresis) / moves)
        best = gains.reshape(len(trials), len(sizes), -1).max(axis=2)
        return best @ np.array([load.seconds for load in sizes.values()])

    def _loss(self, kind: str, tokens: int, arm: str) -> float:
        """Expected loss of a step in this arm, as a share of its time in the arm in use."""
        used = self._settings[kind].arm_for(tokens)
        return math.expm1(max(0.0, float(self._model.expected([self._model.difference(kind, arm, used, tokens)])[0])))

    def _is_stale(self, trial: _Trial) -> bool:
        """Whether only the arm in use ran at this size and its neighbours for the last `_STALE_STEPS` steps."""
        latest = self._load[trial.kind][trial.size].since
        for size, load in self._load[trial.kind].items():
            if trial.size < 2 * size < 4 * trial.size:
                used = self._settings[trial.kind].arm_for(size)
                latest = max([latest, *(last for arm, last in load.last.items() if arm != used)])
        return self._steps - latest >= _STALE_STEPS


def _in_words(setting: Setting, believed: Mapping[int, Mapping[str, tuple[float, float]]]) -> str:
    sizes = []
    for tokens, arms in sorted(believed.items()):
        arm, (log, doubt) = min(arms.items(), key=lambda item: item[1][0])
        sizes.append(f"{tokens}: {arm} {math.exp(-log):.2f}x (give or take {doubt:.0%})")
    what = "serial" if setting.threshold is None else f"{setting.arm} from {setting.threshold} tokens on"
    return f"{what}; against serial, by tokens: {', '.join(sizes)}"
