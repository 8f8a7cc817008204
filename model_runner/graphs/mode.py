"""Whether a runner captures its steps: `none`, `full`, or `auto`, which is full where everything can be captured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from attention import UBatchAttention
from model_runner.parallel.tensor_parallel import TensorParallel
from model_runner.step.graph_sizes import GraphFamily, GraphShape
from moe import All2All, FusedMoEModularKernel, traits_in
from ubatch import ConfigError, CUDAGraphMode, ForwardMode, GraphBackend, nearest

__all__ = ["AUTO", "GraphsAsked", "capturable_families", "resolve_graph_mode"]

_logger = logging.getLogger(__name__)

AUTO = "auto"
_MODES = (AUTO, *(mode.value for mode in CUDAGraphMode))


@dataclass(frozen=True)
class GraphsAsked:
    """What a runner is asked to capture.

    Attributes:
        mode: `auto`, `none` or `full`.
        backend: captures and replays; None for CUDA.
        sizes: requests of the steps; None for the usual ones.
        num_speculative_tokens: drafts of verify steps; 0 for none.
        trees: they may be trees.
    """

    mode: str
    backend: GraphBackend | None
    sizes: Sequence[int] | None
    num_speculative_tokens: int
    trees: bool


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
        if not traits_in(kernel.all2all, ForwardMode.DECODE, 1).capturable:
            return f"the all2all back end {type(kernel.all2all).__name__} cannot be captured in decode steps"
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


def capturable_families(
    families: Sequence[GraphFamily], all2all: All2All, asked: str, tensor_parallel_size: int = 1
) -> list[GraphFamily]:
    """What of the families the transport can be captured in: a step may be too large for the way that can be.

    Args:
        families: what would be captured.
        all2all: of the model, which decode steps of one token can be captured with.
        asked: `auto` leaves out what cannot be captured, and says so; `full` refuses it.
        tensor_parallel_size: ranks of a replica, which share its tokens.

    Raises:
        ConfigError: `full`, and something cannot be captured.
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
