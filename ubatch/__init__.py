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

From the top down (each folder's `__init__.py` has a line for every file):

    wrapper, wrapped   a module that overlaps, and what happens in a call of it
    graphs/            CUDA graphs of its calls: captured, replayed, and why not
    wrapping/          settings, whether a call may overlap, the proof of it, running it
    calls/             a call cut into lanes, and outputs put together
    kernels/           compiling kernels, and choosing the fastest
    ranks/             groups, transfers, collectives, and peers that fail
    dbo                what model code calls inside a lane
    lanes/             the baton, the threads, and what a lane is
    streams/           CUDA's streams, memory, and the sharing of SMs
    schedules/         schedules, splits and votes as data; the simulator
    trace/             what happened when
    process/           state of the whole process: Ctrl-C, heartbeat, registries
    errors             every error, with what to do
"""

import importlib
import typing
import warnings

from ubatch.calls.caches import CacheSplitter, register_splitter
from ubatch.calls.call_plan import CannotSplit
from ubatch.dbo import (
    current_sm_budget,
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_get_previous_event,
    dbo_keep,
    dbo_maybe_run_recv_hook,
    dbo_register_recv_hook,
    dbo_switch_to_comm,
    dbo_switch_to_comm_sync,
    dbo_switch_to_compute,
    dbo_switch_to_compute_sync,
    dbo_yield,
    dbo_yield_and_switch_from_comm_to_compute,
    dbo_yield_and_switch_from_compute_to_comm,
    fork_comm_stream,
    on_comm_stream,
    on_compute_stream,
    report_sm_use,
)
from ubatch.errors import (
    ConcurrentCallError,
    ConfigError,
    ForgedValue,
    ForkedLaneError,
    GradientError,
    GroupBroken,
    LaneAborted,
    LaunchOrderError,
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
from ubatch.graphs.cuda import CudaGraphs
from ubatch.lanes.context import UBatchContext, current_schedule, make_ubatch_contexts
from ubatch.lanes.wakeup import Gate
from ubatch.process.registry import LazyRegistry, import_optional
from ubatch.ranks.collectives import (
    all_gather,
    all_reduce,
    all_to_all_single,
    launch_all_gather,
    launch_all_reduce,
    launch_all_to_all_single,
    launch_reduce_scatter,
    reduce_scatter,
)
from ubatch.ranks.group import CommGroup
from ubatch.ranks.host_copy import copy_to_host
from ubatch.ranks.transfer import Transfer
from ubatch.schedules.forward_context import ForwardContext, ForwardMode, get_forward_context, set_forward_context
from ubatch.schedules.modes import ModeSettings, Resolved
from ubatch.schedules.ring import interleave
from ubatch.schedules.schedule import SCHEDULES, Point, Recv, Schedule, SharedExpert, get_schedule
from ubatch.schedules.split import (
    UBatchSlice,
    keep_together,
    split_balanced,
    split_fixed,
    split_requests,
    split_two_chunk,
)
from ubatch.schedules.split_cost import SplitBy, SplitCost, split_by_cost
from ubatch.schedules.vote import Decision, DeclineReason, Offer, Wish, decide, fingerprint
from ubatch.streams.graph_protocols import CapturedGraph, CaptureFailed, GraphBackend, GraphKey, GraphMiss, capturing
from ubatch.streams.sm_budget import SMBudget
from ubatch.trace.export import TraceSummary, summarise, write_chrome
from ubatch.trace.page import Remark, write_html
from ubatch.trace.ranges import profile_ranges
from ubatch.trace.spans import LinkTime, Span, SpanKind, StepNote, Trace, tracing
from ubatch.wrapper import UBatchWrapper
from ubatch.wrapping.config import CUDAGraphMode, UBatchConfig, Verify
from ubatch.wrapping.statistics import UBatchStatistics

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "CUDAGraphMode",
    "CacheSplitter",
    "CannotSplit",
    "CaptureFailed",
    "CapturedGraph",
    "CommGroup",
    "ConcurrentCallError",
    "ConfigError",
    "CudaGraphs",
    "Decision",
    "DeclineReason",
    "ForgedValue",
    "ForkedLaneError",
    "ForwardContext",
    "ForwardMode",
    "Gate",
    "GradientError",
    "GraphBackend",
    "GraphKey",
    "GraphMiss",
    "GroupBroken",
    "LaneAborted",
    "LaunchOrderError",
    "LazyRegistry",
    "LinkTime",
    "ModeSettings",
    "NestedUBatchError",
    "Offer",
    "OverlapDeclined",
    "PeerFailed",
    "Point",
    "Recv",
    "Remark",
    "Resolved",
    "SMBudget",
    "Schedule",
    "SharedExpert",
    "Span",
    "SpanKind",
    "SplitBy",
    "SplitCost",
    "SplitError",
    "StepNote",
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
    "Verify",
    "Wish",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "capturing",
    "copy_to_host",
    "current_schedule",
    "current_sm_budget",
    "dbo_current_ubatch_id",
    "dbo_enabled",
    "dbo_get_previous_event",
    "dbo_keep",
    "dbo_maybe_run_recv_hook",
    "dbo_register_recv_hook",
    "dbo_switch_to_comm",
    "dbo_switch_to_comm_sync",
    "dbo_switch_to_compute",
    "dbo_switch_to_compute_sync",
    "dbo_yield",
    "dbo_yield_and_switch_from_comm_to_compute",
    "dbo_yield_and_switch_from_compute_to_comm",
    "decide",
    "fingerprint",
    "fork_comm_stream",
    "get_forward_context",
    "get_schedule",
    "import_optional",
    "interleave",
    "keep_together",
    "launch_all_gather",
    "launch_all_reduce",
    "launch_all_to_all_single",
    "launch_reduce_scatter",
    "make_ubatch_contexts",
    "nearest",
    "on_comm_stream",
    "on_compute_stream",
    "profile_ranges",
    "reduce_scatter",
    "register_splitter",
    "report_sm_use",
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

_MOVED = {
    "Candidate": "ubatch.schedules.search",
    "LayerTimes": "ubatch.schedules.layer_program",
    "RankTrace": "ubatch.trace.file",
    "Ring": "ubatch.schedules.ring",
    "SingleLane": "ubatch.lanes.single_lane",
    "check_launch": "ubatch.ranks.launch_checks",
    "current_lane": "ubatch.lanes.context",
    "current_trace": "ubatch.trace.spans",
    "merge_traces": "ubatch.trace.file",
    "read_chrome": "ubatch.trace.file",
    "search_schedules": "ubatch.schedules.search",
    "split_mixed": "ubatch.schedules.split_mixed",
}
"""Names that were public up to 0.1.0, and the module each is in now. The next release removes them from here."""


def __getattr__(name: str) -> typing.Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'ubatch' has no attribute {name!r}")
    place = _MOVED[name]
    warnings.warn(
        f"ubatch.{name} is no public name any more, and gone in the next release. It is {place}.{name}.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module(place), name)
