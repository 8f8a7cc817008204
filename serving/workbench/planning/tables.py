"""Published tables have few rows; what lies between them is read off a straight line over the logarithm."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["interpolated"]


def interpolated(table: Mapping[int, float], at: float) -> float:
    """Linear in the logarithm of `at` between rows, the nearest row's value beyond them."""
    at = min(max(at, min(table)), max(table))
    below = max(row for row in table if row <= at)
    above = min(row for row in table if row >= at)
    if below == above:
        return table[below]
    part = math.log(at / below) / math.log(above / below)
    return table[below] + part * (table[above] - table[below])
