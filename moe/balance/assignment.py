"""The assignment of greatest benefit, for many small problems at once.

Shortest augmenting paths (Jonker and Volgenant's form of the Hungarian algorithm): exact. All problems take their steps
together, each step a few operations of numpy on all of them; the loops are over rows, not over problems.
"""

from __future__ import annotations

import numpy as np

from moe.placement import Floats, Ints


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
