"""Compiling kernels and choosing the fastest. The kernels themselves are in the packages above, all but `sums`.

c_jit         compiles C for this CPU
recording     calls of kernels in C, to be made again without the Python between them
sums          additions and conversions of whole tensors
tensors       what kernels ask of their tensors
quick_launch  launches of Triton's kernels, found by a short key
triton_jit    Triton's `jit`, typed, and its interpreter
autotune      measures which way to run a kernel is fastest, and remembers it in a file
fastest       the same for back ends, and for ways of computing on a CPU
"""
