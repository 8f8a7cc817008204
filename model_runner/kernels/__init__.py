"""Triton kernels of the models and of steps. Importing a module of this package imports Triton; this does not.

norm          RMS norms, with the addition before them
rope          rotation of heads, with their norms
activation    `silu(gate) * up`
place         copies a lane's inputs to the static tensors of a captured graph
resolve       pending tokens, stored and looked up on the device
"""
