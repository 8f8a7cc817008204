"""`ubatch`: overlap communication with compute by running a batch as microbatches that take turns.

Words used throughout:

    lane       one microbatch's worker: a thread and its context
    baton      the right to run; one lane holds it at any time
    point      a named place where a lane may hand the baton on
    transfer   communication that was launched and can be waited for
    chunk      a block of experts with its own dispatch, experts and combine
    schedule   how many lanes and chunks, which points are active, how far lane 0 leads, where the shared expert goes

Wrapping a module needs nothing but torch:

    model = UBatchWrapper(model, UBatchConfig(group=CommGroup.from_process_group()))

One line per group of files:

    ring, schedule, simulate          the rules, as data and pure functions
    wakeup, baton, workers            who runs: the primitive, the invariant, the threads
    context, dbo, ambient             what a lane is, what model code calls in it, what it takes from the caller
    streams, transfer, collectives    where and what it launches
    vote, connection, group           what ranks agree on, and what they see when one fails
    split, arguments, caches          what is cut
    outputs, containers               how it is put together again
    config, planner, wrapper, facade  what a user sees, and whether a call overlaps
    trace, trace_export, trace_html   what happened
    forward_context, registry, errors what the rest shares
"""

from ubatch.arguments import CannotSplit
from ubatch.caches import CacheSplitter, register_splitter
from ubatch.collectives import (
    all_gather,
    all_reduce,
    all_to_all_single,
    launch_all_gather,
    launch_all_reduce,
    launch_all_to_all_single,
    launch_reduce_scatter,
    reduce_scatter,
)
from ubatch.config import CUDAGraphMode, UBatchConfig
from ubatch.context import UBatchContext, current_lane, current_schedule, make_ubatch_contexts
from ubatch.dbo import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_switch_to_comm,
    dbo_switch_to_compute,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
)
from ubatch.errors import (
    ConcurrentCallError,
    ConfigError,
    ForkedLaneError,
    GradientError,
    GroupBroken,
    LaneAborted,
    NestedUBatchError,
    OverlapDeclined,
    PeerFailed,
    SplitError,
    TransferTimeout,
    UBatchError,
    UBatchTimeout,
    UnvotedCollectiveError,
    nearest,
)
from ubatch.forward_context import ForwardContext, ForwardMode, get_forward_context, set_forward_context
from ubatch.group import CommGroup
from ubatch.registry import LazyRegistry
from ubatch.ring import Ring, interleave
from ubatch.schedule import SCHEDULES, Point, Recv, Schedule, SharedExpert, get_schedule
from ubatch.split import UBatchSlice, keep_together, split_balanced, split_fixed, split_requests, split_two_chunk
from ubatch.split_cost import SplitBy, SplitCost, split_by_cost
from ubatch.trace import LinkTime, Span, SpanKind, Trace, current_trace, tracing
from ubatch.trace_export import TraceSummary, summarise, write_chrome
from ubatch.trace_html import write_html
from ubatch.transfer import Transfer
from ubatch.vote import Decision, DeclineReason, Offer, Wish, decide, fingerprint
from ubatch.wakeup import Gate
from ubatch.wrapper import UBatchStatistics, UBatchWrapper

__all__ = [
    "SCHEDULES",
    "CUDAGraphMode",
    "CacheSplitter",
    "CannotSplit",
    "CommGroup",
    "ConcurrentCallError",
    "ConfigError",
    "Decision",
    "DeclineReason",
    "ForkedLaneError",
    "ForwardContext",
    "ForwardMode",
    "Gate",
    "GradientError",
    "GroupBroken",
    "LaneAborted",
    "LazyRegistry",
    "LinkTime",
    "NestedUBatchError",
    "Offer",
    "OverlapDeclined",
    "PeerFailed",
    "Point",
    "Recv",
    "Ring",
    "Schedule",
    "SharedExpert",
    "Span",
    "SpanKind",
    "SplitBy",
    "SplitCost",
    "SplitError",
    "Trace",
    "TraceSummary",
    "Transfer",
    "TransferTimeout",
    "UBatchConfig",
    "UBatchContext",
    "UBatchError",
    "UBatchSlice",
    "UBatchStatistics",
    "UBatchTimeout",
    "UBatchWrapper",
    "UnvotedCollectiveError",
    "Wish",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "current_lane",
    "current_schedule",
    "current_trace",
    "dbo_current_ubatch_id",
    "dbo_enabled",
    "dbo_maybe_run_recv_hook",
    "dbo_register_recv_hook",
    "dbo_switch_to_comm",
    "dbo_switch_to_compute",
    "dbo_yield",
    "dbo_yield_and_switch_from_comm_to_compute",
    "dbo_yield_and_switch_from_compute_to_comm",
    "decide",
    "fingerprint",
    "get_forward_context",
    "get_schedule",
    "interleave",
    "keep_together",
    "launch_all_gather",
    "launch_all_reduce",
    "launch_all_to_all_single",
    "launch_reduce_scatter",
    "make_ubatch_contexts",
    "nearest",
    "reduce_scatter",
    "register_splitter",
    "set_forward_context",
    "split_balanced",
    "split_by_cost",
    "split_fixed",
    "split_requests",
    "split_two_chunk",
    "summarise",
    "tracing",
    "write_chrome",
    "write_html",
]
