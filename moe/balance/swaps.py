"""From sets of experts to better ones by few changes, for many problems at once: other replicas, and swaps."""

from __future__ import annotations

import numpy as np

from moe.placement import IDLE, Floats, Ints, count_replicas

_PARTNERS = 8
"""The least busy ranks that the busiest one may swap with."""
_LEAST_CHANGE = 1e-4
"""The least change of a swap, as a share of the busiest rank's square."""


def change_replicas(sets: Ints, share: Floats, replicas: Ints) -> Ints:
    """`[X, R, S]`: `sets`, with other replicas where an expert has more than it should get and another one fewer.

    An expert's replicas go from the busiest ranks first. New ones, those with the most tokens first, go to the least
    busy rank that has room and not the expert.

    Args:
        sets: `[X, R, S]`.
        share: `[X, E]`: tokens of each of an expert's replicas, once there are as many as there should be.
        replicas: `[X, E]`: replicas that each expert should get; in all as many as there are in `sets`.
    """
    problems, ranks, size = sets.shape
    experts = replicas.shape[1]
    every = np.arange(problems)
    flat = np.where(sets == IDLE, experts, sets).reshape(problems, ranks * size)
    padded = np.concatenate([share, np.zeros((problems, 1))], axis=1)
    tokens = padded[every[:, None], flat]
    load = tokens.reshape(sets.shape).sum(axis=2)
    order = np.lexsort((np.repeat(load, size, axis=1), flat), axis=1)
    in_order = np.take_along_axis(flat, order, axis=1)
    has = count_replicas(flat, experts + 1)
    before = has.cumsum(axis=1) - has
    turn = np.arange(ranks * size) - np.take_along_axis(before, in_order, axis=1)
    wanted = np.concatenate([replicas, np.full((problems, 1), ranks * size)], axis=1)  # idle slots stay idle
    vacant = np.zeros(flat.shape, dtype=bool)
    np.put_along_axis(vacant, order, turn >= np.take_along_axis(wanted, in_order, axis=1), axis=1)
    missing = np.maximum(replicas - has[:, :-1], 0)
    load -= np.where(vacant, tokens, 0.0).reshape(sets.shape).sum(axis=2)
    flat[vacant] = experts
    present = np.zeros((problems, ranks, experts + 1), dtype=bool)
    np.put_along_axis(present, flat.reshape(sets.shape), True, axis=2)
    for _ in range(int(missing.sum(axis=1).max(initial=0))):
        going = np.flatnonzero(missing.any(axis=1))
        expert = np.where(missing[going] > 0, share[going], -1.0).argmax(axis=1)
        room = vacant[going].reshape(-1, ranks, size)
        cost = np.where(room.any(axis=2), load[going], np.inf)
        cost += np.where(present[going, :, expert], load.sum() + 1.0, 0.0)
        rank = cost.argmin(axis=1)
        slot = rank * size + room[np.arange(len(going)), rank].argmax(axis=1)
        flat[going, slot], vacant[going, slot], present[going, rank, expert] = expert, False, True
        missing[going, expert] -= 1
        load[going, rank] += share[going, expert]
    return np.where(flat == experts, IDLE, flat).reshape(sets.shape)


def swap(sets: Ints, share: Floats, most: int) -> None:
    """Swap experts of each problem's busiest rank with those of less busy ones, as long as that evens out their load.

    Load is a vector, over windows, and even is what has the least sum of squares: over ranks, so that no rank has more
    than others on average, and over windows, so that experts that are busy at the same time lie on different ranks.
    For a swap of x on rank b for y on rank r, half the change of that sum is |x - y|^2 - (x - y)(b - r).

    Args:
        sets: `[X, R, S]`; changed in place.
        share: `[X, E, V]`: tokens of each of an expert's replicas, a vector.
        most: the most swaps of a problem.
    """
    problems, ranks, _ = sets.shape
    partners = min(_PARTNERS, ranks - 1)
    padded = np.concatenate([share, np.zeros((problems, 1, share.shape[2]))], axis=1)  # `IDLE` is the last one
    every = np.arange(problems)
    load = padded[every[:, None, None], sets].sum(axis=2)  # [X, R, V]
    square, squares = (load**2).sum(axis=2), (padded**2).sum(axis=2)
    present = np.zeros((problems, ranks, padded.shape[1]), dtype=bool)
    np.put_along_axis(present, sets, True, axis=2)
    present[..., IDLE] = True  # nothing is swapped with an idle slot
    going = every if partners else every[:0]
    for _ in range(most):
        if not len(going):
            return
        of = going[:, None]
        busy = square[going].argmax(axis=1)
        light = np.argpartition(square[going], partners - 1, axis=1)[:, :partners]
        mine, theirs = sets[going, busy], sets[of, light]  # [G, S] and [G, P, S]
        x, y = padded[of, mine], padded[of[..., None], theirs]  # [G, S, V] and [G, P, S, V]
        more = load[going, busy][:, None] - load[of, light]  # [G, P, V]
        of_x = squares[of, mine][..., None] - x @ more.swapaxes(1, 2)  # [G, S, P]
        of_y = squares[of[..., None], theirs] + (y @ more[..., None])[..., 0]  # [G, P, S]
        of_x[present[of[..., None], light[:, None], mine[..., None]]] = np.inf
        of_y[present[of[..., None], busy[:, None, None], theirs]] = np.inf
        change = (x @ y.reshape(len(going), -1, y.shape[3]).swapaxes(1, 2)).reshape(*of_x.shape, -1)  # [G, S, P, S]
        change *= -2.0
        change += of_x[..., None]
        change += of_y[:, None]
        best = (
            np.arange(len(going)),
            *np.unravel_index(change.reshape(len(going), -1).argmin(axis=1), change.shape[1:]),
        )
        better = change[best] < -_LEAST_CHANGE * square[going, busy]
        index, slot, partner, other = (each[better] for each in best)
        going, busy, rank = going[better], busy[better], light[index, partner]
        moved = x[index, slot] - y[index, partner, other]
        for at, gone, now in ((busy, slot, load[going, busy] - moved), (rank, other, load[going, rank] + moved)):
            present[going, at, sets[going, at, gone]] = False
            load[going, at], square[going, at] = now, (now**2).sum(axis=1)
        sets[going, busy, slot], sets[going, rank, other] = sets[going, rank, other], sets[going, busy, slot]
        for at in (busy, rank):
            present[going[:, None], at[:, None], sets[going, at]] = True
