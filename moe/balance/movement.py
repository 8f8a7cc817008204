"""What a new placement moves: which slots' experts come from another rank, and the order of ranks that moves least.

That order is an assignment of greatest benefit, for many small problems at once (`assign`), found exactly by shortest
augmenting paths (Jonker and Volgenant's form of the Hungarian algorithm). All problems take their steps together, each
step a few operations of numpy on all of them; the loops are over rows, not over problems.
"""

import numpy as np
import numpy.typing as npt

from moe.placement import ExpertPlacement, Floats, Ints


def assign(benefit: Floats) -> Ints:
    """The column that each row gets, so that the sum of benefits is the greatest.

    Args:
        benefit: `[X, n, n]`: benefit of row and column, in each of X problems; whole numbers.

    Returns:
        `[X, n]`, in each problem a permutation.
    """
    cost = benefit.max(axis=(1, 2), keepdims=True) - benefit
    problems, n, _ = cost.shape
    every = np.arange(problems)
    of_column = cost.min(axis=1)  # the dual variables; cost - of_row - of_column is never negative
    of_row = (cost - of_column[:, None, :]).min(axis=2)
    column_of, row_of = np.full((problems, n), -1), np.full((problems, n), -1)
    for row in range(n):  # what needs no search
        free = (cost[:, row] - of_row[:, row, None] <= of_column) & (row_of < 0)
        column = free.argmax(axis=1)
        found = np.flatnonzero(free[every, column])
        column_of[found, row], row_of[found, column[found]] = column[found], row
    while len(left := np.flatnonzero((column_of < 0).any(axis=1))):
        start = (column_of[left] < 0).argmax(axis=1)
        _augment(cost, of_row, of_column, column_of, row_of, left, start)
    return column_of


def _augment(
    cost: Floats, of_row: Floats, of_column: Floats, column_of: Ints, row_of: Ints, problems: Ints, start: Ints
) -> None:
    """Give a column to one more row, `start`, in each of `problems`; other rows may change theirs."""
    count, n = len(problems), cost.shape[1]
    length, via = np.full((count, n), np.inf), np.zeros((count, n), dtype=np.int64)
    seen = np.zeros((count, n), dtype=bool)
    row, least, end = start.copy(), np.zeros(count), np.zeros(count, dtype=np.int64)
    going = np.arange(count)
    while len(going):
        of, at = problems[going], row[going]
        reached = least[going, None] + cost[of, at] - of_row[of, at, None] - of_column[of]
        shorter = (reached < length[going]) & ~seen[going]
        length[going] = np.where(shorter, reached, length[going])
        via[going] = np.where(shorter, at[:, None], via[going])
        nearest = length[going] + 0.5 * (row_of[of] >= 0)  # of equally near ones a free column, which ends the search
        column = np.where(seen[going], np.inf, nearest).argmin(axis=1)
        least[going], seen[going, column], end[going] = length[going, column], True, column
        row[going] = row_of[of, column]
        going = going[row[going] >= 0]
    slack = np.where(seen, least[:, None] - length, 0.0)
    of_column[problems] -= slack
    taken = row_of[problems]
    where, column = np.nonzero(seen & (taken >= 0))
    of_row[problems[where], taken[where, column]] += slack[where, column]
    of_row[problems, start] += least
    going, column = np.arange(count), end
    while len(going):
        of, at = problems[going], via[going, column]
        before = column_of[of, at]
        column_of[of, at], row_of[of, column] = column, at
        more = at != start[going]
        going, column = going[more], before[more]


_NEVER = -(2.0**20)
"""Benefit of what cannot be."""


def arrivals(before: ExpertPlacement, after: ExpertPlacement) -> npt.NDArray[np.bool_]:
    """`[L, R * S]`: the slots of `after` whose expert was in no slot of their rank in `before`: what has to travel."""
    layers, ranks = before.num_layers, before.num_ranks
    held = _presence(before.experts.reshape(layers, ranks, -1), before.num_experts)
    new = after.experts.reshape(layers, ranks, -1)
    return np.asarray(~np.take_along_axis(held, new, axis=2).reshape(layers, -1))


