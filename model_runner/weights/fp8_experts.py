"""Routed experts that stay in fp8: the weights and scales of a layer, stacked as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.weights.scaled import FP8
from model_runner.weights.weights import Checkpoint

__all__ = ["load_fp8_experts"]


def load_fp8_experts(
    checkpoint: Checkpoint,
    names: Sequence[Sequence[str]],
    block: tuple[int, int],
    hidden_size: int,
    intermediate_size: int,
) -> dict[str, Tensor] | None:
    """The weights of a layer's experts as they are stored, as arguments of `moe.make_experts`.

    Args:
        names: gate, up and down projection of each expert held here.
        block: rows and columns that share a scale; they divide both sizes.

    Returns:
        `w13` `[experts, 2 * intermediate, hidden]`, gate first, and `w2` `[experts, hidden, intermediate]` in fp8, and
        `w13_scale` and `w2_scale` with one float32 per block. None if some of these weights are stored in another way.
    """
    if not checkpoint.has_blocks([name for expert in names for name in expert], block):
        return None

    def stack(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        device = checkpoint.device
        weights = torch.empty(len(names), rows, columns, dtype=FP8, device=device)
        return weights, torch.empty(len(names), rows // block[0], columns // block[1], device=device)

    w13, w13_scale = stack(2 * intermediate_size, hidden_size)
    w2, w2_scale = stack(hidden_size, intermediate_size)
    for expert, (gate, up, down) in enumerate(names):
        for name, half, scales in zip((gate, up), w13[expert].chunk(2), w13_scale[expert].chunk(2), strict=True):
            checkpoint.load_blocks_into(name, half, scales)
        checkpoint.load_blocks_into(down, w2[expert], w2_scale[expert])
    return {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": w2_scale}
