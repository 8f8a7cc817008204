"""How many replicas each expert gets, and a set of experts for every rank, for many problems at once.

DeepSeek's algorithm (https://github.com/deepseek-ai/EPLB), which knows no ranks with different room, and may put an
expert on a rank twice. Loops are over replicas, not over problems; a problem is a layer, or a node of a layer.
"""

from __future__ import annotations

import numpy as np

from moe.placement import IDLE, Floats, Ints


def replicate(tokens: Floats, room: Ints) -> Ints:
    """`[X, E]`: replicas of each expert; all together fill the room.

    Args:
        tokens: `[X, E]` in each of X problems.
        room: `[X, R]`: experts that each rank holds.
    """
    problems, experts = tokens.shape
    rows = np.arange(problems)
    slots = room.sum(axis=1)
    most = np.maximum(room.shape[1], -(-slots // experts))  # more are twice on a rank
    # Experts without tokens share what is left over, rather than all of it going to the first one.
    weight = tokens + np.maximum(tokens.sum(axis=1, keepdims=True), 1.0) * 1e-9
    replicas, share = np.ones((problems, experts), dtype=np.int64), weight.copy()
    for given in range(experts, int(slots.max(initial=0))):
        expert = share.argmax(axis=1)
        replicas[rows, expert] += given < slots
        count = replicas[rows, expert]
        share[rows, expert] = np.where(count < most, weight[rows, expert] / count, 0.0)
    return replicas


def pack(share: Floats, replicas: Ints, room: Ints, width: int) -> Ints:
    """`[X, R, width]`: the experts of every rank, `IDLE` behind them.

    Args:
        share: `[X, E]`: tokens of each of an expert's replicas.
        replicas: `[X, E]`.
        room: `[X, R]`: experts that each rank holds; in all as many as there are replicas.
    """
    problems, ranks = room.shape
    order = np.argsort(-share, axis=1, kind="stable")
    counts = np.take_along_axis(replicas, order, axis=1)
    slots = counts.sum(axis=1)
    queue = np.full((problems, int(slots.max())), IDLE)
    queue[np.arange(queue.shape[1]) < slots[:, None]] = np.repeat(order.ravel(), counts.ravel())
    weights = np.where(queue == IDLE, 0.0, np.take_along_axis(share, np.maximum(queue, 0), axis=1))
    again = queue[:, 1:] == queue[:, :-1]
    twice = share.sum() + 1.0  # dearer than any load, cheaper than a full rank, whose load is infinite
    load, has_it = np.where(room > 0, 0.0, np.inf), np.zeros((problems, ranks))
    left, flat_load, flat_has_it = room.flatten(), load.ravel(), has_it.ravel()
    sets = np.full((problems * ranks, width + 1), IDLE)  # one column more: where a full rank writes `IDLE`
    first = np.arange(problems) * ranks
    for turn, expert in enumerate(queue.T):
        if turn:
            has_it *= again[:, turn - 1, None]
        at = first + (load + has_it).argmin(axis=1)
        room_left = left[at]
        sets[at, room_left - 1] = expert
        left[at] = room_left - (expert != IDLE)
        flat_load[at] += np.where(room_left > 1, weights[:, turn], np.inf)
        flat_has_it[at] = twice
    sets = sets.reshape(problems, ranks, -1)[..., :width]
    separate(sets, share)
    return sets


def separate(sets: Ints, share: Floats) -> None:
    """Swap experts that a rank has twice, because only it had room left, for others of nearly the same load."""
    ordered = np.sort(sets, axis=2)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != IDLE)).any(axis=2)
    for row, rank in np.argwhere(twice):
        _separate_rank(sets[row], share[row], rank)


def _separate_rank(sets: Ints, share: Floats, rank: int) -> None:
    """The same for one rank of one problem. `sets` is `[R, S]`, `share` `[E]`."""
    own = sets[rank]
    for slot in range(1, len(own)):
        expert = own[slot]
        if expert == IDLE or expert not in own[:slot]:
            continue
        without = ~(sets == expert).any(axis=1)
        partners = without[:, None] & (sets != IDLE) & ~np.isin(sets, own)
        if partners.any():
            cost = np.where(partners, np.abs(share[np.maximum(sets, 0)] - share[expert]), np.inf)
            other = np.unravel_index(cost.argmin(), cost.shape)
            own[slot], sets[other] = sets[other], expert
