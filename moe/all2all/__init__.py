"""Expert-parallel transports, behind one protocol.

    local                       one rank, nothing travels
    torch_dist                  all-to-alls of exactly the rows needed; gloo or NCCL
    allgather_reducescatter     every token to every rank; no exchange of counts
    deepep_high_throughput      DeepEP's kernels for prefill: rows, counted on the host or not
    deepep_low_latency          DeepEP's kernels for decode: batches by expert, received by hooks
    deepep_auto                 the one or the other, step by step, as the ranks voted
    deepep_v2                   DeepEP 2's ElasticBuffer: rows, for prefill and decode
    host_loopback               one GPU, to host memory and back
    host_loopback_batched       the same, batches by expert; results may leave while they are made
    emulated_link               another back end over a link of chosen latency and bandwidth

And what they share: `base` (the protocol), `registry` (by name, and options), `chunks` and `batches` (layouts),
`payload` (a token's message), `link` (an emulated link's clock), `voted` (what the vote tells).

Options of a back end that nobody gives follow from the steps that there will be (`StepSizes`). A step that is larger
than a back end has room for goes in pieces (`moe.modular_kernel`).

Each is imported when first asked for, so that one which needs a library or a device does not burden the others. Which
can be captured into a CUDA graph, which waits on the host, and what chunks of experts cost it is in their `traits`.
"""

from __future__ import annotations

from moe.all2all.base import (
    All2All,
    All2AllTraits,
    BatchedDispatch,
    BlockCombine,
    DiffersBySteps,
    Dispatched,
    MarksInputs,
    SendsBlocks,
    SignalledCombine,
    SignalsCombine,
    StepSizes,
    TellsLater,
    traits_in,
)
from moe.all2all.chunks import ServesChunks
from moe.all2all.link import EmulatedLink, LinkStatistics
from moe.all2all.registry import (
    all2all_backends,
    all2all_class,
    check_all2all_options,
    default_all2all_options,
    make_all2all,
    register_all2all_backend,
)

__all__ = [
    "All2All",
    "All2AllTraits",
    "BatchedDispatch",
    "BlockCombine",
    "DiffersBySteps",
    "Dispatched",
    "EmulatedLink",
    "LinkStatistics",
    "MarksInputs",
    "SendsBlocks",
    "ServesChunks",
    "SignalledCombine",
    "SignalsCombine",
    "StepSizes",
    "TellsLater",
    "all2all_backends",
    "all2all_class",
    "check_all2all_options",
    "default_all2all_options",
    "make_all2all",
    "register_all2all_backend",
    "traits_in",
]
