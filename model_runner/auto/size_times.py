"""What is known of steps of one kind and about one size: their serial time, and how overlapped ones compare.

    log seconds of an overlapped step  =  log serial seconds(tokens)  +  expected  +  off  +  noise

`expected` is the simulator's answer for the mean stages of serial steps. `off` is what overlapped steps add to it.
"""

from __future__ import annotations

import math
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
