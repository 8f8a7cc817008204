"""The experts of one rank, behind one protocol.

reference    plain loop, the oracle of the tests
grouped      torch: sort by expert, one pair of GEMMs per expert; CPU and CUDA
packed       the same on a CPU, with weights kept only as oneDNN reads them fastest; for serving
native       the same with products and activation in C, compiled where it runs; the fastest of them on a CPU
"""

from __future__ import annotations

from moe.experts.base import BatchedExperts, Experts, FusedExperts, SignallingExperts
from moe.experts.fastest import fastest_cpu_experts
from moe.experts.quantization import dequantize_blocks, quantize_blocks
from moe.experts.registry import experts_backends, make_experts, register_experts_backend

__all__ = [
    "BatchedExperts",
    "Experts",
    "FusedExperts",
    "SignallingExperts",
    "dequantize_blocks",
    "experts_backends",
    "fastest_cpu_experts",
    "make_experts",
    "quantize_blocks",
    "register_experts_backend",
]
