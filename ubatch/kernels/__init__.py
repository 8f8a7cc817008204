"""Compiling kernels and choosing the fastest. The kernels themselves are in the packages above, all but `sums`.

c_jit         compiles C for this CPU
recording     calls of kernels in C, to be made again without the Python between them
sums          additions and conversions of whole tensors; what kernels ask of their tensors
quick_launch  launches of Triton's kernels, found by a short key, without Triton's launcher
triton_jit    Triton's `jit`, typed, and its interpreter
autotuner     measures which way to run a kernel is fastest, and remembers it in a file
candidates    the same for back ends, and for ways of computing on a CPU; what is kept of the latter
"""

from ubatch.kernels.autotuner import autotune
from ubatch.kernels.c_jit import OFF_VARIABLE, TILES_SOURCE, compile_c, kernel_of, kernels_of, why_not_c
from ubatch.kernels.candidates import Chosen, Launches, best_times, choice, fastest, measured, remember_choices
from ubatch.kernels.recording import Rebinds, Recording, this_thread
from ubatch.kernels.sums import add, add_bias, rows_contiguous, runs_in_c, to_float

__all__ = [
    "OFF_VARIABLE",
    "TILES_SOURCE",
    "Chosen",
    "Launches",
    "Rebinds",
    "Recording",
    "add",
    "add_bias",
    "autotune",
    "best_times",
    "choice",
    "compile_c",
    "fastest",
    "kernel_of",
    "kernels_of",
    "measured",
    "remember_choices",
    "rows_contiguous",
    "runs_in_c",
    "this_thread",
    "to_float",
    "why_not_c",
]
