"""Stage times of a share of a batch, and how near a time line comes to the bound of its work."""

from dataclasses import fields, replace
from typing import Any, TypeVar

from ubatch.schedules import LayerTimes, Timeline

T = TypeVar("T", bound=LayerTimes)


def scaled(times: T, factor: float) -> T:
    """All times multiplied by `factor`."""
    parts: dict[str, Any] = {field.name: getattr(times, field.name) * factor for field in fields(LayerTimes)}
    return replace(times, **parts)


def bound_of(line: Timeline) -> float:
    """Seconds that no schedule of the same work can be faster than."""
    return max(line.compute_s, line.communication_s)


def efficiency_of(line: Timeline) -> float:
    """The bound over the time, 1.0 at best."""
    return bound_of(line) / line.seconds
