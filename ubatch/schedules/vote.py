"""Whether the ranks overlap this step: a pure function of every rank's offer.

Ranks that share collectives must split alike: if one rank runs two lanes and another runs one, the first waits for a
transfer that the second never launches. So before each step every rank makes an offer, all ranks see all offers, and
all compute the same decision here. `CommGroup.vote` exchanges the offers; nothing in this file waits.

    every rank idle                                  -> no, all_idle
    lanes, schedule or mode differ                   -> no; the reason says which
    a rank votes no                                -> no, with the first such rank's reason
    otherwise                                        -> yes

An idle rank votes yes and takes part in any mode and schedule of the others: its lanes are empty but pass every
collective point. One lane also counts as yes if the schedule has chunks or a signalled combine (single-batch overlap).

If one rank still has to prove a step (`ubatch.wrapping.proof`), all ranks prove it.

The same vote decides whether the step replays a CUDA graph, overlapped or not: all ranks replay, or all run it eagerly.
A rank without tokens accepts any graph.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import lru_cache

from ubatch.errors import ConfigError, SplitError


class Wish(IntEnum):
    """A rank's vote."""

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
    CONCURRENT_CALL = "concurrent_call"
    NO_GAIN_EXPECTED = "no_gain_expected"


_REASONS = tuple(DeclineReason)

MAX_LANES = 8
"""A vote has a fixed number of lane entries, so that ranks with different settings can decode each other's."""
TOLD_WIDTH = 28
"""Entries of a vote for what a rank tells the others."""
OFFER_WIDTH = 13 + MAX_LANES + TOLD_WIDTH


@dataclass(frozen=True)
class Offer:
    """One rank's proposal for its own tokens.

    Attributes:
        wish: yes, no, or idle.
        tokens: its tokens per lane; if it votes no, all of them in the first entry.
        lanes: its configured number of lanes in this mode. Ignored for an idle rank, as are the next two.
        schedule: fingerprint of the mode's schedule (`fingerprint`).
        mode: fingerprint of the forward mode.
        reason: why it votes no.
        graph_mode: fingerprint of the graphs that this rank could replay for such a step; 0: it runs eagerly.
        again: the step has run in lanes, but this rank could not merge its outputs, or its lanes did what their proof
            had not shown, and wants to repeat it unsplit.
        content: fingerprint of the rank's work, if some ranks must run the same (tensor parallelism); else 0.
        unproved: the step must be proved first (`ubatch.wrapping.proof`).
        prefill_tokens: how many of its tokens belong to prompts. This and the next are used to plan later steps.
        period_us: microseconds since its last vote; 0 if it was idle meanwhile.
        moving: how far a change that all ranks make before the same step has come on this rank; the vote only carries
            it. 0 if there is none.
        told: integers for the other ranks, at most `TOLD_WIDTH`.

    Raises:
        ConfigError: an offer that contradicts itself, more than `MAX_LANES` lanes, or more than `TOLD_WIDTH` integers.
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
    moving: int = 0
    told: tuple[int, ...] = ()

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
        if len(self.told) > TOLD_WIDTH:
            raise ConfigError(f"an offer has room for {TOLD_WIDTH} told integers, not {len(self.told)}.")


@dataclass(frozen=True)
class Decision:
    """The common decision of all ranks.

    Attributes:
        engaged: whether the step overlaps.
        reason: why it does not overlap, as seen from the rank that asked.
        declined_by: the first rank that voted no, or None.
        tokens: `[rank][lane]` tokens when engaged, `[rank][0]` otherwise. Engaged in one lane: single-batch.
        graph_mode: fingerprint of the graphs that all ranks could replay, 0 if the step runs eagerly.
        modes: fingerprint of every rank's forward mode; invalid for a rank without tokens.
        schedule: fingerprint of the schedule if engaged, else 0.
        contents: every rank's `Offer.content`, if any rank has one.
        prove: whether all ranks prove the step, because one still has to. Only if engaged.
        prefill_tokens: every rank's `Offer.prefill_tokens`.
        period_us: microseconds since the last vote, the largest of all ranks.
        moving: every rank's `Offer.moving`.
        told: every rank's `Offer.told`.
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
    moving: tuple[int, ...] = field(default=(), compare=False)
    told: tuple[tuple[int, ...], ...] = field(default=(), compare=False)

    @property
    def num_lanes(self) -> int:
        """Lanes of the step; 1 if it is not split."""
        return len(self.tokens[0])

    @property
    def common_mode(self) -> int | None:
        """Mode fingerprint of the first rank with tokens; in an engaged step all ranks with tokens have the same."""
        busy = [mode for mode, row in zip(self.modes, self.tokens, strict=False) if any(row)]
        return busy[0] if busy else None

    def whole(self) -> Decision:
        """This decision, changed so that every rank runs the step unsplit."""
        tokens = tuple((sum(row),) for row in self.tokens)
        return replace(self, engaged=False, tokens=tokens, schedule=0, prove=False)

    def lane_tokens(self, lane: int) -> tuple[int, ...]:
        """Tokens of every rank in `lane`."""
        return tuple([row[lane] for row in self.tokens])


