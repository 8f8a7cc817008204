"""What a placement moves: no more than any other order of ranks would."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe.balance import arrivals
from moe.balance.movement import assign, least_movement
from moe.placement import IDLE, ExpertPlacement


@given(st.integers(1, 6), st.sampled_from([2, 4, 10]), st.integers(0, 999))
def test_an_assignment_has_the_greatest_benefit(n: int, most: int, seed: int) -> None:
    benefit = np.random.default_rng(seed).integers(0, most, (8, n, n)).astype(float)
    rows = np.arange(n)
    for one, columns in zip(benefit, assign(benefit), strict=True):
        assert sorted(columns) == rows.tolist()
        assert np.isclose(one[rows, columns].sum(), max(one[rows, list(order)].sum() for order in permutations(rows)))


@st.composite
def moves(draw: st.DrawFn) -> tuple[ExpertPlacement, ExpertPlacement, int]:
    """A placement in force, another one with as many experts on every rank, and nodes."""
    nodes, each = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]))
    experts, layers = draw(st.integers(1, 7)), draw(st.integers(1, 2))
    chance = np.random.default_rng(draw(st.integers(0, 999)))
    default = ExpertPlacement.default(layers, experts, nodes * each, draw(st.integers(0, 5)))
    shuffled = []
    for _ in range(2):
        slots = default.experts.copy()
        for layer in slots:
            layer[layer != IDLE] = chance.permutation(layer[layer != IDLE])
        shuffled.append(ExpertPlacement(slots, experts, nodes * each))
    return shuffled[0], shuffled[1], nodes


@given(moves())
def test_no_order_of_ranks_moves_less(move: tuple[ExpertPlacement, ExpertPlacement, int]) -> None:
    before, planned, nodes = move
    sets = planned.experts.reshape(planned.num_layers, planned.num_ranks, -1)
    after = least_movement(sets, before, nodes)
    for layer in range(before.num_layers):
        moved = {order: moved_experts(before, sets[layer, list(order)], layer) for order in orders(before, sets, nodes)}
        new = after.experts[layer].reshape(before.num_ranks, -1)
        taken = [order for order in moved if (np.sort(new) == np.sort(sets[layer, list(order)])).all()]
        assert min(moved[order] for order in taken) == min(moved.values())


def orders(before: ExpertPlacement, sets: np.ndarray, nodes: int) -> list[tuple[int, ...]]:
    """Every order in which nodes, and the ranks of each, have the planned sets; of sets that fit."""
    ranks = before.num_ranks
    each = ranks // nodes
    room = (before.experts[0].reshape(ranks, -1) != IDLE).sum(axis=1)
    size = (sets[0] != IDLE).sum(axis=1)
    found = []
    for order in permutations(range(ranks)):
        node_of = [[one // each for one in order[node * each : (node + 1) * each]] for node in range(nodes)]
        if all(len(set(node)) == 1 for node in node_of) and (size[list(order)] == room).all():
            found.append(order)
    return found


def moved_experts(before: ExpertPlacement, sets: np.ndarray, layer: int) -> int:
    """Experts that are on a rank and were not."""
    old = before.experts[layer].reshape(sets.shape)
    return sum(len(set(new.tolist()) - set(was.tolist())) for new, was in zip(sets, old, strict=True))


@given(moves())
def test_an_expert_that_stays_on_its_rank_stays_in_its_slot(move: tuple[ExpertPlacement, ExpertPlacement, int]) -> None:
    before, planned, nodes = move
    after = least_movement(planned.experts.reshape(planned.num_layers, planned.num_ranks, -1), before, nodes)
    travels = arrivals(before, after)
    for layer in range(before.num_layers):
        for rank in range(before.num_ranks):
            own = slice(rank * before.slots_per_rank, (rank + 1) * before.slots_per_rank)
            old, new, arrives = before.experts[layer, own], after.experts[layer, own], travels[layer, own]
            assert [expert not in old for expert in new] == arrives.tolist()
            for expert in set(new.tolist()) & set(old.tolist()):
                both = min((new == expert).sum(), (old == expert).sum())
                assert ((new == expert) & (old == expert)).sum() == both


def test_nothing_moves_to_the_same_sets_on_other_ranks() -> None:
    before = ExpertPlacement.default(3, 12, 4, 4)
    sets = before.experts.reshape(3, 4, -1)[:, [2, 0, 3, 1], ::-1]
    assert least_movement(sets, before, 1) == before
