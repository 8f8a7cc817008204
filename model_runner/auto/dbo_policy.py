"""The decisions of `--enable-dbo`: whether the next step overlaps, by its kind and size. No clock, ranks or torch.

The policy gets what all ranks know of a step (kind, tokens, whether it overlapped) and, some steps later, its stages.
Every rank passes the same values, so all ranks decide the same.

    a size that never ran            first as the nearest one, then serial until its time is known
    overlap is believed faster       the size overlaps; now and then a serial step checks that it still should
    overlap might be faster          now and then a step tries it; less often, the more have told that it is not
    the times of a size change       so has the machine or the link: the sizes are forgotten, and begin anew

Known of steps of one kind and about one size are their serial time, and how overlapped ones compare (`SizeTimes`):

    log seconds of an overlapped step  =  log serial seconds(tokens)  +  expected  +  off  +  noise

`expected` is the simulator's answer for the mean stages of serial steps. `off` is what overlapped steps add to it: by
that, the answer is corrected. Where even an optimist expects nothing, nothing is tried.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from model_runner.auto.step_stages import Stages, expected_log_ratio
from ubatch import Schedule

_MEMORY, _MEMORY_OF_TRIALS = 16, 4
"""Steps that a level is averaged over; fewer where they lie far apart."""
_WARM_UP = 0.1
"""A first value counts no longer if the second is lower by this much (log): the step warmed up."""
_FAR = 4.0
"""Standard deviations beyond which a value is an outlier, or, if the next one is like it, the level has changed."""
_UNMEASURED, _UNTRIED, _TRIED = 0.2, 0.1, 0.06
"""Standard deviation of `off` before a step overlapped: without stages, with them, where one of another size did."""
_FIRST_TRY, _TRIAL_SHARE, _MOST_COST, _SURE = 8, 0.01, 2.0, 3
"""A size runs a step the other way than decided after so many, if what that costs, in steps, is at most this share of
those since the last; one that stalled may have told too much. Each overlapped one that changes nothing doubles them, up
to so often."""
_NEW_STEPS, _SETTLED_EVERY, _LONG_LOG_S = 8, 4, math.log(0.075)
"""The first 8 steps of a size are timed, and the 8 after a change (its steps take another time, or the decision is
reversed); later every fourth, unless steps are long. Timing a step takes some 0.15 ms, of a long one at most 0.2%."""
_ASK_EVERY = 32  # serial steps: then the simulator is asked about their mean stages again, at first sooner


@dataclass
class Level:
    """A drifting mean of logs. Single outliers are ignored; two in a row on the same side begin a new level."""

    value: float = 0.0
    weight: int = 0
    far: int = 0

    def add(self, value: float, noise: float, *, trial: bool = False) -> bool:
        """Add a value; returns whether it begins a new level, of it alone. Trials are far apart: the last few count."""
        side = 1 if value > self.value else -1
        is_far = self.weight >= 2 and abs(value - self.value) > _FAR * noise
        changed = is_far and self.far == side
        if is_far and not self.far:
            self.far = side
            return False
        if changed or (self.weight == 1 and value < self.value - _WARM_UP):
            self.weight = 0
        self.far = 0
        self.weight = min(self.weight + 1, _MEMORY_OF_TRIALS if trial else _MEMORY)
        self.value += (value - self.value) / self.weight
        return changed


@dataclass
class SizeTimes:
    """Steps of one kind whose tokens are nearest to one power of two.

    Attributes:
        tokens: log tokens of the first serial step.
        seconds: log seconds of serial steps with so many tokens; without weight until one is known.
        stages: the mean of serial steps' stages; None if they cannot be measured.
        expected, off: see the top of this file; `expected` is 0 without stages.
        steps: number of its steps.
        new_at: `steps` at the last change: one took another time than its size does, or the decision was reversed.
        tried_at: `steps` at the latest trial, a step that runs the other way than decided; at least `new_at`.
        sure: overlapped trials since then that confirmed the decision.
        overlaps: whether its steps overlap.
    """

    tokens: float = 0.0
    seconds: Level = field(default_factory=Level)
    stages: Stages | None = None
    expected: float = 0.0
    off: Level = field(default_factory=Level)
    steps: int = 0
    new_at: int = 0
    tried_at: int = 0
    sure: int = 0
    overlaps: bool = False
    _told: int = 0

    def starts_step(self, overlapped: bool, trial: bool) -> bool:
        """Count a step; returns whether its time is wanted."""
        self.steps += 1
        if trial:
            self.tried_at, self.sure = self.steps, self.sure + overlapped
        is_long = self.seconds.weight > 0 and self.seconds.value > _LONG_LOG_S
        return trial or is_long or self.steps - self.new_at <= _NEW_STEPS or self.steps % _SETTLED_EVERY == 0

    def is_due(self, believed: float) -> bool:
        """Whether the next step should run the other way than decided, to know."""
        if not self.overlaps and self.expected > _UNTRIED:
            return False  # even at best it gains nothing
        after: float = _FIRST_TRY
        if not self.seconds.far and not self.off.far:  # else what was told last is to be told again
            cost = min(math.expm1(-believed if self.overlaps else believed), _MOST_COST)
            after = max(_FIRST_TRY, cost / _TRIAL_SHARE) * 2 ** min(self.sure, _SURE)
        return self.steps - self.tried_at >= after

    def watch(self) -> None:
        """Something has changed: the next steps are timed, and soon one runs the other way."""
        self.new_at, self.tried_at, self.sure = self.steps, self.steps, 0

    def add_stages(self, stages: Stages, schedule: Schedule) -> None:
        """Add those of a serial step. What is expected follows their mean seldom, as the simulator takes longest."""
        if stages.attention + stages.experts > 0:
            self.stages = stages if self.stages is None else self.stages.toward(stages, 1 / self.seconds.weight)
            self._told += 1
            if self._told in (1, 2, 4, 8, 16) or self._told % _ASK_EVERY == 0:
                self.expected = expected_log_ratio(self.stages, schedule)

    def believed(self, elsewhere: float | None, noise: float) -> float:
        """log(time of an overlapped step / of a serial one). `elsewhere` is `off` of the kind's other sizes together,
        None if none of them overlapped; `noise` is the standard deviation of a step's log time."""
        prior = _TRIED if elsewhere is not None else _UNMEASURED if self.stages is None else _UNTRIED
        sure, told = prior**-2, self.off.weight * noise**-2
        return self.expected + (sure * (elsewhere or 0.0) + told * self.off.value) / (sure + told)


