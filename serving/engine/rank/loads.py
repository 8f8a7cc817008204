"""What a rank has counted of its experts' load, told now and then: every tenth of a window, and before it pauses.

The counts lie on the device, and only grow. Their copy to the host is started after a step, and read after a later one
when it has arrived, so that no step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from moe import ExpertPlacement
from moe.balance import Ints
from ubatch.streams import HostCopy


class LoadReporter:
    """Tells the load since it last did.

    Args:
        copy: starts a copy of the counts (`ModelRunner.copy_expert_loads`), which are 0 now.
        placement: where the experts are.
        every: steps from one report to the next.

    Attributes:
        placement: as given.
    """

    def __init__(self, copy: Callable[[], HostCopy], placement: ExpertPlacement, every: int) -> None:
        self.placement = placement
        self._copy, self._every = copy, every
        self._steps = 0
        self._copying: tuple[int, HostCopy] | None = None
        self._told: Ints = np.zeros((2, *self.experts), dtype=np.int64)

    @property
    def experts(self) -> tuple[int, int]:
        """MoE layers, and experts of each."""
        return self.placement.num_layers, self.placement.num_experts

    def stepped(self) -> None:
        """A step has ended that had tokens on some rank."""
        self._steps += 1
        if self._steps >= self._every and self._copying is None:
            self._copying = self._steps, self._copy()
            self._steps = 0

    def news(self, *, now: bool = False) -> Iterator[tuple[int, Ints]]:
        """Reports that are due, and have arrived on the host: steps that the rank has run since it told last, with
        tokens on any rank, and `[2, L, E]`: tokens routed to each expert, in prefill and in decode steps.

        Args:
            now: of all steps so far; waits for them.
        """
        if self._copying is not None and (now or self._copying[1].done()):
            (steps, copy), self._copying = self._copying, None
            yield self._since(steps, copy)
        if now and self._steps:
            steps, self._steps = self._steps, 0
            yield self._since(steps, self._copy())

    def total(self) -> Ints:
        """All counts so far; waits for the steps that run."""
        return np.asarray(self._copy().wait().numpy())

    def _since(self, steps: int, copy: HostCopy) -> tuple[int, Ints]:
        counts = np.asarray(copy.wait().numpy())
        before, self._told = self._told, counts
        return steps, counts - before
