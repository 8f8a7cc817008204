"""The published algorithm of expert load balance, in plain loops: what the planner is compared with.

After the description of https://github.com/deepseek-ai/EPLB: one layer at a time; equally many slots on every rank, and
no regard to where experts are now.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe import ExpertPlacement
from moe.balance import Floats


def published_placement(loads: Floats, slots: int, ranks: int) -> ExpertPlacement:
    """The placement of `[L, E]` loads in so many slots."""
    experts = [[expert for rank in one_layer(list(layer), slots, ranks) for expert in rank] for layer in loads]
    return ExpertPlacement(np.array(experts), loads.shape[1], ranks)


def one_layer(loads: Sequence[float], slots: int, ranks: int) -> list[list[int]]:
    """The experts of each rank."""
    experts = [*range(len(loads))]
    while len(experts) < slots:
        experts.append(max(range(len(loads)), key=lambda each: loads[each] / experts.count(each)))
    shares = [loads[each] / experts.count(each) for each in experts]
    return [[experts[index] for index in rank] for rank in packed(shares, ranks)]


def packed(weights: Sequence[float], packs: int) -> list[list[int]]:
    """The items of each pack: the heaviest first, to the lightest pack that has room; equally many in each."""
    items: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda each: -weights[each]):
        open_ones = [pack for pack in range(packs) if len(items[pack]) < len(weights) // packs]
        pack = min(open_ones, key=total.__getitem__)
        items[pack].append(item)
        total[pack] += weights[item]
    return items
