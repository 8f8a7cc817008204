"""Triton kernels of the models and of sampling. Importing a module of this package imports Triton; this does not."""
