"""Placements at random, for tests."""

import numpy as np

from moe import ExpertPlacement
from moe.placement import slots_per_rank


def random_placement(num_layers: int, num_experts: int, num_ranks: int, redundant: int, seed: int) -> ExpertPlacement:
    """Every expert somewhere; replicas, also on one rank, and idle slots where there is room for more."""
    rng = np.random.default_rng(seed)
    each = slots_per_rank(num_experts, num_ranks, redundant)
    more = num_ranks * each - num_experts
    rows = []
    for _ in range(num_layers):
        held = [*range(num_experts), *rng.integers(0, num_experts, redundant), *[-1] * (more - redundant)]
        slots = rng.permutation(held).reshape(num_ranks, each)
        rows.append([expert for rank in slots for expert in sorted(rank, key=lambda expert: expert < 0)])
    return ExpertPlacement(np.array(rows), num_experts, num_ranks)