_NOISE, _LEAST_NOISE, _MOST_NOISE, _NOISE_MEMORY = 0.06, 0.02, 0.15, 32
"""Standard deviation of the log of a step's time: at first, its limits, and the steps that it is averaged over."""
_SLOPE, _LEAST_SPREAD = 0.35, 0.1
"""d log seconds / d log tokens of serial steps, until the sizes that are known are spread so much (squares of logs)."""


@dataclass(frozen=True)
class Seen:
    """A step that was voted on, and whose time is wanted.

    Attributes:
        kind: `decode`, `prefill` or `verify`.
        size: the size that it counts for, a power of two.
        tokens: mean tokens of the ranks that have some.
        overlapped: whether it ran under its kind's schedule.
        trial: whether it ran the other way than decided for its size because the policy wanted to know.
    """

    kind: str
    size: int
    tokens: int
    overlapped: bool
    trial: bool


@dataclass
class Kind:
    """What is known of the steps of one kind.

    Attributes:
        schedule: of its overlapped steps.
        sizes: their times by size, a power of two.
        noise: standard deviation of the log of a step's time.
        slope: d log seconds / d log tokens of serial steps, from the sizes that were known when it was asked for last.
        latest: mean tokens of the latest step; 0 before the first.
        voted: this rank's tokens in its latest vote.
        warm: whether steps overlapped of which a time was told.
    """

    schedule: Schedule
    sizes: dict[int, SizeTimes] = field(default_factory=dict)
    noise: float = _NOISE
    slope: float = _SLOPE
    latest: int = 0
    voted: int = 0
    warm: set[bool] = field(default_factory=set)

    def wants(self, tokens: int) -> bool:
        """Whether a step with so many tokens should overlap, by the known size that is nearest."""
        bits = self.size(tokens).bit_length()
        nearest = min(self.sizes, key=lambda other: abs(other.bit_length() - bits), default=None)
        own = SizeTimes() if nearest is None else self.sizes[nearest]
        return own.seconds.weight > 0 and own.overlaps != own.is_due(self.believed(own))

    def size(self, tokens: int) -> int:
        """The size that a step counts for, the nearest power of two: that of the latest step, if they are alike."""
        return 1 << round(math.log2(self.latest if _alike(tokens, self.latest) else max(1, tokens)))

    def add(self, step: Seen, own: SizeTimes, stages: Stages) -> bool:
        """Add a step's stages to its size; returns whether the times of that have changed."""
        log_tokens = math.log(max(1, step.tokens))
        if not own.seconds.weight:
            if step.overlapped:
                return False  # nothing to compare with
            own.tokens = log_tokens
        level, predicted = own.seconds, own.seconds.value + own.expected
        value = math.log(stages.seconds) - self.known_slope() * (log_tokens - own.tokens)
        if step.overlapped:
            level, value = own.off, value - predicted
        moved = abs(value - level.value) if level.weight else 0.0
        changed = level.add(value, self.noise, trial=step.trial)
        if moved:
            variance = self.noise**2 + (min(moved, 3 * self.noise) ** 2 - self.noise**2) / _NOISE_MEMORY
            self.noise = min(max(math.sqrt(variance), _LEAST_NOISE), _MOST_NOISE)
        if level.far:
            own.watch()
        elif not step.overlapped:
            own.add_stages(stages, self.schedule)
        if step.trial and not step.overlapped:  # how long its overlapped steps take stays known
            own.off.value -= own.seconds.value + own.expected - predicted
        return changed

    def believed(self, own: SizeTimes) -> float:
        """log(time of an overlapped step / of a serial one) of a size, also from what other sizes have told."""
        told = [each.off for each in self.sizes.values() if each is not own and each.off.weight]
        weight = sum(each.weight for each in told)
        elsewhere = sum(each.weight * each.value for each in told) / (weight + 1) if told else None
        return own.believed(elsewhere, self.noise)

    def known_slope(self) -> float:
        """The slope, from the sizes that are known now."""
        known = [each for each in self.sizes.values() if each.seconds.weight]
        mean = sum(each.tokens for each in known) / max(1, len(known))
        spread = sum((each.tokens - mean) ** 2 for each in known)
        if spread > _LEAST_SPREAD:
            found = sum((each.tokens - mean) * each.seconds.value for each in known) / spread
            self.slope = min(max(found, 0.0), 1.2)
        return self.slope

    def in_words(self) -> str:
        """What each size does, and why."""
        told = []
        for size, own in sorted((size, own) for size, own in self.sizes.items() if own.seconds.weight):
            waits = "" if own.stages is None else f", {own.stages.waits / own.stages.seconds:.0%} waiting"
            gain = f"{math.exp(-self.believed(own)):.2f}x" + ("" if own.off.weight else " expected")
            does, serial_ms = "overlapped" if own.overlaps else "serial", math.exp(own.seconds.value) * 1e3
            told.append(f"{size}: {does} ({serial_ms:.3g} ms serial{waits}; overlapped {gain})")
        return "by tokens: " + "; ".join(told) if told else "serial: nothing is measured yet"


