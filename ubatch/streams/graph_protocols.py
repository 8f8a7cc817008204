"""CUDA graphs: what is captured, under which key, and what a device must offer for it.

A step is captured once and replayed with one launch: no lane thread runs, nothing is decided. In pseudo-code:

    warm up       the call runs eagerly, twice, on a side stream: workspaces, kernels and lanes' threads get ready
    park          every lane is at the ready barrier, its device context warm
    begin         from here on, work put on the capture stream, and on what forks from it, is recorded
    baton         lane 0 starts; the lanes take turns across their threads as always, each rejoins what it launched
    end           all lanes ended, their outputs were merged; the graph is instantiated
    replay        copy the arguments into the static inputs, launch, copy the output

Graphs of all sizes, plain and overlapped, share one memory pool. So two of them must never run at once, and an output
is copied before the next replay.

What a graph does not know: it has addresses and scalars, no Python. Tensors of the call are copied in; everything else
must be as it was when the graph was captured, or the call runs eagerly (`GraphMiss`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch

from ubatch.errors import UBatchError
from ubatch.process.interrupts import changing
from ubatch.schedules.forward_context import ForwardMode

__all__ = [
    "PLAIN",
    "Capture",
    "CaptureFailed",
    "CapturedGraph",
    "GraphBackend",
    "GraphKey",
    "GraphMiss",
    "Recording",
    "capturing",
    "current_capture",
    "mark_capturing",
]

PLAIN = "plain"
"""What stands for the schedule in the key of a call that was captured unsplit."""


@dataclass(frozen=True)
class GraphKey:
    """What one graph is for.

    Attributes:
        tokens: of every lane, padding included; one entry for an unsplit call.
        schedule: the schedule's name, or `PLAIN`.
        mode: what the step does.
    """

    tokens: tuple[int, ...]
    schedule: str
    mode: ForwardMode

    @property
    def overlapped(self) -> bool:
        """Whether it was captured in lanes."""
        return self.schedule != PLAIN

    @property
    def num_tokens(self) -> int:
        """Tokens of all lanes together."""
        return sum(self.tokens)

    def __str__(self) -> str:
        return f"{'+'.join(map(str, self.tokens))} tokens, {self.mode}, {self.schedule}"


class Recording(Protocol):
    """What was captured, and can be run again."""

    @property
    def nbytes(self) -> int:
        """By how much the pool grew."""

    def take_turn(self) -> None:
        """Order what the calling thread's stream gets next after everything that followed earlier replays from this
        pool, on whatever stream."""

    def replay(self) -> None:
        """Launch it on the calling thread's stream, on what is in memory now."""

    def release(self) -> None:
        """Give back what it holds of the pool. It must not be replayed after that."""


class Capture(Protocol):
    """One capture under way, in the thread that called `GraphBackend.capture`. It is over with that `with` block:
    what was not ended is aborted then, and the device usable."""

    @property
    def last_op(self) -> str | None:
        """The operation that was recorded, or refused, last; None where the back end does not see single ones."""

    def begin(self) -> None:
        """Record from here on."""

    def part(self) -> AbstractContextManager[None]:
        """Entered by every thread around what it contributes, before `begin` or after."""

    def end(self) -> Recording:
        """Stop recording, and make what was recorded ready to be replayed.

        Raises:
            RuntimeError: something that cannot be captured spoilt it.
        """


class GraphBackend(Protocol):
    """What captures and replays on one device. What it captures shares one pool; after a failure it may be another."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of a captured call must be."""

    def warming_up(self) -> AbstractContextManager[None]:
        """The body is a rehearsal: on a side stream, after what the calling thread's stream has so far, and before
        what that gets next."""

    def capture(self) -> AbstractContextManager[Capture]:
        """Prepare a capture; the body calls `begin` and `end`. The current stream is the capture stream in it."""

    def another(self) -> GraphBackend:
        """One of the same kind for the same device, with a pool of its own."""


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that can be replayed.

    Attributes:
        key: what it is for.
        nbytes: by how much the pool grew for it. Sizes share the pool, so the largest one needs most of it.
        seconds: what warming up and capturing it took.
    """

    key: GraphKey
    nbytes: int
    seconds: float
    recording: Recording = field(repr=False, compare=False)

    def replay(self) -> None:
        """Launch it on what its static inputs hold now; its output stays where it is. For benchmarks: a call of the
        wrapper copies its arguments in and its output out."""
        self.recording.take_turn()
        self.recording.replay()


class GraphMiss(StrEnum):
    """Why a call ran eagerly while graphs are on. Counted in `UBatchWrapper.statistics()`."""

    NO_GRAPH = "no_graph"
    """nothing was captured for these tokens, this schedule and mode"""
    LARGER_THAN_LARGEST = "larger_than_largest"
    """more tokens than the largest captured size"""
    ARGUMENTS_DIFFER = "arguments_differ"
    """an argument is missing, has another shape or dtype, or a value that is frozen in the graph"""
    CONTEXT_DIFFERS = "context_differs"
    """the forward context's attention plans are not those of the captured call, or its ranks have other tokens"""
    STATE_DIFFERS = "state_differs"
    """training mode, or autocast, is not as it was at capture"""
    GRADIENTS = "gradients"
    """gradients may be wanted; a graph has none"""
    PEER_HAS_NONE = "peer_has_none"
    """another rank cannot replay this step, so all run it eagerly"""


class CaptureFailed(UBatchError):
    """A call could not be captured. The capture was ended on every thread and its memory given back: the wrapper runs
    eagerly at once, and may capture again. The original error is the cause.

    Attributes:
        key: what was to be captured.
        lane: the lane that failed, None where the call was unsplit or its lanes had ended.
        point: the last point that this lane had passed.
        op: the operation, as well as it is known: its name, or the line of code that launched it.
    """

    def __init__(self, key: GraphKey, lane: int | None, point: str | None, op: str, why: str) -> None:
        where = "" if lane is None else f" in lane {lane} after point {point!r}"
        super().__init__(f"capturing a graph of {key} failed{where}, at {op}: {why}")
        self.key = key
        self.lane = lane
        self.point = point
        self.op = op


_capture: ContextVar[object | None] = ContextVar("ubatch_capture", default=None)


def capturing() -> bool:
    """Whether this code is being captured, in a lane or unsplit, by a wrapper or by somebody else's graph.

    What cannot be captured (it reads from the device, it allocates what must outlive the step) refuses by this.
    """
    return current_capture() is not None


def current_capture() -> object | None:
    """What tells the capture that this code is part of from others; None outside of any.

    In a graph that is not a wrapper's nothing does: there it is another object at every call.
    """
    capture = _capture.get()
    if capture is None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return object()
    return capture


def mark_capturing() -> AbstractContextManager[object]:
    """Let `capturing()` be true in the `with` block, and in lanes that are started from it."""
    return changing(_capture, object())
