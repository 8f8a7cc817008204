"""What a rank would do with one call, and how the call is cut: made before the vote, read by whoever runs the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ubatch.calls.call_plan import CallPlan, LaneParts
from ubatch.calls.merging import Rule
from ubatch.schedules.forward_context import ForwardMode
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import Decision, Offer
from ubatch.wrapping.signature import Signature

__all__ = ["CutCall", "Intent"]


@dataclass(frozen=True)
class CutCall:
    """A call, split into lanes.

    Attributes:
        bounds: row range of every lane.
        parts: the lanes' parts of the call's leaves.
        rule: how the outputs merge, if a proof has learned it.
        writes: paths of the arguments that the call writes to, if a proof has learned them.
    """

    plan: CallPlan
    bounds: tuple[slice, ...]
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    parts: LaneParts
    rule: Rule | None = None
    writes: frozenset[str] = frozenset()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of every lane."""
        return tuple((rows.stop - rows.start) * self.plan.tokens_per_row for rows in self.bounds)


@dataclass(frozen=True)
class Intent:
    """What this rank would do with one call.

    Attributes:
        why: a sentence that tells why it would run unsplit; else None.
        cut: the split call, if it would overlap in lanes.
        single: whether it would overlap unsplit: one lane, with chunks of experts.
        mode: decode or prefill.
        plan: how the call would be split; None if it cannot be.
        signature: the call's signature, if it needs a proof or has one.
    """

    offer: Offer
    why: str | None
    schedule: Schedule
    cut: CutCall | None
    mode: ForwardMode
    num_tokens: int
    plan: CallPlan | None = None
    single: bool = False
    signature: Signature | None = None

    def engages(self, decision: Decision) -> bool:
        """Whether the call overlaps, now that the ranks have decided."""
        return decision.engaged and (self.single or self.cut is not None)
