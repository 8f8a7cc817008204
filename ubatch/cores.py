"""Several cores for one step: pieces of it that need nothing of each other run side by side, a thread per core.

torch spreads each operator over all cores. Where a step is thousands of small operators (a decode visits every expert
with a few rows), that leaves much of the machine waiting: every operator ends in a barrier, and the threads spin
between operators, in the way of whoever else wants the core. Here an operator runs on one core, and whole pieces (half
of the experts, half of the requests' attention) run beside each other instead.

    with several_cores(2):         the caller's operators compute on one thread now
        run_pieces([first, second])    `second` runs on a helper thread; both have ended when this returns

Only inference: a helper thread has no autograd graph, and anywhere else the pieces run one after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch

from ubatch.errors import ConfigError
from ubatch.wakeup import make_wakeup

__all__ = ["num_cores", "row_pieces", "run_pieces", "several_cores"]

_FEWEST_ROWS = 64  # of a piece: fewer are not worth waking a thread for

_cores: ContextVar[int] = ContextVar("ubatch_cores", default=1)


def num_cores() -> int:
    """How many pieces run side by side here; 1 outside `several_cores`, and outside inference mode."""
    return _cores.get() if torch.is_inference_mode_enabled() else 1


@contextmanager
def several_cores(cores: int) -> Iterator[None]:
    """For the block, operators compute on one thread and `run_pieces` on `cores`. With one core nothing changes.

    Raises:
        ConfigError: `cores` is below 1.
    """
    if cores < 1:
        raise ConfigError(f"cores must be at least 1, not {cores}.")
    if cores == 1:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    token = _cores.set(cores)
    try:
        yield
    finally:
        _cores.reset(token)
        torch.set_num_threads(before)


def run_pieces(pieces: Sequence[Callable[[], None]]) -> None:
    """Run all of them, the first on the calling thread; returns when all have ended, and raises the first error.

    Args:
        pieces: as many as `num_cores()` run side by side; more are dealt out in turn. They must not need each other.
    """
    cores = min(num_cores(), len(pieces))
    if cores < 2 or not _busy.acquire(blocking=False):  # another thread's pieces run: the cores are taken
        for piece in pieces:
            piece()
        return
    try:
        helpers = _helpers(cores - 1)
        for index, helper in enumerate(helpers, start=1):
            helper.start(pieces[index::cores])
        try:
            for piece in pieces[::cores]:
                piece()
        finally:
            errors = [helper.finish() for helper in helpers]
    finally:
        _busy.release()
    for error in errors:
        if error is not None:
            raise error


def row_pieces(compute: Callable[[slice], Sequence[torch.Tensor]], rows: int) -> Sequence[torch.Tensor]:
    """What `compute` gives for all rows, computed in as many pieces as there are cores if there are rows enough.

    Args:
        compute: takes some of the rows and returns tensors whose first dimension they are.
        rows: how many there are.
    """
    cores = min(num_cores(), rows // _FEWEST_ROWS)
    if cores < 2:
        return compute(slice(0, rows))
    parts: list[Sequence[torch.Tensor]] = [()] * cores

    def piece(index: int) -> None:
        parts[index] = compute(slice(rows * index // cores, rows * (index + 1) // cores))

    run_pieces([partial(piece, index) for index in range(cores)])
    return [torch.cat(each) for each in zip(*parts, strict=True)]


class _Helper:
    """A thread that runs pieces when it is given some, and sleeps otherwise."""

    def __init__(self) -> None:
        self._pieces: Sequence[Callable[[], None]] = ()
        self._error: BaseException | None = None
        self._given, self._done = make_wakeup(), make_wakeup()
        threading.Thread(target=self._work, name="ubatch-core", daemon=True).start()

    def start(self, pieces: Sequence[Callable[[], None]]) -> None:
        self._pieces = pieces
        self._given.set()

    def finish(self) -> BaseException | None:
        """Wait for the end of what it was given; what went wrong in it."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._done.wait()
                break
            except KeyboardInterrupt as raised:  # the pieces still write where the caller's tensors are: let them end
                interrupt = raised
        error, self._error, self._pieces = self._error, None, ()
        return interrupt or error

    def _work(self) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            while True:
                self._given.wait()
                try:
                    for piece in self._pieces:
                        piece()
                except BaseException as error:
                    self._error = error
                self._done.set()


_crew: list[_Helper] = []
_busy = threading.Lock()


def _helpers(count: int) -> list[_Helper]:
    while len(_crew) < count:
        _crew.append(_Helper())
    return _crew[:count]


def _after_fork_in_child() -> None:
    global _busy
    _crew.clear()
    _busy = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
