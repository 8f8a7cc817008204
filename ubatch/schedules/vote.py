"""Whether the ranks overlap this step: a pure function of every rank's offer.

Ranks that share collectives must split alike: if one runs two lanes and another one, the first waits for a
transfer that the second never launches. So before each step every rank offers what it would do, all see all
offers, and all compute the same answer here. `CommGroup.vote` carries the offers; nothing in this file waits.

    every rank idle                                  -> no, all_idle
    lanes, schedule or mode differ                   -> no, and which
    somebody votes no                                -> no, with the first such rank's reason
    otherwise                                        -> yes

An idle rank votes yes and goes along with any mode, and with whatever schedule the others have for it: its lanes are
empty but pass every collective point. One lane is a yes, too, where the schedule has chunks or a signalled
combine (single-batch overlap).

A step that some rank has yet to prove (`ubatch.wrapping.proof`) is proved by all of them.

Whether the step replays a CUDA graph is agreed in the same vote, overlapped or not: all ranks replay, or all run it
eagerly. A rank without tokens goes along with any graph.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum

from ubatch.errors import ConfigError, SplitError

__all__ = [
    "MAX_LANES",
    "Decision",
    "DeclineReason",
    "Offer",
    "Wish",
    "decide",
    "decode_offer",
    "encode_offer",
    "fingerprint",
]


class Wish(IntEnum):
    """What a rank wants."""

    NO = 0
    YES = 1
    IDLE = 2


class DeclineReason(StrEnum):
    """Why a step ran unsplit. Every one is counted in `UBatchWrapper.statistics()` and exported."""

    DISABLED = "disabled"
    SERIAL_SCHEDULE = "serial_schedule"
    NOT_REQUESTED = "not_requested"
    BELOW_DECODE_THRESHOLD = "below_decode_threshold"
    BELOW_PREFILL_THRESHOLD = "below_prefill_threshold"
    LAST_UBATCH_EMPTY = "last_ubatch_empty"
    NO_BATCH = "no_batch"
    AMBIGUOUS_ARGUMENT = "ambiguous_argument"
    NO_SPLITTER = "no_splitter"
    ZERO_DIM_OUTPUT = "zero_dim_output"
    CANNOT_MERGE = "cannot_merge"
    DROPOUT_IN_TRAINING = "dropout_in_training"
    BATCH_NORM_IN_TRAINING = "batch_norm_in_training"
    ALL_IDLE = "all_idle"
    PEER_DECLINED = "peer_declined"
    LANES_DIFFER = "lanes_differ"
    SCHEDULES_DIFFER = "schedules_differ"
    MODES_DIFFER = "modes_differ"
    KV_ORDER = "kv_order"
    MODE_NOT_SPLIT = "mode_not_split"
    GRADIENTS = "gradients"
    ROWS_DEPEND = "rows_depend"
    MODULE_KEEPS_STATE = "module_keeps_state"
    DRAWS_RANDOM = "draws_random"
    ARGUMENTS_CHANGED = "arguments_changed"
    LANE_FAILED = "lane_failed"
    CANNOT_PROVE = "cannot_prove"
    SEQUENCE_FIRST = "sequence_first"
    JIT_MODULE = "jit_module"
    TENSOR_LAYOUT = "tensor_layout"
    FUNCTION_TRANSFORM = "function_transform"
    TORCH_MODE = "torch_mode"


_REASONS = tuple(DeclineReason)

MAX_LANES = 8
"""The vote carries a fixed number of lanes, so that ranks with different settings can still read each other."""
OFFER_WIDTH = 11 + MAX_LANES


@dataclass(frozen=True)
class Offer:
    """What one rank would do with its own tokens.

    Attributes:
        wish: yes, no, or idle.
        tokens: its tokens per lane; where it votes no, all of them in the first entry.
        lanes: how many lanes it is configured for, in this mode; ignored for an idle rank, as are
        schedule: fingerprint of the mode's schedule (`fingerprint`), and
        mode: the forward mode's fingerprint.
        reason: why it votes no.
        graph_mode: what this rank could replay, as a fingerprint of the graphs it has for such a step; 0 runs eagerly.
        again: the step has run in lanes, but this rank could not merge its outputs, and would repeat it unsplit.
        content: fingerprint of what it runs, where some ranks must run the same (tensor parallelism); else 0.
        unproved: the step would have to be proved first (`ubatch.wrapping.proof`).
        prefill_tokens: how many of its tokens are of prompts. This and the next are for whoever plans later steps.
        period_us: microseconds since its last vote; 0 if it had nothing to do meanwhile.

    Raises:
        ConfigError: an offer that contradicts itself, or more than `MAX_LANES` lanes.
    """

    wish: Wish
    tokens: tuple[int, ...]
    lanes: int
    reason: DeclineReason | None = None
    schedule: int = 0
    mode: int = 0
    graph_mode: int = 0
    again: bool = False
    content: int = 0
    unproved: bool = False
    prefill_tokens: int = 0
    period_us: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.lanes <= MAX_LANES:
            raise ConfigError(f"an offer has {self.lanes} lanes; it must have 1 to {MAX_LANES}.")
        entries = 1 if self.wish is Wish.NO else self.lanes
        if len(self.tokens) != entries or min(self.tokens) < 0:
            raise ConfigError(f"tokens {self.tokens} of a {self.wish.name} for {self.lanes} lanes must be {entries}.")
        if (self.wish is Wish.NO) != (self.reason is not None):
            raise ConfigError(f"a {self.wish.name} with reason {self.reason}: a NO has a reason, and only a NO.")
        if self.wish is Wish.IDLE and any(self.tokens):
            raise ConfigError(f"an idle rank has no tokens, but this one offers {self.tokens}.")


@dataclass(frozen=True)
class Decision:
    """What all ranks do.

    Attributes:
        engaged: whether the step overlaps.
        reason: why not, as seen from the rank that asked.
        declined_by: the first rank that said no, or None.
        tokens: `[rank][lane]` tokens when engaged, `[rank][0]` otherwise. Engaged in one lane: single-batch.
        graph_mode: the graphs that all ranks could replay, 0 where the step runs eagerly; see `Offer.graph_mode`.
        modes: the forward mode's fingerprint of every rank; that of a rank without tokens means nothing.
        schedule: the fingerprint of the schedule that they run when engaged, 0 otherwise.
        contents: of every rank, where any has one; see `Offer.content`.
        prove: engaged, but a rank has yet to prove the step, so all do.
        prefill_tokens: of every rank, those of its tokens that are of prompts.
        period_us: microseconds since the last vote, on the rank that took longest.
    """

    engaged: bool
    reason: DeclineReason | None
    declined_by: int | None
    tokens: tuple[tuple[int, ...], ...]
    graph_mode: int = 0
    modes: tuple[int, ...] = ()
    schedule: int = 0
    contents: tuple[int, ...] = ()
    prove: bool = False
    prefill_tokens: tuple[int, ...] = field(default=(), compare=False)
    period_us: int = field(default=0, compare=False)

    @property
    def num_lanes(self) -> int:
        """Lanes of the step; 1 if it is not split."""
        return len(self.tokens[0])

    @property
    def common_mode(self) -> int | None:
        """The mode's fingerprint of the first rank with tokens; all such ranks of an engaged step have the same."""
        busy = (mode for mode, row in zip(self.modes, self.tokens, strict=False) if any(row))
        return next(busy, None)

    def whole(self) -> Decision:
        """The same step, but every rank runs it unsplit."""
        tokens = tuple((sum(row),) for row in self.tokens)
        return replace(self, engaged=False, tokens=tokens, schedule=0, prove=False)

    def lane_tokens(self, lane: int) -> tuple[int, ...]:
        """Tokens of every rank in `lane`."""
        return tuple(row[lane] for row in self.tokens)


