"""What one rank's process runs.

process        the process: it reads messages, runs steps, sends outputs
core           the loop: schedule, launch, sample, process
lockstep       tensor-parallel ranks handle the same messages before the same step
build          makes a runner and its loop from `EngineOptions`; captures graphs, warms up; what a checkpoint has, and
               descriptions of a runner
listeners      refuses strangers on the ports of gloo
tracing        traces of steps, for statistics and profiles; the load of the experts
"""
