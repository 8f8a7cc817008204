"""The receive hook that a lane has pending: what its last launched transfer still needs when its result is due."""

from __future__ import annotations

from collections.abc import Callable

from ubatch.errors import note
from ubatch.streams.lane_streams import LaneStreams

__all__ = ["Hook", "ReceiveHook"]

Hook = Callable[[], object]


class ReceiveHook:
    """A hook, and the lane that registered it. It is run once, by that lane or by the next one (`Recv`).

    Args:
        lane: the owner's number.
        streams: the owner's.
        hook: called without arguments.
        joins: the compute stream first waits for all that the owner has put on the communication stream.
    """

    __slots__ = ("_hook", "_joins", "_lane", "_streams")

    def __init__(self, lane: int, streams: LaneStreams, hook: Hook, joins: bool) -> None:
        self._lane = lane
        self._streams = streams
        self._hook = hook
        self._joins = joins or streams.on_comm

    def run(self, lane: int, streams: LaneStreams) -> None:
        """Run it in lane `lane`, whose streams these are: on the compute stream, where the hook's own work belongs.

        Raises:
            What the hook raised, with a note that names owner and runner.
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
