"""The decisions of `--enable-dbo` and `--dbo-auto`: which arm a step runs in, by its kind and size. No clock, ranks or
torch.

The policy gets what all ranks know of a step (kind, tokens, arm) and, some steps later, its stages. Every rank passes
the same values, so all ranks decide the same.

    a size that never ran                        serial, once or twice: it tells the stages
    an arm may be faster than the one in use     the next step tries it, within the budget; what its steps told fades
    an arm is believed faster by the hysteresis  it is used
    an arm is in use for long, or its transfers take another time than before     one serial step, within the budget

Believed: the simulator's answer for the stages of serial steps, corrected by the steps that ran in the arm
(`model_runner.auto.size_times`). An arm from which even the optimist expects nothing is never tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from model_runner.auto.size_times import Belief, Level, SizeTimes
from model_runner.auto.step_stages import Stages
from ubatch.errors import ConfigError
from ubatch.schedules.cost_table import SERIAL_ARM
from ubatch.schedules.schedule import Schedule

__all__ = ["Policy", "PolicyStatistics", "Seen"]

_HYSTERESIS = 0.01
"""An arm replaces the one in use if it is believed faster by more than this (log)."""
_OPTIMISM = 1.0
"""Standard deviations by which an arm that is tried may be better than believed."""
_ALLOWANCE_STEPS = 3.0
"""Mean steps that trials may lose at the start; later `probe_share` of the time adds to it."""
_SERIAL_EVERY = 50
"""Steps in an arm after which one serial step is worth its time."""
_EAGER_STEPS = 8
"""Steps after something new in which every step's time is wanted at once."""
_CALM_EVERY, _CALM_TOGETHER = 4, 4
"""Later every fourth step's time is wanted, four together: timing costs as much as a small step gains."""
_NOISE, _LEAST_NOISE, _MOST_NOISE, _NOISE_MEMORY = 0.06, 0.02, 0.15, 32
_WARM_UP = 0.1
"""The very first step of an arm says nothing if it took longer than expected by this much (log)."""
_SLOPE = 0.7
"""d log seconds / d log tokens of serial steps, while a single size is known."""
_NEAR = 2
"""A size that did not run serially yet is believed to be like one at most so many powers of two away."""


@dataclass(frozen=True)
class Seen:
    """A step that was voted on.

    Attributes:
        kind: `decode`, `prefill`, `verify`, or another word for steps without a decision.
        tokens: mean tokens of the ranks that have some.
        arm: the arm it ran in.
    """

    kind: str
    tokens: int
    arm: str

    @property
    def size(self) -> int:
        """The largest power of two up to its tokens."""
        return 1 << max(0, self.tokens.bit_length() - 1)


@dataclass(frozen=True)
class PolicyStatistics:
    """The decisions so far, and why.

    Attributes:
        steps: number of steps voted on.
        seconds: total of their times, as far as told; a step whose time was taken stands for those that were not.
        probes: number of steps run in another arm than the one in use.
        lost_s: estimated seconds that these were slower.
        changes: number of times the arm in use changed, at any size.
        arms: kind -> smallest tokens of a size -> the arm in use.
        reasons: kind -> a sentence with the reasons.
    """

    steps: int
    seconds: float
    probes: int
    lost_s: float
    changes: int
    arms: Mapping[str, Mapping[int, str]]
    reasons: Mapping[str, str]