class Policy:
    """Decides for kinds of steps, given the schedule of each one's overlapped steps.

    Attributes:
        kinds: what is known of each.
        timed: number of steps whose times were told.
        trials: number of steps that ran the other way than decided for their size, to know.
    """

    def __init__(self, schedules: Mapping[str, Schedule]) -> None:
        self.timed = self.trials = 0
        self.kinds = {kind: Kind(schedule) for kind, schedule in schedules.items()}
        self._reasons: Mapping[str, str] | None = None  # as of the latest times; every step asks

    def overlaps(self, kind: str, tokens: int) -> bool:
        """Whether a step of this kind with `tokens` tokens on this rank should overlap. Ranks with other batches
        must decide alike: if this rank has a batch like its last, the size of the kind's latest step counts."""
        own = self.kinds[kind]
        before, own.voted = own.voted, tokens
        return own.wants(own.latest or tokens if _alike(tokens, before) else tokens)

    def saw(self, kind: str, tokens: int, overlapped: bool) -> Seen | None:
        """Records a step after its vote: its kind, or another word if nothing is decided for it; the mean tokens of the
        ranks that have some; whether it runs under its kind's schedule. Returns what `learn` needs with its stages;
        None if its time is not wanted."""
        known = self.kinds.get(kind)
        if known is None:
            return None
        wanted, size = known.wants(tokens), known.size(tokens)
        own = known.sizes.setdefault(size, SizeTimes())
        trial = own.seconds.weight > 0 and overlapped == wanted != own.overlaps
        self.trials += trial
        known.latest = tokens
        return Seen(kind, size, tokens, overlapped, trial) if own.starts_step(overlapped, trial) else None

    def learn(self, step: Seen, stages: Stages) -> bool:
        """Learns the stages of a step that `saw` returned, then decides for its size; returns whether that has changed.
        The calls are the same on every rank."""
        self._reasons = None
        self.timed += 1
        kind = self.kinds[step.kind]
        own = kind.sizes.setdefault(step.size, SizeTimes())
        before = own.overlaps
        if step.overlapped not in kind.warm:  # the very first one connects to peers, or starts threads
            kind.warm.add(step.overlapped)
            own.sure = 0
            return False
        if kind.add(step, own, stages):  # nothing that was told holds on another machine or over another link
            for each in self.kinds.values():
                each.sizes.clear()
            own = kind.sizes[step.size] = SizeTimes()
            kind.add(step, own, stages)
        if own.seconds.weight:
            own.overlaps = kind.believed(own) < 0
        if own.overlaps != before:
            own.watch()
        return own.overlaps != before

    @property
    def reasons(self) -> Mapping[str, str]:
        """Kind -> a sentence: what each size does, and why."""
        if self._reasons is None:
            self._reasons = {name: kind.in_words() for name, kind in self.kinds.items()}
        return self._reasons


def _alike(tokens: int, others: int) -> bool:
    """Whether a step has half to twice the tokens of another one."""
    return others <= 2 * tokens <= 4 * others
