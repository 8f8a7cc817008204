"""The experts' load over the last steps, of all ranks, and the placement that it is judged by; and the file that it is
written to (`--expert-load-out`), now and then while engines run, and at their end."""

import asyncio
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moe import ExpertPlacement
from moe.balance import WINDOW_SIZE, Floats, Ints, LoadKind, LoadWindows, WindowLoads, check_load_suffix, write_loads
from serving.logs import log_event
from ubatch import ConfigError
from ubatch.errors import check_known

_logger = logging.getLogger(__name__)

EVERY_S = 30.0
"""Seconds between two writes, while steps run. Each has the whole file, some megabytes of a large model."""
KEEP = 10
"""Windows whose parts the file has."""


def check_load_out(path: Path) -> None:
    """Check that loads can be written to a file, as far as can be said before.

    Raises:
        ConfigError: its name has another ending, or its folder is not there or cannot be written to.
    """
    check_load_suffix(path)
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: there is no folder {folder}. Make it.")
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{path}: it is a folder, or {folder} cannot be written to. Name another file.")


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
    """What ranks have counted, and the file that it is written to.

    Args:
        placement: which rank computes which expert's tokens; one rank if each has all experts.
        path: file to write; None for none. It is replaced if it exists.
        window_size: steps that are looked at.

    Attributes:
        experts: MoE layers, and experts of each.
        windows: the load.
        placement: which rank computes which expert's tokens.
    """

    def __init__(self, placement: ExpertPlacement, path: Path | None = None, window_size: int = WINDOW_SIZE) -> None:
        self.experts = placement.num_layers, placement.num_experts
        self.windows = LoadWindows(*self.experts, window_size, keep=1 if path is None else KEEP)
        self.placement = placement
        self._path = path
        self._changed = False
        self._written_at = time.monotonic()
        self._over = asyncio.Event()

    def balance(self) -> ExpertBalance:
        """The load in the present window."""
        return ExpertBalance(self.windows.window(), self.placement)

    def add(self, rank: int, steps: int, counts: Ints) -> None:
        """See `LoadWindows.add`."""
        self.windows.add(rank, steps, counts)
        self._changed = True

    # -- the file; without a path these do nothing ----------------------------------------------------------------

    def tick(self) -> None:
        """Write if it is time. For an engine without an event loop."""
        if time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    async def keep(self) -> None:
        """Write, in a thread, whenever it is time, and last after `end`."""
        while self._path is not None and not self._over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), EVERY_S)
            if self._changed:
                self._changed = False
                await asyncio.to_thread(self._write, self._path, self.windows.history())

    def end(self) -> None:
        """No more loads come; `keep` ends."""
        self._over.set()

    def write(self) -> None:
        """Write if something has changed. A file that cannot be written is logged."""
        if self._path is not None and self._changed:
            self._changed = False
            self._write(self._path, self.windows.history())

    def _write(self, path: Path, loads: Ints) -> None:
        self._written_at = time.monotonic()
        try:
            write_loads(path, loads)
        except OSError as error:
            what = "the experts' load cannot be written"
            log_event(_logger, what, level=logging.ERROR, path=path, error=error.strerror)
