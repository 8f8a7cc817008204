"""Experts on a CPU by its libraries' kernels.

native      `native`: this project's C kernels, with packed weights
packed      `packed`: oneDNN's packed weights
repacked    weights that are kept only as kernels read them
"""
