"""`ubatch tune`, in its parts; `serving.workbench.tuning.tune` is the command.

cells     kinds and sizes of steps to measure, and the arms to compare
batches   a synthetic batch of a cell
stages    the time of every stage of a layer, from traced steps; the schedules that the simulator thinks best
measure   the rounds on the ranks, until the time is up
state     what was measured so far, in a file, so that a run goes on where it was stopped
report    choices, as a table and as the YAML file that `--config` reads
plot      the same as a page of HTML, and as a PNG
"""
