"""Whether a runner captures its steps: `none`, `full`, or `auto`, which is full where everything can be captured."""

from __future__ import annotations

import logging

import torch
from torch import nn

from attention import UBatchAttention
from model_runner.tensor_parallel import TensorParallel
from moe import FusedMoEModularKernel
from ubatch import ConfigError, CUDAGraphMode, nearest

__all__ = ["AUTO", "resolve_graph_mode"]

_logger = logging.getLogger(__name__)

AUTO = "auto"
_MODES = (AUTO, *(mode.value for mode in CUDAGraphMode))


def resolve_graph_mode(
    asked: str,
    device: torch.device,
    model: nn.Module,
    attention: UBatchAttention,
    *,
    simulated: bool = False,
    tensor_parallel: TensorParallel | None = None,
    steps: str = "steps",
) -> CUDAGraphMode:
    """The mode in force.

    Args:
        asked: `auto`, `none` or `full`.
        device: of the model.
        model: whose experts and transport must be capturable.
        attention: whose decode back end must be.
        simulated: something else than CUDA captures, so any device does.
        tensor_parallel: the ranks of a replica, whose gathers must be capturable.
        steps: what is captured, for the log.

    Raises:
        ConfigError: an unknown mode, or `full` where something cannot be captured.
    """
    if asked not in _MODES:
        raise ConfigError(f"unknown cudagraph_mode {asked!r}{nearest(asked, _MODES)}")
    if asked == CUDAGraphMode.NONE:
        return CUDAGraphMode.NONE
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
    if not attention.capturable:
        return f"attention back end {attention.decode_name!r} cannot be captured"
    for kernel in model.modules():
        if not isinstance(kernel, FusedMoEModularKernel):
            continue
        if not kernel.all2all.traits.capturable:
            return f"the all2all back end {type(kernel.all2all).__name__} cannot be captured"
        if not kernel.experts.capturable:
            return f"the experts back end {type(kernel.experts).__name__} cannot be captured"
    return None


def _obstacle_to_gathers(tensor_parallel: TensorParallel) -> str | None:
    """The same of what the ranks of a replica send each other in every layer."""
    if tensor_parallel.carry is not None:
        return "an emulated link holds back what tensor-parallel ranks send each other, which no graph can do"
    if not tensor_parallel.group.stream_ordered(torch.device("cuda")):
        return (
            f"tensor-parallel ranks (tensor_parallel_size {tensor_parallel.size}) gather over "
            f"{tensor_parallel.group.backend}, which blocks the host, and only NCCL's gathers can be captured"
        )
    return None
