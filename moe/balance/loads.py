"""The load of experts in the last steps: what ranks have counted, summed over them, in sliding windows.

    rank      counts its own tokens, and now and then says what has come since it last did (`LoadWindows.add`)
    part      a tenth of a window: the counts of all ranks for so many steps. It ends when a rank that has counted all
              of its steps has counted more.
    window    the last parts, with the one that has not ended

Ranks that share experts step together, so a part has the same steps of all of them. Ranks with tensor parallelism route
different rows, so no token is counted twice.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from moe.placement import Ints
from ubatch import ConfigError

WINDOW_SIZE = 1000
"""Steps of a window."""
PARTS = 10
"""Parts of a window."""


class LoadKind(StrEnum):
    """Whose tokens: of steps with a prefill (mixed ones, too), of decode steps (those that verify drafts, too), all."""

    PREFILL = "prefill"
    DECODE = "decode"
    ALL = "all"


@dataclass(frozen=True, eq=False)
class WindowLoads:
    """The loads in one window.

    Attributes:
        counts: `[2, L, E]`: tokens routed to each expert of each MoE layer, in prefill and in decode steps.
        steps: steps in the window, of the rank with most.
    """

    counts: Ints
    steps: int

    def of(self, kind: LoadKind = LoadKind.ALL) -> Ints:
        """`[L, E]`: the tokens of one kind."""
        if kind is LoadKind.ALL:
            return np.asarray(self.counts.sum(axis=0))
        return self.counts[list(LoadKind).index(kind)]


@dataclass
class _Part:
    counts: Ints
    steps: dict[int, int] = field(default_factory=dict)  # by rank


class LoadWindows:
    """Counts of all ranks over the last steps. It outlives engines: those that are started again count anew.

    Args:
        num_layers: MoE layers, `L`.
        num_experts: experts of a layer, `E`.
        window_size: steps of a window.
        keep: windows whose parts are kept for `history`.

    Attributes:
        ended: parts that have ended.

    Raises:
        ConfigError: a size below 1.
    """

    def __init__(self, num_layers: int, num_experts: int, window_size: int = WINDOW_SIZE, *, keep: int = 1) -> None:
        if min(num_layers, num_experts, window_size, keep) < 1:
            raise ConfigError(
                f"a window of {window_size} steps over {num_layers} layers of {num_experts} experts, {keep} times: "
                "each number must be at least 1."
            )
        self.ended = 0
        self.part_steps = part_steps(window_size)
        self._shape = 2, num_layers, num_experts
        self._in_window = -(-window_size // self.part_steps)
        self._parts: deque[_Part] = deque([self._new_part()], maxlen=self._in_window * keep)

    def add(self, rank: int, steps: int, counts: Ints) -> None:
        """Add what a rank has counted since it last said so, or since it started.

        Args:
            steps: steps that it has run meanwhile, with tokens on any rank; at most `part_steps`.
            counts: `[2, L, E]`.

        Raises:
            ConfigError: counts of another shape.
        """
        if counts.shape != self._shape:
            raise ConfigError(f"loads of rank {rank} are {list(counts.shape)}, not {list(self._shape)}.")
        part = self._parts[-1]
        if part.steps.get(rank, 0) + steps > self.part_steps:
            part = self._new_part()
            self._parts.append(part)
            self.ended += 1
        part.steps[rank] = part.steps.get(rank, 0) + steps
        part.counts += counts

    def window(self) -> WindowLoads:
        """The loads in the last `window_size` steps."""
        parts = list(self._parts)[-self._in_window :]
        steps = sum(max(part.steps.values(), default=0) for part in parts)
        return WindowLoads(np.sum([part.counts for part in parts], axis=0), steps)

    def history(self, newest: int | None = None) -> Ints:
        """`[parts, L, E]`: the tokens of all kinds in every part that is kept, the oldest first; parts without steps
        are left out.

        Args:
            newest: most parts to return; None for all.
        """
        kept = list(self._parts) if newest is None else list(self._parts)[-newest:]
        parts = [part.counts.sum(axis=0) for part in kept if part.steps]
        return np.array(parts, dtype=np.int64).reshape(-1, *self._shape[1:])

    def _new_part(self) -> _Part:
        return _Part(np.zeros(self._shape, dtype=np.int64))


def part_steps(window_size: int) -> int:
    """Steps of a part of a window."""
    return max(1, window_size // PARTS)
