"""The forward context: what a step knows beside the model's arguments.

A serving engine sets one around each step; the wrapper sets one for every lane. It lives in a `ContextVar`, not
in a module global, because two lanes read it at once and must each see their own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from ubatch.process.interrupts import changing
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.split import UBatchSlice
from ubatch.schedules.vote import Decision

__all__ = ["ForwardContext", "ForwardMode", "get_forward_context", "set_forward_context"]


class ForwardMode(StrEnum):
    """What a step does; it chooses the threshold and the way to split."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    """at least one prefill beside decodes; counts as prefill for the thresholds"""
    IDLE = "idle"
    """no tokens on this rank; it only takes part in the others' collectives"""
    TARGET_VERIFY = "target_verify"
    """every request brings the same number of drafted tokens to be checked; counts as decode for the thresholds"""
    DRAFT_EXTEND = "draft_extend"
    """the draft model takes in the tokens that were accepted; never overlapped"""


@dataclass(frozen=True)
class ForwardContext:
    """What one step, or one lane of it, knows.

    Attributes:
        attn_metadata: the attention back end's plan for these tokens; the caller fills it.
        num_tokens: tokens of this context on this rank, without padding; see also `num_valid`.
        mode: what the step does.
        tokens_across_ranks: tokens of every rank in this context, of tensor-parallel ranks each one's share; None when
            the ranks did not vote.
        ubatch_slices: set by the caller when the step shall overlap; the wrapper splits along it.
        lane_contexts: one context per slice; the caller fills it together with `ubatch_slices`.
        decision: the vote's result; the caller fills it when it voted, else the wrapper votes.
        schedule: what an overlapped step runs, where the caller voted; None is the wrapper's own for the mode.
        num_valid: in a captured step, where numbers of the host are frozen, `num_tokens` counts the rows it was
            captured for, and this one the tokens among them: 0-dim int64 on the device. Else None.
        local_dp_buffer_len: rows of this context on this data-parallel rank: `num_tokens`, padded to a multiple of its
            tensor-parallel ranks; the caller fills it, as the next two.
        global_dp_buffer_len: of all data-parallel ranks together.
        global_mode: what the ranks with tokens do; None where they do different things, or there is none. An idle
            rank learns from it what it takes part in.
    """

    attn_metadata: object | None = None
    num_tokens: int = 0
    mode: ForwardMode = ForwardMode.PREFILL
    tokens_across_ranks: tuple[int, ...] | None = None
    ubatch_slices: tuple[UBatchSlice, ...] | None = None
    lane_contexts: tuple[ForwardContext, ...] | None = None
    decision: Decision | None = None
    num_valid: Tensor | None = None
    schedule: Schedule | None = None
    local_dp_buffer_len: int | None = None
    global_dp_buffer_len: int | None = None
    global_mode: ForwardMode | None = None


_forward_context: ContextVar[ForwardContext | None] = ContextVar("ubatch_forward_context", default=None)


def get_forward_context() -> ForwardContext | None:
    """The current forward context: the lane's own inside a lane, None outside any step."""
    return _forward_context.get()


def set_forward_context(context: ForwardContext | None) -> AbstractContextManager[ForwardContext | None]:
    """Make `context` current for the `with` block; the previous one is restored even on error."""
    return changing(_forward_context, context)
