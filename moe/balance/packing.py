"""How many replicas each expert gets, and a set of experts for every rank, for many problems at once.

DeepSeek's algorithm (https://github.com/deepseek-ai/EPLB), which knows no ranks with different room, and may put an
expert on a rank twice. Loops are over replicas, not over problems; a problem is a layer, or a node of a layer.

`change_replicas` and `swap` make better sets of given ones by few changes.
"""

import numpy as np

from moe.placement import IDLE, Floats, Ints, count_replicas


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
