"""Experts on a CPU, with C or oneDNN kernels.

native      `native`: this project's C kernels, with packed weights
packed      `packed`: oneDNN's packed weights
repacked    the base of both: weights are kept only in the kernels' layout
"""
