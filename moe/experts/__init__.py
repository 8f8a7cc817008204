"""The experts of one rank, behind one protocol.

reference    plain loop, the reference in tests
grouped      torch: sort by expert, one pair of GEMMs per expert; CPU and CUDA
packed       the same on a CPU, with weights kept only in oneDNN's packed layout; for serving
native       the same with products and activation in C, compiled on the machine; the fastest on a CPU
grouped_mm   torch's grouped product, one launch per projection; bfloat16 on GPUs
flashinfer   flashinfer's CUTLASS kernels, if it is installed; bfloat16 and float16 on GPUs
triton       this project's Triton kernels; GPUs, both layouts, fp8
triton_batched   the same for the low-latency layout only

`base` is the protocol, `registry` finds back ends by name, `quantization` packs fp8 in blocks; CPU ones are in `cpu`.
`fastest` chooses the back end for `auto` by measuring.
"""

from __future__ import annotations

from moe.experts.base import BatchedExperts, BlockwiseExperts, Experts, FusedExperts, SignallingExperts
from moe.experts.fastest import ExpertsNeeds, ExpertsShape, fastest_cpu_experts, fastest_experts, usable_experts
from moe.experts.quantization import dequantize_blocks, quantize_blocks
from moe.experts.registry import experts_backends, experts_class, make_experts, register_experts_backend

__all__ = [
    "BatchedExperts",
    "BlockwiseExperts",
    "Experts",
    "ExpertsNeeds",
    "ExpertsShape",
    "FusedExperts",
    "SignallingExperts",
    "dequantize_blocks",
    "experts_backends",
    "experts_class",
    "fastest_cpu_experts",
    "fastest_experts",
    "make_experts",
    "quantize_blocks",
    "register_experts_backend",
    "usable_experts",
]