class Policy:
    """Decides for the kinds of steps it is given.

    Args:
        arms: kind -> name -> schedule of the arms beside the serial one, the simplest first.
        probe_share: largest share of the time that trials may lose.

    Raises:
        ConfigError: no arms, or a share outside 0 to 1.
    """

    def __init__(self, arms: Mapping[str, Mapping[str, Schedule]], *, probe_share: float = 0.01) -> None:
        if not arms or not all(arms.values()):
            raise ConfigError("an automatic policy needs at least one arm for every kind of step.")
        if not 0 < probe_share < 1:
            raise ConfigError(f"probe_share must be between 0 and 1, not {probe_share}.")
        self._arms = {kind: dict(each) for kind, each in arms.items()}
        self._probe_share = probe_share
        self._sizes: dict[str, dict[int, SizeTimes]] = {kind: {} for kind in arms}
        self._elsewhere: dict[tuple[str, str], Level] = {}  # (kind, arm) -> its `off` over all sizes
        self._noise = dict.fromkeys(arms, _NOISE)
        self._latest: dict[str, int] = {}  # kind -> tokens of the latest step
        self._trials: dict[int, str] = {}  # step whose time is unknown -> the arm in use then
        self._stands_for: dict[int, int] = {}  # the same -> number of steps, where more than one
        self._steps = self._told = self._probes = self._changes = 0
        self._eager_until = _EAGER_STEPS
        self._seconds = self._lost_s = 0.0
        self._reasons: Mapping[str, str] | None = None  # as of the latest times; every step asks

    # -- before a step, and after its vote ---------------------------------------------------------------------

    def arm(self, kind: str, tokens: int) -> str:
        """The arm for a step of this kind with `tokens` tokens on this rank.

        Ranks with somewhat different batches must ask for the same arm: while the batch is like that of the latest
        step of the kind, its size counts.
        """
        latest = self._latest.get(kind, tokens)
        if latest / 2 <= tokens <= latest * 2:
            tokens = latest
        size = Seen(kind, tokens, SERIAL_ARM).size
        own, near = self._sizes[kind].get(size), self._near(kind, size)
        if own is None or near is None or not own.serial_steps:
            return SERIAL_ARM
        if near.seconds.weight < 2 and sum(each.known for each in self._sizes[kind].values()) < 2:
            return SERIAL_ARM  # the very first step may have warmed up
        used = self._used(kind, own, near)
        beliefs = dict(self._beliefs(kind, near, faded=True))
        if used != SERIAL_ARM:
            due = own.suspect or own.steps - own.ran_at[SERIAL_ARM] >= _SERIAL_EVERY
            if due and self._affords(math.exp(near.seconds.value) * (1 - math.exp(min(0.0, beliefs[used].mean)))):
                return SERIAL_ARM
        used_log = beliefs[used].mean if used != SERIAL_ARM else 0.0
        tried = min(beliefs, key=lambda arm: beliefs[arm].mean - _OPTIMISM * beliefs[arm].doubt)
        hoped = beliefs[tried]
        if tried == used or hoped.mean - _OPTIMISM * hoped.doubt > used_log - _HYSTERESIS:
            return used
        cost = math.expm1(max(0.0, hoped.mean - used_log)) * math.exp(near.seconds.value + used_log)
        return tried if self._affords(cost) else used

    def saw(self, step: Seen) -> int | None:
        """Records a step after its vote; returns its number, under which `learn` gets its stages, None if unwanted."""
        number, self._steps = self._steps, self._steps + 1
        if step.kind not in self._sizes:
            return None
        self._latest[step.kind] = step.tokens
        sizes = self._sizes[step.kind]
        own = sizes.setdefault(step.size, SizeTimes())
        if step.arm != own.latest:  # of votes alone: ranks that round differently must be eager together
            self._eager_until = self._steps + _EAGER_STEPS
        own.latest = step.arm
        own.steps += 1
        own.ran_at[step.arm] = own.steps
        own.serial_steps += step.arm == SERIAL_ARM
        near = self._near(step.kind, step.size)
        used = SERIAL_ARM if near is None else self._used(step.kind, own, near)
        self._probes += step.arm != used
        if not self.eager:  # of votes alone, like `wants_times`
            if number % _CALM_EVERY:
                return None
            self._stands_for[number] = _CALM_EVERY
        if step.arm != used:
            self._trials[number] = used
        own.untold[step.arm] += 1
        return number

    def wants_times(self, waiting: int) -> bool:
        """Whether the ranks should exchange the times of `waiting` steps now.

        It depends on votes alone, so it is the same on ranks that round differently: an exchange that one rank leaves
        out would take the others' vote for it.
        """
        return waiting >= _CALM_TOGETHER or (waiting > 0 and self.eager)

    @property
    def eager(self) -> bool:
        """Whether a size lately ran in another arm than before: then a step's time is wanted before the next step."""
        return self._steps <= self._eager_until

    # -- now and then ------------------------------------------------------------------------------------------

    def learn(self, times: Mapping[int, tuple[Seen, Stages | None]]) -> list[str]:
        """Learns the stages of steps, then decides which arms are in use.

        Args:
            times: number -> step and its stages, None if it failed; for every step that has a number and ran since the
                last call, the same on every rank.

        Returns:
            The kinds with another arm in use at some size than before.
        """
        self._reasons = None
        changed: dict[str, None] = {}
        touched: dict[tuple[str, int], None] = {}
        for number, (step, stages) in times.items():
            used, count = self._trials.pop(number, step.arm), self._stands_for.pop(number, 1)
            own = self._sizes.get(step.kind, {}).get(step.size)
            if own is None:
                continue
            own.untold[step.arm] -= 1
            if stages is None or not stages.seconds > 0:
                continue
            self._told += count
            self._seconds += count * stages.seconds
            self._learn(step, stages, own, used)
            touched[step.kind, step.size] = None
        for kind, size in touched:
            own, near = self._sizes[kind][size], self._near(kind, size)
            if near is None:
                continue
            near.expect(self._arms[kind])
            best = self._believed_best(kind, near, own.used)
            if best != own.used:
                own.used = best
                self._changes += 1
                changed[kind] = None
        return list(changed)

    def _learn(self, step: Seen, stages: Stages, own: SizeTimes, used: str) -> None:
        kind, noise, log_tokens = step.kind, self._noise[step.kind], math.log(max(1, step.tokens))
        if step.arm == SERIAL_ARM:
            moved = own.add_serial(log_tokens, stages, noise)
        elif step.arm in self._arms[kind]:
            near = self._near(kind, step.size)
            if near is None:
                return
            before = near.off.get(step.arm, Level()).value
            ratio = math.log(stages.seconds) - near.serial_log_s(log_tokens, self._slope(kind))
            warms_up = (kind, step.arm) not in self._elsewhere
            elsewhere = self._elsewhere.setdefault((kind, step.arm), Level())
            if warms_up and near.off_of(step.arm, ratio) > _WARM_UP:
                return
            travel = math.log(stages.travel) - 0.5 * log_tokens if stages.travel > 0 else None
            off = near.add_arm(step.arm, ratio, travel, noise)
            elsewhere.add(off, _MOST_NOISE)
            moved = off - before if near.off[step.arm].weight > 1 else 0.0
            own.suspect |= near.suspect
        else:
            return
        if moved:
            variance = noise**2 + (min(abs(moved), 3 * noise) ** 2 - noise**2) / _NOISE_MEMORY
            self._noise[kind] = min(max(math.sqrt(variance), _LEAST_NOISE), _MOST_NOISE)
        if used != step.arm and (near := self._near(kind, step.size)) is not None:
            log_s = near.serial_log_s(log_tokens, self._slope(kind))
            if used != SERIAL_ARM:
                log_s += near.belief(used, self._elsewhere.get((kind, used), Level()), noise).mean
            self._lost_s += max(0.0, stages.seconds - math.exp(log_s))

    # -- what is believed --------------------------------------------------------------------------------------

    def _near(self, kind: str, size: int) -> SizeTimes | None:
        """This size, or the nearest one with a known serial time; None if there is none close by."""
        sizes = self._sizes[kind]
        for power in range(_NEAR + 1):
            for other in (size << power, size >> power):
                if other in sizes and sizes[other].known:
                    return sizes[other]
        return None

    def _used(self, kind: str, own: SizeTimes, near: SizeTimes) -> str:
        """The arm in use; at a size whose serial time is not known, the best one of a size close by."""
        return own.used if own.known else self._believed_best(kind, near, near.used)

    def _beliefs(self, kind: str, near: SizeTimes, *, faded: bool = False) -> Iterator[tuple[str, Belief]]:
        for arm in self._arms[kind]:
            yield arm, near.belief(arm, self._elsewhere.get((kind, arm), Level()), self._noise[kind], faded=faded)

    def _believed_best(self, kind: str, near: SizeTimes, used: str) -> str:
        """The arm with the least believed time; `used` unless it is slower by the hysteresis."""
        logs = {SERIAL_ARM: 0.0, **{arm: belief.mean for arm, belief in self._beliefs(kind, near)}}
        best = min(logs, key=logs.__getitem__)
        return best if logs[best] < logs[used] - _HYSTERESIS else used

    def _slope(self, kind: str) -> float:
        """d log seconds / d log tokens of serial steps, from the sizes that are known."""
        points = [(each.tokens.value, each.seconds.value) for each in self._sizes[kind].values() if each.known]
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        if spread < 0.1:
            return _SLOPE
        return min(max(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0), 1.2)

    def _affords(self, cost_s: float) -> bool:
        mean_s = self._seconds / self._told if self._told else 0.0
        left = self._probe_share * self._seconds + _ALLOWANCE_STEPS * mean_s - self._lost_s
        return cost_s * (1 + len(self._trials)) <= left

    # -- in words ----------------------------------------------------------------------------------------------

    @property
    def reasons(self) -> Mapping[str, str]:
        """Kind -> a sentence: the arm in use by size, and why."""
        if self._reasons is None:
            self._reasons = {kind: self._in_words(kind) for kind in self._arms}
        return self._reasons

    def _in_words(self, kind: str) -> str:
        told = []
        for size, own in sorted(self._sizes[kind].items()):
            near = own if own.known else None
            if near is None:
                continue
            arm, belief = min(self._beliefs(kind, near), key=lambda item: item[1].mean)
            waits = "" if near.stages is None else f", {near.stages.waits / near.stages.seconds:.0%} waiting"
            what = f"{arm} {math.exp(-belief.mean):.2f}x" + ("" if own.off.get(arm) else " expected")
            told.append(f"{size}: {own.used} ({math.exp(own.seconds.value) * 1e3:.3g} ms serial{waits}; {what})")
        return "by tokens: " + "; ".join(told) if told else "serial: nothing is measured yet"

    def statistics(self) -> PolicyStatistics:
        """The decisions so far."""
        arms = {kind: {size: own.used for size, own in sorted(sizes.items())} for kind, sizes in self._sizes.items()}
        return PolicyStatistics(
            self._steps, self._seconds, self._probes, self._lost_s, self._changes, arms, self.reasons
        )
