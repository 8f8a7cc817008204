"""A captured graph, its key, and the error of a capture that failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ubatch.errors import UBatchError
from ubatch.schedules.forward_context import ForwardMode
from ubatch.streams.graph_protocols import Recording

__all__ = ["PLAIN", "CaptureFailed", "CapturedGraph", "GraphKey"]

PLAIN = "plain"
"""In place of the schedule's name, in the key of a call that was captured unsplit."""


@dataclass(frozen=True)
class GraphKey:
    """Identifies one graph.

    Attributes:
        tokens: tokens of every lane, padding included; one entry for an unsplit call.
        schedule: the schedule's name, or `PLAIN`.
        mode: the step's mode.
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


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that can be replayed.

    Attributes:
        key: identifies the graph.
        nbytes: bytes by which the pool grew. All sizes share the pool, so the largest one needs most of it.
        seconds: time of its warm-up and capture.
    """

    key: GraphKey
    nbytes: int
    seconds: float
    recording: Recording = field(repr=False, compare=False)

    def replay(self) -> None:
        """Launch it with the current contents of its static inputs, without copying the output. For benchmarks: a call
        of the wrapper copies its arguments in and its output out."""
        self.recording.take_turn()
        self.recording.replay()


class CaptureFailed(UBatchError):
    """A call could not be captured. The capture has ended on every thread and its memory is released: the wrapper can
    run eagerly at once, and can capture again. The original error is the cause.

    Attributes:
        key: key of the graph.
        lane: the lane that failed; None if the call was unsplit or its lanes had ended.
        point: the last point that this lane had passed.
        op: the line of code that launched the failed operation.
    """

    def __init__(self, key: GraphKey, lane: int | None, point: str | None, op: str, why: str) -> None:
        where = "" if lane is None else f" in lane {lane} after point {point!r}"
        super().__init__(f"capturing a graph of {key} failed{where}, at {op}: {why}")
        self.key = key
        self.lane = lane
        self.point = point
        self.op = op
