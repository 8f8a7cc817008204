"""A lane's pending receive hook: it completes the lane's last transfer when the result is needed."""

from __future__ import annotations

from collections.abc import Callable

from ubatch.errors import note
from ubatch.streams.lane_streams import LaneStreams

__all__ = ["Hook", "ReceiveHook"]

Hook = Callable[[], object]


class ReceiveHook:
    """A hook, and the lane that registered it. It runs once, in that lane or in the next one (`Recv`).

    Args:
        lane: number of the lane that registered it (the owner).
        joins: whether the compute stream first waits for all of the owner's work on the communication stream.
    """

    __slots__ = ("_hook", "_joins", "_lane", "_streams")

    def __init__(self, lane: int, streams: LaneStreams, hook: Hook, joins: bool) -> None:
        self._lane = lane
        self._streams = streams
        self._hook = hook
        self._joins = joins or streams.on_comm

    def run(self, lane: int, streams: LaneStreams) -> None:
        """Run the hook in lane `lane`, on the compute stream of that lane's `streams`.

        Raises:
            Exception: the hook's own error, with a note that names the owner and the lane that ran it.
        """
        was_on_comm = streams.on_comm
        streams.leave_comm()
        if self._joins:
            if self._streams.on_comm:
                self._streams.mark_comm()
            self._streams.join_comm()
        try:
            self._hook()
        except Exception as error:
            note(error, f"in the receive hook of lane {self._lane}, run by lane {lane}")
            raise
        if was_on_comm:
            streams.enter_comm()
