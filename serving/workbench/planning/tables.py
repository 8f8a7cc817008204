"""Interpolate published tables, which have few rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["interpolated"]


def interpolated(table: Mapping[int, float], at: float) -> float:
    """The value at `at`: linear in its logarithm between rows, the nearest row's value outside the table."""
    at = min(max(at, min(table)), max(table))
    below = max(row for row in table if row <= at)
    above = min(row for row in table if row >= at)
    if below == above:
        return table[below]
    part = math.log(at / below) / math.log(above / below)
    return table[below] + part * (table[above] - table[below])
