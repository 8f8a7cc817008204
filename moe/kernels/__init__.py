"""Triton kernels of the MoE layer. Importing a module of this package imports Triton; this does not."""
