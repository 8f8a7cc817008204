"""One lane, in the caller's own thread: single-batch overlap.

An unsplit batch has no other lane, but can compute one chunk of experts while another chunk's transfer is in flight.
Its transfers need a lane's context: the communication stream, events, buffers kept alive, a trace. So the batch runs as
lane 0 of 1. Its points hand nothing on; they only run the receive hook that is due. There are no threads and no
barrier.

There is no hang check: if the module hangs, the call hangs. Transfers keep their own time-outs; a transfer without one
ends within `timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ubatch.errors import ConfigError
from ubatch.lanes.baton import Baton
from ubatch.lanes.context import UBatchContext
from ubatch.lanes.crew import note_lane
from ubatch.lanes.transfer_limit import transfers_end_within
from ubatch.lanes.wakeup import Gate
from ubatch.lanes.workers import PoolCounts
from ubatch.schedules.forward_context import ForwardContext
from ubatch.schedules.schedule import Schedule
from ubatch.streams.graph_protocols import Capture
from ubatch.streams.lifetimes import abandon_transfers
from ubatch.streams.sm_budget import merge_sm_use, share_out_sms
from ubatch.streams.streams import StreamBackend, make_streams


class SingleLane:
    """Runs a batch as the only lane, with the interface of `LanePool`.

    Args:
        timeout_s: the longest wait for a transfer that has no time-out of its own; None waits for ever.

    Attributes:
        counts: what it has done so far.
        failure: lane 0 and the last point it had passed, if the last step failed; else None.
    """

    lanes = 1

    def __init__(
        self, device: torch.device, streams: StreamBackend | None = None, timeout_s: float | None = None
    ) -> None:
        self.timeout_s = timeout_s
        self.failure: tuple[int, str] | None = None
        self._streams = streams if streams is not None else make_streams(device)
        self._comm_stream = self._streams.new_stream()
        self._context: UBatchContext | None = None
        self._in_step = False
        self.counts = PoolCounts()

    def run(
        self,
        bodies: Sequence[Callable[[], Any]],
        schedule: Schedule,
        forward_contexts: Sequence[ForwardContext | None],
        voted_ranks: frozenset[int] = frozenset(),
        capture: Capture | None = None,
        *,
        patient: bool = False,
    ) -> list[Any]:
        """Run the one body in this thread. See `LanePool.run`.

        Raises:
            ConfigError: not one body and one forward context, or a schedule for several lanes.
        """
        if len(bodies) != 1 or len(forward_contexts) != 1 or schedule.lanes != 1:
            raise ConfigError(
                f"one lane runs one batch under a schedule for one, not {len(bodies)} under {schedule.name!r} for "
                f"{schedule.lanes}."
            )
        self.failure = None
        self.counts.steps += 1
        if self._in_step:
            self._discard()
        stream = self._streams.current()
        if self._context is None:
            nobody_waits = Gate(0)  # the caller's device context is already warm
            self._context = UBatchContext(0, Baton(1), nobody_waits, self._streams, stream, self._comm_stream, None)
        context = self._context
        self._in_step = True
        context.baton.prepare(schedule.lead)
        context.baton.start()
        budget = share_out_sms(schedule.comm_sms, self._streams)
        context.begin_step(forward_contexts[0], schedule, voted_ranks, stream, budget)
        part: AbstractContextManager[None] = nullcontext()
        if capture is not None:
            capture.begin()
            part = capture.part()
        try:
            with part, context, transfers_end_within(None if patient or capture is not None else self.timeout_s):
                result = bodies[0]()
        except BaseException as error:
            self.failure = 0, str(context.last_point)
            note_lane(error, context, 1)
            self._streams.set_current(stream)  # Ctrl-C may have interrupted the lane's exit
            self._discard()
            raise
        merge_sm_use(self.counts.sm_users, context.sm_users)
        abandon_transfers(context.settle())
        self._in_step = False
        return [result]

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""

    def _discard(self) -> None:
        """Drop a context that failed, was interrupted or forked. Its transfers' buffers stay alive as long as
        needed."""
        if self._context is not None and not self._context.baton.forked:
            self._context.baton.discard()
            merge_sm_use(self.counts.sm_users, self._context.sm_users)
            abandon_transfers(self._context.settle())
        self._context = None
