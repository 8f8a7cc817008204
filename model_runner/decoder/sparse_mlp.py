"""The mixture-of-experts layer: gate, router, the routed experts of this rank, and shared experts.

The modular kernel runs the shared experts while tokens are being transferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from model_runner.decoder.base import ExpertParallel
from model_runner.decoder.config import DecoderConfig, MoEConfig
from model_runner.decoder.layers import GatedMLP, Projection, frozen
from model_runner.weights.fp8 import load_fp8_experts
from model_runner.weights.weights import Checkpoint, Part
from moe import ClampedSwiGLU, FusedMoEModularKernel, SigmoidTopKRouter, make_experts, route
from ubatch.kernels import this_thread, to_float


class SparseMLP(nn.Module):
    """Router and experts; the transport determines which experts this rank holds."""

    def __init__(
        self, moe: MoEConfig, config: DecoderConfig, checkpoint: Checkpoint, layer: int, parallel: ExpertParallel
    ) -> None:
        """Load the weights of the experts that this rank holds, and those that all ranks have."""
        super().__init__()
        num_experts, hidden_size, names = config.num_experts, config.hidden_size, moe.names
        prefix = f"{config.tensor_prefix}.layers.{layer}"
        block = f"{prefix}.{names.block}"
        # Scores of experts may be close together, so some families compute the gate in float32.
        self.gate_dtype = torch.float32 if moe.float32_gate else checkpoint.dtype
        gate = torch.empty(num_experts, hidden_size, dtype=self.gate_dtype, device=checkpoint.device)
        router_name = f"{block}.{names.router}"
        checkpoint.load_into(f"{router_name}.weight", gate)
        self.gate = Projection(gate, checkpoint.load(f"{router_name}.bias", num_experts) if moe.gate_bias else None)
        self.router = moe.router
        if isinstance(moe.router, SigmoidTopKRouter):
            bias = torch.empty(num_experts, dtype=torch.float32, device=checkpoint.device)
            checkpoint.load_into(f"{block}.gate.e_score_correction_bias", bias)
            self.correction_bias = frozen(bias)
            self.router = replace(moe.router, correction_bias=self.correction_bias)

        shared: GatedMLP | None = None
        if moe.shared_intermediate_size:
            name, of_result = f"{prefix}.{names.shared}", f"{block}.{names.shared_gate}" if moe.shared_gate else None
            sizes = hidden_size, moe.shared_intermediate_size
            shared = GatedMLP(checkpoint, name, *sizes, fused=names.shared_fused, gate=of_result)
        all2all, moe_layer = parallel.all2all, config.moe_layers.index(layer) if layer in config.moe_layers else 0
        held = parallel.held(moe_layer)
        expert_map = parallel.expert_map(moe_layer, checkpoint.device)
        load = None if parallel.loads is None else parallel.loads.of_layer(moe_layer)

        def make_kernel() -> None:  # needs the weights: a back end may pack or reorder them
            given = weights if moe.clamped is None else _untransposed(weights, moe.clamped)
            first, num_slots = all2all.experts.start, all2all.num_experts
            experts = make_experts(parallel.experts, first_expert=first, num_experts=num_slots, **given)
            weights.clear()
            self.kernel = FusedMoEModularKernel(all2all, experts, shared, expert_map=expert_map, load=load)

        with checkpoint.once_read(make_kernel):
            if moe.clamped is not None:
                parts = _parts(held, num_experts)
                weights = _load_transposed(checkpoint, f"{block}.experts", parts, hidden_size, moe.intermediate_size)
            else:
                weights = _load_experts(checkpoint, block, held, num_experts, hidden_size, moe, parallel.fp8_block)

    def forward(self, x: Tensor, num_tokens: int | Tensor) -> Tensor:
        """`[T, hidden_size]` to the same shape; rows from `num_tokens` on are padding and visit no routed expert."""
        logits = self.gate.scores(to_float(x) if self.gate_dtype is torch.float32 else x)
        topk_weights, topk_ids = route(self.router, logits, num_tokens)
        if this_thread.recording is not None and self.kernel.all2all.traits.other_ranks:
            return this_thread.recording.live(self.kernel, x, topk_weights, topk_ids)
        return self.kernel(x, topk_weights, topk_ids)


def _parts(held: Sequence[int], num_experts: int) -> list[Part]:
    """The experts, in their order, as parts of a tensor of all experts: each run of consecutive ones is a part."""
    starts = [index for index, expert in enumerate(held) if not index or expert != held[index - 1] + 1]
    return [Part(held[start], stop - start, num_experts) for start, stop in pairwise([*starts, len(held)])]


def _load_transposed(
    checkpoint: Checkpoint, prefix: str, held: Sequence[Part], hidden_size: int, intermediate_size: int
) -> dict[str, Any]:
    """gpt-oss's tensors of all experts: weights `[experts, in, out]` and biases; gates and ups take turns."""
    columns = 2 * intermediate_size
    shapes = {
        "w13": ("gate_up_proj", (hidden_size, columns)),
        "w2": ("down_proj", (intermediate_size, hidden_size)),
        "b13": ("gate_up_proj_bias", (columns,)),
        "b2": ("down_proj_bias", (hidden_size,)),
    }
    return {key: _load_held(checkpoint, f"{prefix}.{name}", held, *shape) for key, (name, shape) in shapes.items()}