def fingerprint(text: str) -> int:
    """A 32-bit number that is the same on every rank for the same text."""
    return zlib.crc32(text.encode())


def decide(offers: Sequence[Offer], rank: int = 0) -> Decision:
    """The ranks' common answer.

    Args:
        offers: one per rank, in rank order.
        rank: the rank that asks; it sees its own reason, the others see `PEER_DECLINED`.

    Raises:
        SplitError: some ranks would repeat a step that the others have left behind.
    """
    again = [number for number, offer in enumerate(offers) if offer.again]
    if again and len(again) < len(offers):
        raise SplitError(
            f"ranks {again} could not merge the outputs of their lanes ({offers[again[0]].reason}), but the others "
            "could merge theirs and went on. Name the outputs in output_dims, or set enable_dbo=False."
        )
    reason, declined_by = _common_reason(offers)
    graph_mode, modes = _common_graph_mode(offers), tuple(offer.mode for offer in offers)
    contents = tuple(offer.content for offer in offers)
    contents = contents if any(contents) else ()
    prefill_tokens, period_us = tuple(offer.prefill_tokens for offer in offers), max(o.period_us for o in offers)
    if reason is None:
        busy = next(offer for offer in offers if offer.wish is Wish.YES)
        nothing = (0,) * busy.lanes
        tokens = tuple(nothing if offer.wish is Wish.IDLE else offer.tokens for offer in offers)
        prove = any(offer.unproved for offer in offers)
        return Decision(
            True, None, None, tokens, graph_mode, modes, busy.schedule, contents, prove, prefill_tokens, period_us
        )
    if declined_by is not None and offers[rank].wish is Wish.NO:
        reason = offers[rank].reason
    elif declined_by is not None:
        reason = DeclineReason.PEER_DECLINED
    totals = tuple((sum(offer.tokens),) for offer in offers)
    return Decision(
        False,
        reason,
        declined_by,
        totals,
        graph_mode,
        modes,
        contents=contents,
        prefill_tokens=prefill_tokens,
        period_us=period_us,
    )


