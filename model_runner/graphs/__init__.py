"""Steps of a model as CUDA graphs.

mode             whether steps are captured: `none`, `full` or `auto`
batches          what captured steps of any network have in common, and batches to capture
steps            captured, padded and replayed: `GraphSteps`
runner_graphs    those of one runner
"""
