"""The same gated experts, computed by torch's grouped product and by other installed libraries.

Each peer's result is compared with this project's before it is timed. A peer that differs, is not installed or does not
run here gets a row with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moe import experts_backends, make_experts

GROUPED_MM = "torch._grouped_mm"


@dataclass(frozen=True)
class Layer:
    """One MoE layer's experts and a batch for them: `w13` `[E, 2 * I, H]` (gate first), `w2` `[E, H, I]`, `x` `[T, H]`,
    `ids` `[T, k]` int64 and `weights` `[T, k]` float32."""

    w13: Tensor
    w2: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor


def peers(layer: Layer) -> dict[str, Callable[[Layer], Callable[[], Tensor]]]:
    """The libraries on this machine: name -> function that imports and prepares one, and may raise anything.

    What it returns computes the layer's output `[T, H]`.
    """
    found: dict[str, Callable[[Layer], Callable[[], Tensor]]] = {GROUPED_MM: _grouped_mm}
    if layer.x.device.type == "cuda":
        makers = {"flashinfer": _flashinfer, "vllm": _vllm, "sglang": _sglang}
        found |= {name: make for name, make in makers.items() if importlib.util.find_spec(name) is not None}
    return found


# -- torch ------------------------------------------------------------------------------------------------------------


def _grouped_mm(layer: Layer) -> Callable[[], Tensor]:
    """Sort pairs by expert, run two grouped products, weigh, un-sort, sum. Reads nothing on the host."""

    def run() -> Tensor:
        tokens, top_k = layer.ids.shape
        order, ends = _sorted_pairs(layer)
        y = _products(layer, layer.x[order // top_k], ends)
        y = y * layer.weights.flatten()[order][:, None].to(y.dtype)
        pairs = torch.empty_like(y)
        pairs[order] = y
        return pairs.view(tokens, top_k, -1).sum(1)

    return run


def grouped_products(layer: Layer) -> Callable[[], Tensor]:
    """The two grouped products and the activation alone, over rows that are already sorted."""
    order, ends = _sorted_pairs(layer)
    rows = layer.x[order // layer.ids.shape[1]].contiguous()
    return lambda: _products(layer, rows, ends)


def _sorted_pairs(layer: Layer) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert, and the index at which each expert's pairs end."""
    expert_of_pair, order = layer.ids.flatten().sort(stable=True)
    experts = torch.arange(layer.w13.shape[0], device=layer.ids.device)
    return order, torch.searchsorted(expert_of_pair, experts, right=True).to(torch.int32)


def _products(layer: Layer, rows: Tensor, ends: Tensor) -> Tensor:
    gate, up = torch._grouped_mm(rows, layer.w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return torch._grouped_mm(F.silu(gate) * up, layer.w2.transpose(1, 2), offs=ends)


# -- other libraries --------------------------------------------------------------------------------------------------


def _flashinfer(layer: Layer) -> Callable[[], Tensor]:
    if "flashinfer" not in experts_backends():
        raise RuntimeError("this project's flashinfer back end is not registered")
    experts = make_experts("flashinfer", layer.w13, layer.w2)
    return lambda: experts(layer.x, layer.ids, layer.weights)


def _vllm(layer: Layer) -> Callable[[], Tensor]:
    module = importlib.import_module("vllm.model_executor.layers.fused_moe")
    ids = layer.ids.to(torch.int32)
    return lambda: module.fused_experts(layer.x, layer.w13, layer.w2, layer.weights, ids)


def _sglang(layer: Layer) -> Callable[[], Tensor]:
    triton = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_moe")
    runner = importlib.import_module("sglang.srt.layers.moe.moe_runner")
    topk = importlib.import_module("sglang.srt.layers.moe.topk")
    experts = layer.w13.shape[0]
    config = runner.MoeRunnerConfig(num_experts=experts, num_local_experts=experts, inplace=False)
    routed = topk.StandardTopKOutput(layer.weights, layer.ids.to(torch.int32), layer.weights)
    return lambda: triton.fused_experts(layer.x, layer.w13, layer.w2, routed, config)