def _common_graph_mode(offers: Sequence[Offer]) -> int:
    busy = {offer.graph_mode for offer in offers if any(offer.tokens)}
    return busy.pop() if len(busy) == 1 and all(offer.graph_mode for offer in offers) else 0


def _common_reason(offers: Sequence[Offer]) -> tuple[DeclineReason | None, int | None]:
    for rank, offer in enumerate(offers):
        if offer.wish is Wish.NO:
            return offer.reason, rank
    busy = [offer for offer in offers if offer.wish is Wish.YES]
    if not busy:
        return DeclineReason.ALL_IDLE, None
    for name, reason in (
        ("mode", DeclineReason.MODES_DIFFER),  # first: modes may have schedules of their own
        ("lanes", DeclineReason.LANES_DIFFER),
        ("schedule", DeclineReason.SCHEDULES_DIFFER),
    ):
        if len({getattr(offer, name) for offer in busy}) > 1:
            return reason, None
    return None, None


def encode_offer(offer: Offer) -> list[int]:
    """The offer as `OFFER_WIDTH` integers, for one small all-reduce."""
    reason = _REASONS.index(offer.reason) + 1 if offer.reason is not None else 0
    prints = [offer.schedule, offer.mode, offer.graph_mode, int(offer.again), offer.content, int(offer.unproved)]
    head = [int(offer.wish), offer.lanes, reason, *prints, offer.prefill_tokens, offer.period_us]
    return head + list(offer.tokens) + [0] * (OFFER_WIDTH - len(head) - len(offer.tokens))


def decode_offer(row: Sequence[int]) -> Offer:
    """The inverse of `encode_offer`."""
    wish, lanes, reason, schedule, mode, graph_mode, again, content, unproved, *others = (int(value) for value in row)
    prefill_tokens, period_us, *counts = others
    tokens = tuple(counts[: 1 if wish == Wish.NO else lanes])
    why = _REASONS[reason - 1] if reason else None
    told = bool(again), content, bool(unproved), prefill_tokens, period_us
    return Offer(Wish(wish), tokens, lanes, why, schedule, mode, graph_mode, *told)
