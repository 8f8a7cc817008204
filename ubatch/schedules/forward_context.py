"""The forward context: data of a step beyond the model's arguments.

A serving engine sets one around each step; the wrapper sets one for every lane. It lives in a `ContextVar`, not
in a module global, because two lanes read it at once and must each see their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from ubatch.process.interrupts import changing
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.split import UBatchSlice
from ubatch.schedules.vote import Decision


class ForwardMode(StrEnum):
    """Kind of a step; it determines the threshold and the way to split."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"
    """at least one prefill together with decodes; counts as prefill for the thresholds"""
    IDLE = "idle"
    """no tokens on this rank; it only takes part in the others' collectives"""
    TARGET_VERIFY = "target_verify"
    """every request has the same number of draft tokens to verify; counts as decode for the thresholds"""
    DRAFT_EXTEND = "draft_extend"
    """the draft model processes the accepted tokens; never overlapped"""


@dataclass(frozen=True)
class ForwardContext:
    """Data of one step, or of one lane of it.

    Attributes:
        attn_metadata: the attention back end's plan for these tokens; the caller fills it.
        num_tokens: tokens of this context on this rank, without padding; see also `num_valid`.
        mode: what the step does.
        tokens_across_ranks: tokens of every rank in this context (for tensor-parallel ranks, each rank's share); None
            if the ranks did not vote.
        ubatch_slices: set by the caller if the step must overlap; the wrapper splits at these slices.
        lane_contexts: one context per slice; the caller fills it together with `ubatch_slices`.
        decision: the vote's result; filled by a caller that has voted, else the wrapper votes.
        schedule: schedule of an overlapped step, if the caller voted; None: the wrapper's schedule for the mode.
        num_valid: only in a captured step, where host numbers are frozen: the number of real tokens, as a 0-dim int64
            tensor on the device; `num_tokens` is then the number of captured rows. Else None.
        local_dp_buffer_len: rows of this context on this data-parallel rank: `num_tokens`, padded to a multiple of its
            tensor-parallel ranks. The caller fills this and the next two.
        global_dp_buffer_len: of all data-parallel ranks together.
        global_mode: common mode of all ranks that have tokens; None if they differ or no rank has tokens. An idle rank
            learns the others' mode from it.
        needed_rows: `[S]` int64 on the device, this rank's rows whose output is read; None for all rows. A model may
            leave the others out of what no later token reads: the last layer's MLP.
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
    needed_rows: Tensor | None = None


_forward_context: ContextVar[ForwardContext | None] = ContextVar("ubatch_forward_context", default=None)


get_forward_context: Callable[[], ForwardContext | None] = _forward_context.get
"""Returns the current forward context: the lane's own inside a lane, None outside any step."""


def set_forward_context(context: ForwardContext | None) -> AbstractContextManager[ForwardContext | None]:
    """Make `context` current for the `with` block; the previous one is restored even on error."""
    return changing(_forward_context, context)
