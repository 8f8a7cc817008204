"""Whether a runner captures its steps: `none`, `full`, or `auto` (`full` if everything can be captured)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from attention import UBatchAttention
from model_runner.parallel.tensor_parallel import TensorParallel
from model_runner.step.graph_sizes import GraphFamily, GraphShape
from moe import All2All, FusedMoEModularKernel, traits_in
from ubatch import ConfigError, CUDAGraphMode, ForwardMode, nearest

_logger = logging.getLogger(__name__)

AUTO = "auto"
_MODES = (AUTO, *(mode.value for mode in CUDAGraphMode))


def resolve_graph_mode(
    asked: str,
    model: nn.Module,
    attention: UBatchAttention,
    *,
    simulated: bool = False,
    tensor_parallel: TensorParallel | None = None,
    steps: str = "steps",
) -> CUDAGraphMode:
    """Resolve the mode to `none` or `full`.

    Args:
        simulated: graphs are captured by something other than CUDA, so any device is allowed.
        tensor_parallel: the ranks of a replica, whose gathers must be capturable.
        steps: name of the steps to capture, for the log.

    Raises:
        ConfigError: the mode is unknown, or it is `full` and something cannot be captured.
    """
    if asked not in _MODES:
        raise ConfigError(f"unknown cudagraph_mode {asked!r}{nearest(asked, _MODES)}")
    if asked == CUDAGraphMode.NONE:
        return CUDAGraphMode.NONE
    device = attention.kv_cache.device
    on_gpu = device.type == "cuda" or simulated
    obstacle = _obstacle(model, attention) if on_gpu else f"CUDA graphs need a GPU, and the model runs on {device}"
    if obstacle is None and tensor_parallel is not None:
        obstacle = _obstacle_to_gathers(tensor_parallel)
    if obstacle is None:
        return CUDAGraphMode.FULL
    if asked == CUDAGraphMode.FULL:
        raise ConfigError(f"cudagraph_mode full: {obstacle}. Change that, or use cudagraph_mode none.")
    if on_gpu:
        _logger.warning("%s are not captured as CUDA graphs: %s", steps, obstacle)
    return CUDAGraphMode.NONE


def _obstacle(model: nn.Module, attention: UBatchAttention) -> str | None:
    """The first part of the model that cannot be captured, as the end of a sentence."""
    if not attention.linear_capturable:
        return "steps of linear attention can be captured with its Triton kernels only, which need a GPU and Triton"
    if not attention.capturable:
        return f"attention back end {attention.decode_name!r} cannot be captured"
    for kernel in model.modules():
        if not isinstance(kernel, FusedMoEModularKernel):
            continue
        if not traits_in(kernel.all2all, ForwardMode.DECODE, 1).capturable:
            return f"the all2all back end {type(kernel.all2all).__name__} cannot be captured in decode steps"
        if not kernel.experts.capturable:
            return f"the experts back end {type(kernel.experts).__name__} cannot be captured"
    return None


def _obstacle_to_gathers(tensor_parallel: TensorParallel) -> str | None:
    """Why transfers between the ranks of a replica cannot be captured, as the end of a sentence; None if they can."""
    if tensor_parallel.carry is not None:
        return "an emulated link holds back what tensor-parallel ranks send each other, which no graph can do"
    if not tensor_parallel.group.stream_ordered(torch.device("cuda")):
        return (
            f"tensor-parallel ranks (tensor_parallel_size {tensor_parallel.size}) gather over "
            f"{tensor_parallel.group.backend}, which blocks the host, and only NCCL's gathers can be captured"
        )
    return None


def capturable_families(
    families: Sequence[GraphFamily], all2all: All2All, asked: str, tensor_parallel_size: int = 1
) -> list[GraphFamily]:
    """The families that the transport can capture: large steps may need a transport path that cannot be captured.

    Args:
        all2all: the model's transport; it can be captured in decode steps of one token.
        asked: `auto` leaves out shapes that cannot be captured, with a warning; `full` raises.

    Raises:
        ConfigError: the mode is `full`, and a shape cannot be captured.
    """

    def fits(shape: GraphShape) -> bool:
        return traits_in(all2all, shape.mode, -(-shape.lane_tokens // tensor_parallel_size)).capturable

    too_large = [shape for family in families for shape in family.shapes if not fits(shape)]
    if not too_large:
        return list(families)
    least = min(too_large, key=lambda shape: shape.lane_tokens)
    what = (
        f"{least.mode} steps of {least.lane_tokens} tokens or more do not fit the way of "
        f"{type(all2all).__name__} that can be captured"
    )
    advice = (
        "Raise max_tokens_per_rank or set worst_case among the all2all options (--all2all-options), or lower "
        "--cudagraph-capture-sizes"
    )
    if asked == CUDAGraphMode.FULL:
        raise ConfigError(f"cudagraph_mode full: {what}. {advice}, or use cudagraph_mode auto.")
    _logger.warning("%s: such steps run eagerly, unless their lanes do fit. %s.", what, advice)
    kept = [replace(family, shapes=tuple(filter(fits, family.shapes))) for family in families]
    return [family for family in kept if any(not shape.engaged for shape in family.shapes)]
