"""Traces: when each lane computed, waited and sent.

spans      the records of a trace, and `tracing()`
recorder   records one lane
ranges     lanes in `torch.profiler` and NVTX
stages     names of a lane's stages, points that it passed, launches and their waits
intervals  sets of points in time
export     a summary, and a file for Perfetto
file       reads such files, and puts ranks on one clock
page       an HTML page
"""
