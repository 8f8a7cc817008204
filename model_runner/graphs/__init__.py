"""Steps of a model as CUDA graphs.

steps            the common interface of captured steps; capture, padding and replay: `GraphSteps`
runner_graphs    what a runner is made of, and its graphs; whether steps are captured: `none`, `full` or `auto`
"""
