"""DeepEP's kernels, between GPUs. See `base` for what they all share.

base               the package, its limits, and the order of its launches
buffers            DeepEP's buffers, which all ranks make together
high_throughput    `deepep_high_throughput`: for prefill
low_latency        `deepep_low_latency`: for decode
auto               `deepep_auto`: each where it is best
v2                 `deepep_v2`: DeepEP 2, one set of kernels for both
"""
