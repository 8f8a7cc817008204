"""Kernels of the models and of steps, in Triton but for `small_ops`. Importing a module imports Triton; this does not.

norm          RMS norms, with the addition before them
rope          rotation of heads, with their norms
activation    `silu(gate) * up`
small_ops     the first three in C, for a CPU
place         copies a lane's inputs to the static tensors of a captured graph
resolve       pending tokens, stored and looked up on the device
"""