def least_movement(planned: Ints, before: ExpertPlacement, nodes: int) -> ExpertPlacement:
    """A placement with the planned sets of experts, each on the rank, and in the slots, where least has to move.

    Sets change places within their node, and whole nodes among themselves; only ranks with equally many experts do.
    The order is the best one (see `assign`). An expert that stays on its rank stays in its slot.

    Args:
        planned: `[L, R, S]`: a set of experts for each rank, `IDLE` last.
        before: the placement in force.
        nodes: nodes of the ranks; 1 if any set may go to any rank.
    """
    layers, ranks, _ = planned.shape
    old = before.experts.reshape(planned.shape)
    kept = _kept(planned, old, before.num_experts).reshape(layers, nodes, ranks // nodes, nodes, ranks // nodes)
    blocks = kept.swapaxes(2, 3)  # [L, nodes of planned, nodes of old, ranks of planned, ranks of old]
    flat = blocks.reshape(-1, ranks // nodes, ranks // nodes)
    within = assign(flat)
    value = np.take_along_axis(flat, within[..., None], axis=2).sum(axis=(1, 2)).reshape(layers, nodes, nodes)
    node_of = assign(value)  # [L, planned node] -> node
    within = within.reshape(layers, nodes, nodes, -1)
    rank_of = np.take_along_axis(within, node_of[:, :, None, None], axis=2)[:, :, 0] + node_of[..., None] * (
        ranks // nodes
    )
    moved = np.empty_like(planned)
    np.put_along_axis(moved, rank_of.reshape(layers, ranks, 1), planned, axis=1)
    experts = _in_their_slots(moved, old).reshape(layers, -1)
    return ExpertPlacement(experts, before.num_experts, before.num_ranks)


def _presence(experts: Ints, num_experts: int) -> npt.NDArray[np.bool_]:
    """`[L, R, E + 1]`: whether a rank has an expert; the last column is for `IDLE`, and true."""
    present = np.zeros((*experts.shape[:2], num_experts + 1), dtype=bool)
    np.put_along_axis(present, experts, True, axis=2)
    present[..., -1] = True
    return present


def _kept(planned: Ints, old: Ints, num_experts: int) -> Floats:
    """`[L, R, R]`: how many experts a planned set and a rank's old one share; `_NEVER` if their sizes differ."""
    new_has, old_has = (_presence(each, num_experts)[..., :-1].astype(np.float32) for each in (planned, old))
    shared = np.asarray(new_has @ old_has.swapaxes(1, 2), dtype=np.float64)
    new_size, old_size = ((each >= 0).sum(axis=2) for each in (planned, old))
    return np.where(new_size[:, :, None] == old_size[:, None, :], shared, _NEVER)


def _in_their_slots(new: Ints, old: Ints) -> Ints:
    """`[L, R, S]`: `new`, where every expert that its rank had stays in its slot and the others fill the rest."""
    same = (new[..., :, None] == old[..., None, :]) & (_times(new)[..., :, None] == _times(old)[..., None, :])
    comes, goes = ~same.any(axis=3), ~same.any(axis=2)
    coming = np.take_along_axis(new, np.argsort(~comes, axis=2, kind="stable"), axis=2)
    turn = np.maximum(goes.cumsum(axis=2) - 1, 0)
    return np.where(goes, np.take_along_axis(coming, turn, axis=2), old)


def _times(experts: Ints) -> Ints:
    """How often the same expert is in an earlier slot of its rank."""
    size = experts.shape[-1]
    same = experts[..., :, None] == experts[..., None, :]
    return np.asarray((same & np.tri(size, k=-1, dtype=bool)).sum(axis=-1))
