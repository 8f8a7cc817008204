"""Traces: when each lane computed, waited and sent.

spans      the records of a trace, and `tracing()`
recorder   records one lane, also for `torch.profiler` and NVTX
stages     names of a lane's stages, points that it passed, launches and their waits
intervals  sets of points in time
export     a summary, and a file for Perfetto
file       reads such files, and puts ranks on one clock
page       an HTML page
"""

from ubatch.trace.export import deciding_note, describe_outcome, handoffs
from ubatch.trace.file import RankTrace, merge_traces, read_chrome
from ubatch.trace.intervals import computing, measure
from ubatch.trace.spans import UNSPLIT, current_trace
from ubatch.trace.stages import by_lane, by_step, extent

__all__ = [
    "UNSPLIT",
    "RankTrace",
    "by_lane",
    "by_step",
    "computing",
    "current_trace",
    "deciding_note",
    "describe_outcome",
    "extent",
    "handoffs",
    "measure",
    "merge_traces",
    "read_chrome",
]
