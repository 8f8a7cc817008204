"""Which rank holds which expert (contiguous ranges of equal size, in rank order), and which block an expert is in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ubatch import ConfigError


def local_experts(num_experts: int, rank: int, num_ranks: int) -> range:
    """The global ids of the experts that `rank` holds.

    Args:
        num_experts: routed experts of the layer.
        rank: the rank's place in the expert-parallel group.
        num_ranks: the group's size.

    Raises:
        ConfigError: the experts do not divide by the ranks, or there is no such rank.
    """
    if num_ranks < 1 or not 0 <= rank < num_ranks:
        raise ConfigError(f"rank {rank} is not one of {num_ranks} ranks.")
    if num_experts < 1 or num_experts % num_ranks:
        divisors = [n for n in range(1, max(num_experts, 1) + 1) if num_experts % n == 0]
        raise ConfigError(
            f"{num_experts} experts do not divide by {num_ranks} ranks. "
            f"Use an expert-parallel size that divides them: {', '.join(map(str, divisors)) or 'none'}."
        )
    each = num_experts // num_ranks
    return range(rank * each, (rank + 1) * each)


def block_of(slots: Tensor, blocks: Sequence[range]) -> Tensor:
    """The index of each expert's block, in the shape and dtype of `slots`; undefined for slots outside of all blocks.

    Args:
        slots: indices among a rank's experts.
        blocks: all of the rank's experts, in order.
    """
    block = torch.zeros_like(slots)
    for each in blocks[1:]:
        block += slots >= each.start
    return block
