"""What a rank would do with one call, and how the call is cut: made before the vote, read by whoever runs the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ubatch.calls.call_plan import CallPlan, LaneParts
from ubatch.calls.merging import Rule
from ubatch.schedules.forward_context import ForwardMode
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.vote import Decision, Offer
from ubatch.wrapping.signature import Signature
from ubatch.wrapping.step import Call

__all__ = ["Intent"]

_NO_PARTS = LaneParts(CallPlan((), 0, 1, False, (), {}), {}, ())


@dataclass(frozen=True)
class Intent:
    """What this rank would do with one call.

    Attributes:
        mode: decode or prefill.
        plan: how the call would be split; None if it cannot be.
        why: a sentence that tells why it would run unsplit; else None.
        single: whether it would overlap unsplit: one lane, with chunks of experts.
        calls: the lanes' arguments, if it would overlap in lanes; else none.
        parts: the lanes' parts of the call's leaves.
        signature: the call's signature, if it needs a proof or has one.
        rule: how the outputs merge, if a proof has learned it.
        writes: paths of the arguments that the call writes to, if a proof has learned them.
    """

    offer: Offer
    schedule: Schedule
    mode: ForwardMode
    plan: CallPlan | None = None
    why: str | None = None
    single: bool = False
    calls: Sequence[Call] = ()
    parts: LaneParts = _NO_PARTS
    signature: Signature | None = None
    rule: Rule | None = None
    writes: frozenset[str] = frozenset()

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole call."""
        return sum(self.offer.tokens)

    def engages(self, decision: Decision) -> bool:
        """Whether the call overlaps, now that the ranks have decided."""
        return decision.engaged and (self.single or len(self.calls) > 0)
