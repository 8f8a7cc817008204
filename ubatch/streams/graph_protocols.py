"""CUDA graphs: the interface that a device must offer, and whether this code is being captured.

A step is captured once and replayed with one launch, without lane threads or decisions. In pseudo-code:

    warm up       the call runs eagerly, twice, on a side stream: this prepares workspaces, kernels and lanes' threads
    park          every lane is at the ready barrier, its device context warm
    begin         from here on, work on the capture stream, and on streams forked from it, is recorded
    baton         lane 0 starts; the lanes take turns as always, and each joins its transfers
    end           all lanes ended, their outputs were merged; the graph is instantiated
    replay        copy the arguments into the static inputs, launch, copy the output

Graphs of all sizes, plain and overlapped, share one memory pool. So two of them must never run at once, and an output
is copied before the next replay.

A graph contains addresses and scalars, but no Python. The call's tensors are copied in; everything else must be the
same as at capture, or the call runs eagerly (`GraphMiss`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from enum import StrEnum
from typing import Protocol

import torch

from ubatch.process.interrupts import changing


class Recording(Protocol):
    """A captured recording that can be replayed."""

    @property
    def nbytes(self) -> int:
        """Bytes by which the pool grew."""

    def take_turn(self) -> None:
        """Order later work of the calling thread's stream after all work that followed earlier replays from this pool,
        on any stream."""

    def replay(self) -> None:
        """Launch it on the calling thread's stream, with the current memory contents."""

    def release(self) -> None:
        """Release its memory in the pool. It must not be replayed after that."""


class Capture(Protocol):
    """One running capture, in the thread that called `GraphBackend.capture`. At the end of that `with` block, a capture
    that was not ended is aborted, and the device is usable again."""

    def begin(self) -> None:
        """Record from here on."""

    def part(self) -> AbstractContextManager[None]:
        """Entered by every thread around its part of the capture, before or after `begin`."""

    def end(self) -> Recording:
        """Stop recording, and prepare the recording for replay.

        Raises:
            RuntimeError: the call did something that cannot be captured.
        """


class GraphBackend(Protocol):
    """Captures and replays on one device. All captures share one pool; after a failure a new pool may be used."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of a captured call must be."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Run the body as a rehearsal on a side stream: after earlier work of the calling thread's stream, and before
        its later work."""

    def capture(self) -> AbstractContextManager[Capture]:
        """Prepare a capture; the body calls `begin` and `end`. Inside it the current stream is the capture stream."""

    def another(self) -> GraphBackend:
        """A new back end of the same kind for the same device, with its own pool."""


class GraphMiss(StrEnum):
    """Why a call ran eagerly while graphs are on. Counted in `UBatchWrapper.statistics()`."""

    NO_GRAPH = "no_graph"
    """no graph was captured for these tokens, this schedule and mode"""
    LARGER_THAN_LARGEST = "larger_than_largest"
    """more tokens than the largest captured size"""
    ARGUMENTS_DIFFER = "arguments_differ"
    """an argument is missing, has another shape or dtype, or a value that is frozen in the graph"""
    CONTEXT_DIFFERS = "context_differs"
    """the forward context's attention plans are not those of the captured call, or its ranks have other tokens"""
    STATE_DIFFERS = "state_differs"
    """training mode or autocast differs from the capture"""
    GRADIENTS = "gradients"
    """the call may need gradients; a graph has none"""
    PEER_HAS_NONE = "peer_has_none"
    """another rank cannot replay this step, so all run it eagerly"""


_capture: ContextVar[object | None] = ContextVar("ubatch_capture", default=None)


def capturing() -> bool:
    """Whether this code is being captured, in a lane or unsplit, by a wrapper or by another graph.

    Code that cannot be captured (it reads from the device, or allocates memory that outlives the step) checks this.
    """
    return _capture.get() is not None or (torch.cuda.is_initialized() and current_capture() is not None)


def current_capture() -> object | None:
    """An object that identifies the capture in progress; None outside a capture.

    In a graph that was not made by a wrapper it is a different object at every call.
    """
    capture = _capture.get()
    if capture is None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return object()
    return capture


capture_mark = _capture.get
"""Returns what `mark_capturing` has set here; None outside of its block."""


def mark_capturing() -> AbstractContextManager[object]:
    """Make `capturing()` true in the `with` block, and in lanes that are started from it."""
    return changing(_capture, object())
