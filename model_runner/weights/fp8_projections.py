"""Projections that stay in fp8: the weight and scales of a linear layer, or of several that are one product."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner.weights.scaled import FP8
from model_runner.weights.weights import Checkpoint, Part, Size, part_size

__all__ = ["load_fp8_projection", "log_projections"]

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
        _logger.info(
            "%d of %d projections of the layers stay in fp8; the others are loaded as %s: a part of them is stored in "
            "another way, or blocks of %s do not divide it",
            kept,
            kept + others,
            checkpoint.dtype,
            checkpoint.projection_block,
        )


def _at_borders(rows: Sequence[Size], columns: Size, block: tuple[int, int]) -> bool:
    cuts = [(size, block[0]) for size in (*rows[:-1], *(size for size in rows[-1:] if isinstance(size, Part)))]
    return not any(
        size.start % length or size.size % length if isinstance(size, Part) else size % length
        for size, length in (*cuts, (columns, block[1]))
    )
