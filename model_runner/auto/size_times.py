"""What is known of steps of one kind and about one size: their serial time, and how overlapped ones compare. No clock,
no ranks, no torch.

    log seconds of an overlapped step  =  log serial seconds(tokens)  +  expected  +  off  +  noise

`expected` is the simulator's answer for the latest serial stages (`model_runner.auto.overlap_gain`), so a change of the
link moves it at once. `off` is what overlapped steps add to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from model_runner.auto.overlap_gain import expected_log_ratio
from model_runner.auto.step_stages import Stages
from ubatch.schedules.schedule import Schedule

__all__ = ["Belief", "Level", "SizeTimes"]

_MEMORY = 16
"""Steps that a level is averaged over."""
_WARM_UP = 0.1
"""A first step counts no longer if the second is faster by this much (log): it warmed up."""
_FAR = 4.0
"""Standard deviations beyond which a step is an outlier, or, if the next one is like it, the level has changed."""
_UNLIKE = 2.0
"""Standard deviations beyond which a serial step begins a new level at once, where a change is suspected."""
_TRAVEL_NOISE = 0.1
"""Least standard deviation of the log of what transfers travel."""
_MOVED = 0.06
"""The simulator is asked again when a stage has moved by this share of the step."""
_UNMEASURED, _UNTRIED, _TRIED = 0.2, 0.1, 0.06
"""Standard deviation of `off` before a step overlapped: without stages, with stages, and where steps of another size
did."""
_FADES, _LEAST_LEFT = 16, 3.0
"""Steps of a size after which what a step told counts half: it may have been disturbed. Of a level so much is left."""
_SURE = 4
"""Each overlapped step that tells again who is faster, after the last has faded, doubles `_FADES`; up to so many."""


@dataclass
class Level:
    """A drifting mean of logs. Single outliers are ignored; two alike begin a new level."""

    value: float = 0.0
    weight: float = 0.0
    far: int = 0

    def add(self, value: float, noise: float, age: float = 0, *, least: float = _LEAST_LEFT) -> bool:
        """Add a value, `age` steps after the last one; returns whether a new level began. `least`: weight that ageing
        leaves."""
        self.weight = min(self.weight, max(least, self.weight * 0.5 ** (age / _FADES)))
        side = 1 if value > self.value else -1
        if self.weight >= 3 and abs(value - self.value) > _FAR * noise:
            if self.far != side:
                self.far = side
                return False
            self.value, self.weight, self.far = value, 1.0, 0
            return True
        self.far = 0
        if self.weight == 1 and value < self.value - _WARM_UP:
            self.value, self.weight = value, 2.0
            return False
        self.weight = min(self.weight + 1, _MEMORY)
        self.value += (value - self.value) / self.weight
        return False


@dataclass(frozen=True)
class Belief:
    """log(time of an overlapped step / of a serial one), and its standard deviation."""

    mean: float
    doubt: float

    @property
    def hoped(self) -> float:
        """What it may be at best, by one standard deviation."""
        return self.mean - self.doubt


@dataclass
class SizeTimes:
    """Steps of one kind whose tokens lie between two powers of two.

    Attributes:
        seconds: log seconds of its serial steps with `tokens` tokens, also a log.
        stages: the mean of serial steps' stages; None if they cannot be measured.
        expected, off: see the top of this file; `expected` is None without stages.
        travel: log of the time that an overlapped step's transfers travelled.
        steps: number of its steps.
        serial_at, overlapped_at: number of the latest step of either sort; 0 before the first.
        told_at, off_at: number of its latest step when a step of either sort was told last.
        checks: serial steps since its steps overlap.
        agreed: overlapped steps in a row that told again who is faster, after the one before had faded.
        suspect: the machine or the link seems to have changed since the last serial step: if the next one differs, it
            begins a new level.
        stale: the same, as a step of another size told it; until then overlapped steps are compared with nothing.
        overlaps: whether its steps overlap.
        latest: whether the latest step did; None before the first.
    """

    tokens: float = 0.0
    seconds: Level = field(default_factory=Level)
    stages: Stages | None = None
    expected: float | None = None
    off: Level = field(default_factory=Level)
    travel: Level = field(default_factory=Level)
    steps: int = 0
    serial_at: int = 0
    overlapped_at: int = 0
    told_at: int = 0
    off_at: int = 0
    checks: int = 0
    agreed: int = 0
    suspect: bool = False
    stale: bool = False
    overlaps: bool = False
    latest: bool | None = None
    _asked: Stages | None = None

    @property
    def known(self) -> bool:
        """Whether the time of a serial step of this size is known."""
        return self.seconds.weight > 0

    def serial_log_s(self, log_tokens: float, slope: float) -> float:
        """Log seconds of a serial step; `slope` is d log seconds / d log tokens."""
        return self.seconds.value + slope * (log_tokens - self.tokens)

    def add_serial(
        self, log_tokens: float, stages: Stages, noise: float, slope: float, schedule: Schedule
    ) -> tuple[float, bool]:
        """Add a serial step, and ask the simulator if its stages have moved.

        Returns:
            By how much its log time differed from the level, and whether it begins one because the link has changed:
            all ranks waited another time than before. A stalled rank is not in the shortest waits.
        """
        log_s = math.log(stages.seconds)
        moved = log_s - self.serial_log_s(log_tokens, slope) if self.known else 0.0
        if self.seconds.weight == 1 and moved < -_WARM_UP:
            self.stages = None  # those of the first one, which warmed up
        known = self.stages or stages
        waited = stages.waits / stages.seconds * math.exp(moved) - known.waits / known.seconds
        age, self.told_at = self.steps - self.told_at, self.steps
        changed = (self.suspect or self.stale) and abs(moved) > _UNLIKE * noise
        if not changed:
            changed = self.seconds.add(self.seconds.value + moved if self.known else log_s, noise, age)
        if changed:
            self.seconds, self.tokens = Level(log_s, 2.0), log_tokens
            self.off, self.travel, self.agreed = Level(), Level(), 0  # it was compared with a machine that is gone
            self.stages = None
        elif self.seconds.weight == 1:
            self.tokens = log_tokens
        self.suspect = self.stale = False
        if self.seconds.far:
            return moved, False  # an outlier, or the first step on another machine
        if stages.attention + stages.experts > 0:
            self.stages = stages if self.stages is None else _toward(self.stages, stages, 1 / self.seconds.weight)
            if self._asked is None or _moved(self._asked, self.stages):
                self._asked, before = self.stages, self.expected
                self.expected = expected_log_ratio(self.stages, schedule)
                self.off.value -= self.expected if before is None else 0.0  # it was compared with nothing
        return moved, changed and abs(waited) > _FAR * noise

    def _faded(self, at: int) -> float:
        """Times by which what an overlapped step told then counts half."""
        return (self.steps - at) / (_FADES << self.agreed)

    def off_of(self, log_ratio: float) -> float:
        """`off` of a step with this log ratio to a serial one."""
        return log_ratio - (self.expected or 0.0)

    def add_overlapped(self, log_ratio: float, log_travel: float | None, noise: float) -> float:
        """Add an overlapped step, with its log ratio to a serial one; returns by how much its `off` differed.

        Args:
            log_travel: log of what its transfers travelled, per square root of its tokens, because they grow with the
                tokens or not; None if it is not known. A change of it makes the serial time suspect.
        """
        off = self.off_of(log_ratio)
        moved = off - self.off.value if self.off.weight else 0.0
        age = max(0.0, self._faded(self.off_at) - 1) if self.off.weight else 0.0
        if (log_ratio > 0) != ((self.expected or 0.0) + self.off.value > 0):
            self.agreed = 0
        elif age:
            self.agreed = min(self.agreed + 1, _SURE)
        self.off.add(off, noise, age * _FADES, least=0.0)  # a trial after long: the one before may have been disturbed
        self.off_at = self.steps
        if log_travel is not None:
            self.travel.add(log_travel, max(noise, _TRAVEL_NOISE))
        self.suspect |= bool(self.off.far or self.travel.far)
        return moved

    def belief(self, elsewhere: float | None, noise: float, *, faded: bool = False) -> Belief:
        """How an overlapped step compares with a serial one.

        Args:
            elsewhere: `off` of the kind's other sizes together; None if none of them overlapped.
            faded: what overlapped steps told counts less the longer ago they ran.
        """
        prior = _UNMEASURED if self.expected is None else _UNTRIED if elsewhere is None else _TRIED
        sure, told, left = prior**-2, self.off.weight * noise**-2, 1.0
        if faded:
            left = 0.5 ** self._faded(self.overlapped_at)
        mean = (sure * left * (elsewhere or 0.0) + left * told * self.off.value) / (sure + left * told)
        return Belief((self.expected or 0.0) + mean, (sure + left * told) ** -0.5)


def _moved(before: Stages, now: Stages) -> bool:
    parts = ("attention", "linear", "experts", "dispatch", "combine", "other")
    return any(
        abs(getattr(before, part) / before.seconds - getattr(now, part) / now.seconds) > _MOVED for part in parts
    )


def _toward(before: Stages, now: Stages, share: float) -> Stages:
    """From `before` towards `now` by a share of the way, as shares of the later one's time."""
    scale = now.seconds / before.seconds
    times = [each.name for each in fields(Stages) if "layers" not in each.name]
    return replace(
        now,
        **{name: (1 - share) * scale * getattr(before, name) + share * getattr(now, name) for name in times},
    )
