"""Mixture of experts: routing, transport and experts of one layer.

    router            which experts a token visits, and their weights
    modular_kernel    dispatch -> experts -> combine, and every point where a lane may hand over to the next
    schedule_checks   which schedules transport and experts support
    all2all/          how tokens travel between ranks
    experts/          how a rank computes its experts
    kernels/          Triton kernels of both
    cpu_linear        a linear layer on the faster of two CPU libraries
    gpu_linear        a linear layer with weights in fp8
    grouped_linear    linear layers of all experts in one call, in C
    placement         which experts a rank holds, in which slots
    expert_map        from experts to slots, and the load of every expert
    balance/          load of the experts over time, and better placements (numpy only)
    segments          sums and offsets of consecutive rows
    expert_parallel   replaces the MoE blocks of a Hugging Face model
    transformers_parallel   carries the tokens of a model that transformers itself shards

Depends only on `ubatch`.
"""

import typing
import warnings

from moe.all2all.base import All2All, All2AllTraits, BlockCombine, SignalledCombine, StepSizes, traits_in
from moe.all2all.emulated_link import EmulatedLink, LinkStatistics
from moe.all2all.layouts import BatchedDispatch, Dispatched
from moe.all2all.registry import (
    all2all_backends,
    check_all2all_options,
    default_all2all_options,
    make_all2all,
    register_all2all_backend,
)
from moe.cpu_linear import PackedLinear, linear, packing_pays
from moe.expert_map import ExpertLoads, ExpertMap
from moe.expert_parallel import ExpertParallelMoE, UnsupportedModelError, expert_parallel
from moe.experts.base import BatchedExperts, BlockwiseExperts, Experts, FusedExperts, SignallingExperts
from moe.experts.quantization import dequantize_blocks, quantize_blocks
from moe.experts.registry import (
    ExpertsNeeds,
    ExpertsShape,
    check_takes_biases,
    experts_backends,
    experts_class,
    fastest_cpu_experts,
    fastest_experts,
    fp8_block,
    make_experts,
    register_experts_backend,
    usable_experts,
)
from moe.experts.torch_experts import ClampedSwiGLU
from moe.gpu_linear import fp8_linear, fp8_linear_block
from moe.grouped_linear import NativeLinear
from moe.modular_kernel import FusedMoEModularKernel
from moe.placement import ExpertPlacement, local_experts
from moe.router import NO_EXPERT, GroupLimitedRouter, Router, SigmoidTopKRouter, SoftmaxTopKRouter, mask_padding, route
from moe.schedule_checks import check_schedule, check_schedule_by_name, check_signalled_experts
from moe.transformers_parallel import TransformersUnsupportedError, register_with_transformers

__all__ = [
    "NO_EXPERT",
    "All2All",
    "All2AllTraits",
    "BatchedDispatch",
    "BatchedExperts",
    "BlockCombine",
    "BlockwiseExperts",
    "ClampedSwiGLU",
    "Dispatched",
    "EmulatedLink",
    "ExpertLoads",
    "ExpertMap",
    "ExpertParallelMoE",
    "ExpertPlacement",
    "Experts",
    "ExpertsNeeds",
    "ExpertsShape",
    "FusedExperts",
    "FusedMoEModularKernel",
    "GroupLimitedRouter",
    "LinkStatistics",
    "NativeLinear",
    "PackedLinear",
    "Router",
    "SigmoidTopKRouter",
    "SignalledCombine",
    "SignallingExperts",
    "SoftmaxTopKRouter",
    "StepSizes",
    "TransformersUnsupportedError",
    "UnsupportedModelError",
    "all2all_backends",
    "check_all2all_options",
    "check_schedule",
    "check_schedule_by_name",
    "check_signalled_experts",
    "check_takes_biases",
    "default_all2all_options",
    "dequantize_blocks",
    "expert_parallel",
    "experts_backends",
    "experts_class",
    "fastest_cpu_experts",
    "fastest_experts",
    "fp8_block",
    "fp8_linear",
    "fp8_linear_block",
    "linear",
    "local_experts",
    "make_all2all",
    "make_experts",
    "mask_padding",
    "packing_pays",
    "quantize_blocks",
    "register_all2all_backend",
    "register_experts_backend",
    "register_with_transformers",
    "route",
    "traits_in",
    "usable_experts",
]


def __getattr__(name: str) -> typing.Any:
    if name not in _ABILITIES:
        raise AttributeError(f"module 'moe' has no attribute {name!r}")
    message = f"moe.{name} is gone in the next release. What it asks for is a part of moe.All2All, with a default."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return All2All


_ABILITIES = ("MarksInputs", "SendsBlocks", "ServesChunks", "SignalsCombine", "TellsLater")
