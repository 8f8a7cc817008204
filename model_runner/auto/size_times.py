"""What is known of steps of one kind and about one size: their serial time, and how each arm compares. No clock, no
ranks, no torch.

    log seconds of a step in an arm  =  log serial seconds(tokens)  +  expected(arm)  +  off(arm)  +  noise

`expected` is the simulator's answer for the latest serial stages (`model_runner.auto.overlap_gain`), so a change of the
link moves it at once. `off` is what steps in the arm add to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from model_runner.auto.overlap_gain import expected_log_ratio
from model_runner.auto.step_stages import Stages
from ubatch.schedules.schedule import Schedule

__all__ = ["Belief", "Level", "SizeTimes"]

_MEMORY = 16
"""Steps that a level is averaged over."""
_WARM_UP = 0.1
"""The first step of an arm at a size counts no longer if the second is faster by this much (log): it warmed up."""
_FAR = 4.0
"""Standard deviations beyond which a step is an outlier, or, if the next one is like it, the level has changed."""
_TRAVEL_NOISE = 0.1
_MOVED = 0.06
"""The simulator is asked again when a stage has moved by this share of the step."""
_UNMEASURED, _UNTRIED, _TRIED = 0.2, 0.1, 0.06
"""Standard deviation of `off` before a step ran in the arm: without stages, with stages, and where the arm ran in steps
of another size."""
_FADES = 16
"""Steps after which what steps in an arm told counts half for a trial: they may have been disturbed."""


@dataclass
class Level:
    """A drifting mean of logs. Single outliers are ignored; two alike begin a new level."""

    value: float = 0.0
    weight: float = 0.0
    far: int = 0

    def add(self, value: float, noise: float) -> bool:
        """Add a value; returns whether a new level began."""
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
    """log(time in an arm / serial time), and its standard deviation."""

    mean: float
    doubt: float


@dataclass
class SizeTimes:
    """Steps of one kind whose tokens lie between two powers of two.

    Attributes:
        tokens, seconds: log tokens and log seconds of its serial steps.
        stages: the latest serial steps' stages; None if they cannot be measured.
        off: arm -> see the top of this file.
        travel: arm -> log of the time that its transfers travelled.
        untold: arm -> steps whose times are not known yet.
        ran_at: arm -> number of its latest step.
        steps, serial_steps: number of its steps, and of the serial ones.
        suspect: the link seems to have changed since then.
        used: the arm in use.
        latest: the arm of the latest step; empty before the first.
    """

    tokens: Level = field(default_factory=Level)
    seconds: Level = field(default_factory=Level)
    stages: Stages | None = None
    off: dict[str, Level] = field(default_factory=dict)
    travel: dict[str, Level] = field(default_factory=dict)
    untold: Counter[str] = field(default_factory=Counter)
    ran_at: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    serial_steps: int = 0
    suspect: bool = False
    used: str = "serial"
    latest: str = ""
    _asked: Stages | None = None
    _expected: dict[str, float] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether the time of a serial step of this size is known."""
        return self.seconds.weight > 0

    def serial_log_s(self, log_tokens: float, slope: float) -> float:
        """Log seconds of a serial step; `slope` is d log seconds / d log tokens."""
        return self.seconds.value + slope * (log_tokens - self.tokens.value)

    def add_serial(self, log_tokens: float, stages: Stages, noise: float) -> float:
        """Add a serial step; returns by how much its log time differed from the level."""
        moved = math.log(stages.seconds) - self.seconds.value if self.known else 0.0
        if self.suspect or self.seconds.add(math.log(stages.seconds), noise):
            self.seconds = Level(math.log(stages.seconds), 2.0)
            self.tokens = Level()
            self.stages = None
        self.suspect = False
        self.tokens.add(log_tokens, math.inf)
        if stages.attention + stages.experts > 0:
            self.stages = stages if self.stages is None else _between(self.stages, stages)
        return moved

    def off_of(self, arm: str, log_ratio: float) -> float:
        """`off` of a step with this log ratio to a serial one."""
        return log_ratio - self._expected.get(arm, 0.0)

    def add_arm(self, arm: str, log_ratio: float, log_travel: float | None, noise: float) -> float:
        """Add a step in an arm, with its log ratio to a serial step; returns its `off`.

        Args:
            log_travel: log of what its transfers travelled, per square root of its tokens, because they grow with the
                tokens or not; None if it is not known. A change of it makes the serial time suspect.
        """
        off = self.off_of(arm, log_ratio)
        changed = self.off.setdefault(arm, Level()).add(off, noise)
        if log_travel is not None:
            changed |= self.travel.setdefault(arm, Level()).add(log_travel, max(noise, _TRAVEL_NOISE))
        self.suspect |= changed
        return off

    def expect(self, arms: Mapping[str, Schedule]) -> None:
        """Ask the simulator, if the stages have moved."""
        if self.stages is None or (self._asked is not None and not _moved(self._asked, self.stages)):
            return
        self._asked = self.stages
        before = dict(self._expected)
        self._expected = {arm: expected_log_ratio(self.stages, schedule) for arm, schedule in arms.items()}
        if not before:  # what ran before the stages were known was compared with nothing
            for arm, level in self.off.items():
                level.value -= self._expected.get(arm, 0.0)

    def belief(self, arm: str, elsewhere: Level, noise: float, *, faded: bool = False) -> Belief:
        """How `arm` compares with serial.

        Args:
            elsewhere: `off` of the arm over all sizes of the kind.
            faded: what steps in the arm told counts less the longer ago they ran.
        """
        own, expected = self.off.get(arm, Level()), self._expected.get(arm)
        prior = _UNMEASURED if expected is None else _TRIED if elsewhere.weight else _UNTRIED
        first = elsewhere.value * elsewhere.weight / (elsewhere.weight + 1)
        sure, told, coming = prior**-2, own.weight * noise**-2, self.untold[arm] * noise**-2
        if faded:
            left = 0.5 ** ((self.steps - self.ran_at.get(arm, self.steps)) / _FADES)
            told, first = left * told, left * first
        mean = (expected or 0.0) + (sure * first + told * own.value) / (sure + told)
        return Belief(mean, (sure + told + coming) ** -0.5)


def _moved(before: Stages, now: Stages) -> bool:
    parts = ("attention", "linear", "experts", "dispatch", "combine", "other")
    return any(
        abs(getattr(before, part) / before.seconds - getattr(now, part) / now.seconds) > _MOVED for part in parts
    )


def _between(before: Stages, now: Stages) -> Stages:
    """Half way between two steps' stages, as shares of the later one's time."""
    scale = now.seconds / before.seconds
    times = [each.name for each in fields(Stages) if "layers" not in each.name]
    return replace(now, **{name: (getattr(before, name) * scale + getattr(now, name)) / 2 for name in times})
