"""Expert-parallel transports, behind one interface.

    local                       one rank, nothing travels
    torch_dist                  all-to-alls of exactly the rows needed; gloo or NCCL
    allgather_reducescatter     every token to every rank; no exchange of counts
    deepep_high_throughput      DeepEP's kernels for prefill: rows, counted on the host or not
    deepep_low_latency          DeepEP's kernels for decode: batches by expert, received by hooks
    deepep_auto                 one of the two in each step, as the ranks voted
    deepep_v2                   DeepEP 2's ElasticBuffer: rows, for prefill and decode
    host_loopback               one GPU, to host memory and back
    host_loopback_batched       the same, batches by expert; can send results while others are computed
    emulated_link               another back end over a link of chosen latency and bandwidth

Shared modules: `base` (the interface, and what a back end can do), `layouts` (what arrives, whole and in chunks of
experts), `registry` (names and options), `payload` (a token's message), `voted` (results of the ranks' vote).

Options that the user does not set follow from the sizes of the steps (`StepSizes`). A step that is larger than a back
end has room for runs in pieces (`moe.modular_kernel`).

A back end is imported at its first use, so its libraries are needed only then. Its `traits` say whether it can be
captured into a CUDA graph, whether it waits on the host, and how much chunks of experts cost.
"""

from moe.all2all.host_loopback import HostLoopbackAll2All

__all__ = ["HostLoopbackAll2All"]
