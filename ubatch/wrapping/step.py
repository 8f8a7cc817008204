"""A step that is decided: what both doors to the lanes hand in.

UBatchWrapper.__call__      decides from a call's arguments, or from the caller's `ubatch_slices`
WrappedModule.run           a runner of this project, which has voted and knows its slices; it adds its own fields
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ubatch.schedules.forward_context import ForwardContext, ForwardMode
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.split import UBatchSlice
from ubatch.schedules.vote import Decision

__all__ = ["Call", "DecidedStep"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

_LATER: Any = None
"""The value of a field that is filled later."""


@dataclass(frozen=True, kw_only=True)
class DecidedStep:
    """What runs, and how.

    Attributes:
        mode: what the step does on this rank.
        decision: the ranks' decision, with every rank's tokens.
        slices: this rank's part of the batch in every lane; None if the step is not split, or was cut otherwise.
        schedule: of a step that overlaps; else None.
        calls: the module's arguments in every lane; only one if the step is not split.
        contexts: the forward context of each of `calls`.
    """

    mode: ForwardMode
    decision: Decision = _LATER
    slices: tuple[UBatchSlice, ...] | None = None
    schedule: Schedule | None = None
    calls: Sequence[Call] = ()
    contexts: Sequence[ForwardContext] = ()
