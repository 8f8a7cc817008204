"""Weights that stay in fp8, with their scales: linear layers, several that are one product, and routed experts. And the
static scales of quantised checkpoints for an fp8 KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from attention import KVCache, MLAKVCache
from model_runner.errors import CheckpointError
from model_runner.weights.quantization import FP8
from model_runner.weights.weights import Checkpoint, Part, Size, part_size
from ubatch.errors import shown

_logger = logging.getLogger(__name__)


def load_fp8_projection(
    checkpoint: Checkpoint, tensors: Sequence[tuple[str, Size]], columns: Size
) -> tuple[Tensor, Tensor] | None:
    """The weight of a projection as it is stored: several tensors stacked along dimension 0.

    Args:
        tensors: (name, rows) of each, in order; all rows, or a part.
        columns: their columns; all, or a part.

    Returns:
        `[rows, columns]` in fp8, and one float32 for every block of `Checkpoint.projection_block`; the last block of
        rows may be smaller. None if projections are to be dequantised, if a tensor is stored in another way, or if
        the blocks do not divide it: every tensor and part must begin and end at a block's border, but the last may
        end where its whole tensor ends.
    """
    block = checkpoint.projection_block
    if block is None:
        return None
    kept = _at_borders([rows for _, rows in tensors], columns, block)
    kept = kept and checkpoint.has_blocks([name for name, _ in tensors], block)
    checkpoint.projections[kept] += 1
    if not kept:
        return None
    rows, width, device = [part_size(size) for _, size in tensors], part_size(columns), checkpoint.device
    blocks = [-(-count // block[0]) for count in rows]
    weight = torch.empty(sum(rows), width, dtype=FP8, device=device)
    scales = torch.empty(sum(blocks), width // block[1], device=device)
    for (name, size), out, of_out in zip(tensors, weight.split(rows), scales.split(blocks), strict=True):
        checkpoint.load_blocks_into(name, out, of_out, size, columns)
    return weight, scales


def log_projections(checkpoint: Checkpoint) -> None:
    """Log how many projections of a loaded model stay in fp8."""
    kept, others = checkpoint.projections[True], checkpoint.projections[False]
    if kept and not others:
        _logger.info("all %d projections of the layers stay in fp8", kept)
    elif others:
        message = (
            "%d of %d projections of the layers stay in fp8; the others are loaded as %s: a part of them is stored in "
            "another way, or blocks of %s do not divide it"
        )
        _logger.info(message, kept, kept + others, checkpoint.dtype, checkpoint.projection_block)


def _at_borders(rows: Sequence[Size], columns: Size, block: tuple[int, int]) -> bool:
    cuts = [(size, block[0]) for size in (*rows[:-1], *(size for size in rows[-1:] if isinstance(size, Part)))]
    return not any(
        size.start % length or size.size % length if isinstance(size, Part) else size % length
        for size, length in (*cuts, (columns, block[1]))
    )


def load_fp8_experts(
    checkpoint: Checkpoint, names: Sequence[Sequence[str]], block: tuple[int, int], hidden_size: int, width: int
) -> dict[str, Tensor] | None:
    """The weights of a layer's experts as they are stored, as arguments of `moe.make_experts`.

    Args:
        names: gate, up and down projection of each expert held here.
        block: rows and columns that share a scale; they divide both sizes.
        width: intermediate size of an expert.

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

    w13, w13_scale = stack(2 * width, hidden_size)
    w2, w2_scale = stack(hidden_size, width)
    for expert, (gate, up, down) in enumerate(names):
        for name, half, scales in zip((gate, up), w13[expert].chunk(2), w13_scale[expert].chunk(2), strict=True):
            checkpoint.load_blocks_into(name, half, scales)
        checkpoint.load_blocks_into(down, w2[expert], w2_scale[expert])
    return {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": w2_scale}


_ENDINGS = ("k_scale", "v_scale", "kv_scale")


def load_kv_scales(checkpoint: Checkpoint, cache: KVCache) -> None:
    """Set every layer's scales of an fp8 cache from `self_attn.k_scale` and `self_attn.v_scale`; 1 if there are none.

    Raises:
        CheckpointError: a layer has only one of the two, or the checkpoint has KV scales of another name.
    """
    known = set()
    if not isinstance(cache, MLAKVCache):
        for layer in range(cache.spec.num_layers):
            names = [f"model.layers.{layer}.self_attn.{part}_scale" for part in ("k", "v")]
            present = [name for name in names if name in checkpoint.names]
            if len(present) == 1:
                raise CheckpointError(f"{checkpoint.path} has {present[0]!r}, but not the other of {names}.")
            if present:
                k_scale, v_scale = map(checkpoint.load_scalar, names)
                cache.set_scales(layer, k_scale, v_scale)
            known.update(present)
    strange = sorted(name for name in checkpoint.names - known if name.endswith(_ENDINGS))
    if strange:
        raise CheckpointError(
            f"{checkpoint.path} has the KV scale {shown(strange[0])}, which is not understood here. Run it with "
            "kv_cache_dtype='auto'."
        )