@lru_cache(256)
def fingerprint(text: str) -> int:
    """A 32-bit hash of `text`, equal on every rank."""
    return zlib.crc32(text.encode())


def decide(offers: Sequence[Offer], rank: int = 0) -> Decision:
    """The ranks' common decision.

    Args:
        offers: one per rank, in rank order.
        rank: the rank that asks. It gets its own reason; for a no of another rank it gets `PEER_DECLINED`.

    Raises:
        SplitError: some ranks want to repeat a step that the others have completed.
    """
    again = [number for number, offer in enumerate(offers) if offer.again]
    if again and len(again) < len(offers):
        raise SplitError(
            f"ranks {again} could not merge the outputs of their lanes, or found them unlike in their proof "
            f"({offers[again[0]].reason}), but the others went on with theirs. Name the outputs in output_dims if that "
            "is the reason, or set enable_dbo=False."
        )
    reason, declined_by = _common_reason(offers)
    contents = tuple([offer.content for offer in offers])
    prove, schedule = False, 0
    tokens: tuple[tuple[int, ...], ...] = tuple([(sum(offer.tokens),) for offer in offers])
    if reason is None:
        busy = [offer for offer in offers if offer.wish is Wish.YES]
        schedule, nothing = busy[0].schedule, (0,) * busy[0].lanes
        tokens = tuple([nothing if offer.wish is Wish.IDLE else offer.tokens for offer in offers])
        prove = True in [offer.unproved for offer in offers]
    elif declined_by is not None:
        reason = offers[rank].reason or DeclineReason.PEER_DECLINED
    return Decision(
        engaged=reason is None,
        reason=reason,
        declined_by=declined_by,
        tokens=tokens,
        graph_mode=_common_graph_mode(offers),
        modes=tuple([offer.mode for offer in offers]),
        schedule=schedule,
        contents=contents if any(contents) else (),
        prove=prove,
        prefill_tokens=tuple([offer.prefill_tokens for offer in offers]),
        period_us=max([offer.period_us for offer in offers]),
        moving=tuple([offer.moving for offer in offers]),
        told=tuple([offer.told for offer in offers]),
    )


def _common_graph_mode(offers: Sequence[Offer]) -> int:
    if 0 in [offer.graph_mode for offer in offers]:
        return 0
    busy = {offer.graph_mode for offer in offers if any(offer.tokens)}
    return busy.pop() if len(busy) == 1 else 0


def _common_reason(offers: Sequence[Offer]) -> tuple[DeclineReason | None, int | None]:
    for rank, offer in enumerate(offers):
        if offer.wish is Wish.NO:
            return offer.reason, rank
    busy = [offer for offer in offers if offer.wish is Wish.YES]
    if not busy:
        return DeclineReason.ALL_IDLE, None
    if len({offer.mode for offer in busy}) > 1:  # checked first, because modes may have different schedules
        return DeclineReason.MODES_DIFFER, None
    if len({offer.lanes for offer in busy}) > 1:
        return DeclineReason.LANES_DIFFER, None
    if len({offer.schedule for offer in busy}) > 1:
        return DeclineReason.SCHEDULES_DIFFER, None
    return None, None


def encode_offer(offer: Offer) -> list[int]:
    """The offer as `OFFER_WIDTH` integers, for one small all-gather."""
    reason = _REASONS.index(offer.reason) + 1 if offer.reason is not None else 0
    prints = [offer.schedule, offer.mode, offer.graph_mode, int(offer.again), offer.content, int(offer.unproved)]
    head = [int(offer.wish), offer.lanes, reason, *prints, offer.prefill_tokens, offer.period_us, offer.moving]
    head.append(len(offer.told))
    return head + _padded(offer.tokens, MAX_LANES) + _padded(offer.told, TOLD_WIDTH)


def decode_offer(row: Sequence[int]) -> Offer:
    """The inverse of `encode_offer`."""
    wish, lanes, reason, schedule, mode, graph_mode, again, content, unproved, *others = map(int, row)
    prefill_tokens, period_us, moving, told_width, *counts = others
    tokens = tuple(counts[: 1 if wish == Wish.NO else lanes])
    why = _REASONS[reason - 1] if reason else None
    told = tuple(counts[MAX_LANES : MAX_LANES + told_width])
    rest = bool(again), content, bool(unproved), prefill_tokens, period_us, moving, told
    return Offer(Wish(wish), tokens, lanes, why, schedule, mode, graph_mode, *rest)


def _padded(values: Sequence[int], width: int) -> list[int]:
    return [*values, *(0,) * (width - len(values))]
