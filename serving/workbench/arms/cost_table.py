"""Step times by tokens and arm, and the best setting for them: which arm, from how many tokens on.

An *arm* is a way to run a step: serial, or a schedule with its lanes. A *setting* is one arm and a threshold: steps
with at least that many tokens use the arm, smaller steps run serially. `choose` tries every setting, so its result is
the best one for the given table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ubatch.errors import ConfigError

SERIAL_ARM = "serial"
_TIE = 0.005
"""If the regret of two settings differs by less than this, the one with the simpler arm is chosen."""
_THRESHOLD_TIE = 0.001
"""If the regret of two thresholds of an arm differs by less than this, the higher threshold is chosen."""


@dataclass(frozen=True)
class Setting:
    """One arm, used from a threshold of tokens on.

    Attributes:
        arm: its name; `SERIAL_ARM` overlaps nothing.
        threshold: smallest number of tokens of a step that uses the arm; None with the serial arm.
    """

    arm: str = SERIAL_ARM
    threshold: int | None = None

    def arm_for(self, tokens: int) -> str:
        """The arm for a step of `tokens` tokens."""
        return self.arm if self.threshold is not None and tokens >= self.threshold else SERIAL_ARM


@dataclass(frozen=True)
class CostTable:
    """Step times of one kind of step.

    Attributes:
        seconds: tokens -> arm -> time of a step, in any one unit per size. An arm without an entry cannot run at that
            size, and a step of that size is then serial.

    Raises:
        ConfigError: no sizes, no serial time at one, or a time that is not positive.
    """

    seconds: Mapping[int, Mapping[str, float]]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ConfigError("a cost table needs the times of at least one size.")
        for tokens, arms in self.seconds.items():
            if SERIAL_ARM not in arms:
                raise ConfigError(f"the cost table has no serial time at {tokens} tokens.")
            for arm, seconds in arms.items():
                if not seconds > 0:
                    raise ConfigError(f"cost table: {arm} takes {seconds} s at {tokens} tokens; it must be positive.")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens, fewest first."""
        return tuple(sorted(self.seconds))

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm but the serial one, in the order of their first appearance."""
        return tuple(dict.fromkeys(arm for tokens in self.sizes for arm in self.seconds[tokens] if arm != SERIAL_ARM))

    def time(self, setting: Setting, tokens: int) -> float:
        """Time of a step of `tokens` tokens (a size of the table) under `setting`."""
        arms = self.seconds[tokens]
        return arms.get(setting.arm_for(tokens), arms[SERIAL_ARM])

    def best(self, tokens: int) -> float:
        """The fastest arm's time."""
        return min(self.seconds[tokens].values())

    def regret(self, setting: Setting) -> float:
        """How much slower than the best arm at every size: mean of time over the best arm's time, minus 1; 0.02 is
        2%."""
        return fmean(self.time(setting, tokens) / self.best(tokens) for tokens in self.sizes) - 1.0


def choose(table: CostTable, simplest_first: Sequence[str] = ()) -> Setting:
    """The setting with the least regret; among equally good ones the simplest.

    Args:
        simplest_first: arms, simplest first; the table's order by default.
    """
    order = {arm: place for place, arm in enumerate(simplest_first or table.arms)}
    possible = [Setting(arm, tokens) for arm in table.arms for tokens in table.sizes if arm in table.seconds[tokens]]
    settings = [(table.regret(setting), setting) for setting in (Setting(), *possible)]
    limit = min(regret for regret, _ in settings) + _TIE

    as_good = [(regret, setting) for regret, setting in settings if regret <= limit]
    arm = min((setting.arm for _, setting in as_good), key=lambda name: order.get(name, -1))  # serial is the simplest
    own = [(regret, setting) for regret, setting in as_good if setting.arm == arm]
    limit = min(regret for regret, _ in own) + _THRESHOLD_TIE
    return max((setting for regret, setting in own if regret <= limit), key=lambda setting: setting.threshold or 0)