def _load_held(checkpoint: Checkpoint, name: str, held: Sequence[Part], *shape: int) -> Tensor:
    """These experts of a tensor of all experts."""
    return checkpoint.load_fused([(name, part) for part in held], *shape)


def _untransposed(weights: Mapping[str, Tensor], activation: ClampedSwiGLU) -> dict[str, Any]:
    """The tensors of `_load_transposed` in the layouts of `make_experts`, and the activation."""
    w13, w2, b13 = weights["w13"], weights["w2"], weights["b13"]
    experts, hidden_size, columns = w13.shape
    w13 = w13.view(experts, hidden_size, columns // 2, 2).permute(0, 3, 2, 1).reshape(experts, columns, hidden_size)
    b13 = b13.view(experts, columns // 2, 2).transpose(1, 2).reshape(experts, columns)
    w2 = w2.transpose(1, 2).contiguous()
    return {"w13": w13, "w2": w2, "b13": b13, "b2": weights["b2"], "activation": activation}


def _load_experts(
    checkpoint: Checkpoint,
    prefix: str,
    held: Sequence[int],
    num_experts: int,
    hidden_size: int,
    moe: MoEConfig,
    block: tuple[int, int] | None,
) -> dict[str, Any]:
    """`w13` `[experts held, 2 * intermediate, hidden]`, gate first, and `w2` `[experts held, hidden, intermediate]`.

    Experts that stay in fp8 come with their scales, and the dtype of their results.
    """
    names, intermediate_size = moe.names, moe.intermediate_size
    gate_up, down = names.stacked or ("experts.gate_up_proj", "experts.down_proj")
    if names.stacked or f"{prefix}.{gate_up}" in checkpoint.names:  # all experts in one tensor, in this layout
        parts = _parts(held, num_experts)
        w13 = _load_held(checkpoint, f"{prefix}.{gate_up}", parts, 2 * intermediate_size, hidden_size)
        return {"w13": w13, "w2": _load_held(checkpoint, f"{prefix}.{down}", parts, hidden_size, intermediate_size)}
    kinds = names.gate, names.up, names.down
    tensors = [tuple(f"{prefix}.experts.{expert}.{kind}.weight" for kind in kinds) for expert in held]
    if block is not None:
        fp8 = load_fp8_experts(checkpoint, tensors, block, hidden_size, intermediate_size)
        if fp8 is not None:
            return {**fp8, "dtype": checkpoint.dtype}
    dtype, device = checkpoint.dtype, checkpoint.device
    w13 = torch.empty(len(held), 2 * intermediate_size, hidden_size, dtype=dtype, device=device)
    w2 = torch.empty(len(held), hidden_size, intermediate_size, dtype=dtype, device=device)
    for own, first, second in zip(tensors, w13, w2, strict=True):
        for name, place in zip(own, (*first.chunk(2), second), strict=True):
            checkpoint.load_into(name, place)
    return {"w13": w13, "w2": w2}
