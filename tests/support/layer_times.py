"""Stage times of a share of a batch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from ubatch.schedules.layer_program import LayerTimes

T = TypeVar("T", bound=LayerTimes)


def scaled(times: T, factor: float) -> T:
    """All times multiplied by `factor`."""
    parts: dict[str, Any] = {field.name: getattr(times, field.name) * factor for field in fields(LayerTimes)}
    return replace(times, **parts)
