"""Steps of a model as CUDA graphs.

mode             whether steps are captured: `none`, `full` or `auto`
batches          the common interface of captured steps, and batches to capture
steps            capture, padding and replay: `GraphSteps`
runner_graphs    what a runner is made of, and its graphs
"""
