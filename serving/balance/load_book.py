"""The experts' load over the last steps, of all ranks, and the placement that it is judged by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe import ExpertPlacement
from moe.balance import WINDOW_SIZE, Floats, Ints, LoadKind, LoadWindows, WindowLoads
from serving.balance.load_file import KEEP, LoadFile
from ubatch.errors import check_known


@dataclass(frozen=True, eq=False)
class ExpertBalance:
    """The load of the experts in the last steps, and how evenly the ranks share it.

    Attributes:
        window: the load.
        placement: which rank computes which expert's tokens. It has one rank if the ranks share no experts.
    """

    window: WindowLoads
    placement: ExpertPlacement

    def tokens(self, kind: LoadKind | str = LoadKind.ALL) -> Ints:
        """`[L, E]`: tokens routed to each expert of each MoE layer, in steps of one kind.

        Raises:
            ConfigError: there is no such kind.
        """
        check_known("kind of steps", kind, list(map(str, LoadKind)))
        return self.window.of(LoadKind(kind))

    def rank_tokens(self, kind: LoadKind | str = LoadKind.ALL) -> Floats:
        """`[L, R]`: those that each rank computes."""
        return self.placement.rank_loads(self.tokens(kind))

    def balancedness(self, kind: LoadKind | str = LoadKind.ALL) -> Floats:
        """`[L]`: mean / max over ranks of these; 1 is perfect, and for a layer without tokens."""
        return self.placement.balancedness(self.tokens(kind))


class LoadBook:
    """What ranks have counted.

    Args:
        placement: which rank computes which expert's tokens; one rank if each has all experts.
        path: file to write; None for none.
        window_size: steps that are looked at.

    Attributes:
        experts: MoE layers, and experts of each.
        windows: the load.
        placement: which rank computes which expert's tokens.
        file: what writes the file; None for none.
    """

    def __init__(self, placement: ExpertPlacement, path: Path | None = None, window_size: int = WINDOW_SIZE) -> None:
        self.experts = placement.num_layers, placement.num_experts
        self.windows = LoadWindows(*self.experts, window_size, keep=1 if path is None else KEEP)
        self.placement = placement
        self.file = None if path is None else LoadFile(path, self.windows)

    def balance(self) -> ExpertBalance:
        """The load in the present window."""
        return ExpertBalance(self.windows.window(), self.placement)

    def add(self, rank: int, steps: int, counts: Ints) -> None:
        """See `LoadWindows.add`."""
        self.windows.add(rank, steps, counts)
        if self.file is not None:
            self.file.changed()
