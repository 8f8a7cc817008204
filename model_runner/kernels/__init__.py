"""Kernels of the models and of steps, in Triton but for `small_ops`. Importing a module imports Triton; this does not.

layer_ops    RMS norms, with the addition before them; rotation of heads, with their norms; `silu(gate) * up`
small_ops    these in C, for a CPU
tokens       a lane's inputs to a captured graph; pending tokens, stored and looked up on the device
"""
