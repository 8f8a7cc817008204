"""What a rank would do with a call, and a step that is decided: what both doors to the lanes hand in.

UBatchWrapper.__call__      decides from a call's arguments, or from the caller's `ubatch_slices`
WrappedModule.run           a runner of this project, which has voted and knows its slices; it adds its own fields
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ubatch.calls.call_plan import Call, CallPlan, LaneParts
from ubatch.calls.merging import Rule
from ubatch.schedules.forward_context import ForwardContext, ForwardMode
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.split import UBatchSlice
from ubatch.schedules.vote import Decision, Offer
from ubatch.wrapping.proof_table import Signature

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


_NO_PARTS = LaneParts(CallPlan((), 0, 1, False, (), 0), {}, ())


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


@dataclass(frozen=True)
class Step:
    """One call of the wrapper after the decision."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    intent: Intent
    decision: Decision
    context: ForwardContext | None
