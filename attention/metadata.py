"""The metadata that attention needs about a batch of flattened tokens, and how it is cut into lanes.

A batch of `R` requests is one row of `T` tokens; request `r` owns the tokens `query_start_loc[r]` to
`query_start_loc[r + 1]`, which are the *last* ones of its `seq_lens[r]` tokens; everything before them is in the
KV cache already. The cut follows the lanes' token slices. A request may straddle a cut:

    request         |---- prefix ----|--- query tokens ---|        seq_len = prefix + query
    lane i                           |--------|                    its seq_len ends at the cut
    lane i + 1                                |-----------|        keeps the total; lane i's part is its prefix

so lane `i` must write its keys and values before lane `i + 1` reads them, in every layer.

In a batch that verifies drafted tokens (`SpecVerifyInput`) every request brings the same number of them, as a chain or
as a tree:

    draft tokens of request r     rows r * D to (r + 1) * D of the batch; row r * D is the tree's root
    custom mask of request r      D rows of (prefix + D) entries: true if draft i sees that token. Requests are
                                  flattened one after the other: r starts at sum((prefix_i + D) * D for i < r)
    retrieve_index[r, i]          the batch's row that holds node i of the request's tree; rebased in a lane
    retrieve_next_*[r, i]         node numbers within the request; not rebased in a lane

Source: EAGLE-2 (2024); the layout is SGLang's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ubatch import ConfigError, ForwardMode, SplitError, UBatchSlice
from ubatch.streams import to_device


@dataclass(frozen=True)
class SpecVerifyInput:
    """A verify step's metadata other than tokens and lengths. The speculative decoder fills it; it never changes.

    Attributes:
        num_draft_tokens: `D`, rows of every request.
        prefix_lens: tokens of each request in the cache before this step, on the host.
        draft_tokens: `[R * D]` int64.
        positions: `[R * D]` int64, each draft's position in its request; siblings share one.
        custom_mask: flat bool, see above; None is a chain, which needs only causal attention.
        retrieve_index: `[R, D]` int64, the batch's row of each tree node; -1 where the tree has fewer nodes.
        retrieve_next_token: `[R, D]` int64, the first child of a node, -1 for none.
        retrieve_next_sibling: `[R, D]` int64, the next sibling of a node, -1 for none.

    Raises:
        SplitError: the sizes contradict each other.
    """

    num_draft_tokens: int
    prefix_lens: tuple[int, ...]
    draft_tokens: Tensor
    positions: Tensor
    custom_mask: Tensor | None
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor

    def __post_init__(self) -> None:
        requests, drafts = len(self.prefix_lens), self.num_draft_tokens
        if drafts < 1:
            raise SplitError(f"a verify batch needs at least one draft token per request, not {drafts}.")
        expected: dict[str, tuple[int, ...]] = {
            "draft_tokens": (requests * drafts,),
            "positions": (requests * drafts,),
            "retrieve_index": (requests, drafts),
            "retrieve_next_token": (requests, drafts),
            "retrieve_next_sibling": (requests, drafts),
        }
        if self.custom_mask is not None:
            expected["custom_mask"] = (self.mask_offsets[-1],)
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise SplitError(
                    f"{name} of a verify batch of {requests} requests with {drafts} draft tokens must be "
                    f"{list(shape)}, not {list(found)}."
                )
        if self.custom_mask is not None and self.custom_mask.dtype != torch.bool:
            raise SplitError(f"custom_mask must be bool, not {self.custom_mask.dtype}.")

    @property
    def num_reqs(self) -> int:
        """Requests of this batch, or lane."""
        return len(self.prefix_lens)

    @property
    def mask_offsets(self) -> tuple[int, ...]:
        """Where each request's part of the custom mask starts, and the total at the end."""
        drafts = self.num_draft_tokens
        return (0, *accumulate((prefix + drafts) * drafts for prefix in self.prefix_lens))

    def mask_of(self, request: int) -> Tensor | None:
        """`[D, prefix + D]` bool, a view; None for a chain."""
        if self.custom_mask is None:
            return None
        start, stop = self.mask_offsets[request : request + 2]
        return self.custom_mask[start:stop].view(self.num_draft_tokens, -1)

    def split(self, requests: slice) -> SpecVerifyInput:
        """One lane's part. Its tensors are views, except the retrieve indices, which are rebased to rows of the lane.

        Args:
            requests: the lane's requests, `slice(start, stop)`.
        """
        drafts = self.num_draft_tokens
        rows = slice(requests.start * drafts, requests.stop * drafts)
        mask = self.custom_mask
        if mask is not None:
            offsets = self.mask_offsets
            mask = mask[offsets[requests.start] : offsets[requests.stop]]
        index = self.retrieve_index[requests]
        if requests.start:
            index = torch.where(index < 0, index, index - rows.start)
        return SpecVerifyInput(
            num_draft_tokens=drafts,
            prefix_lens=self.prefix_lens[requests],
            draft_tokens=self.draft_tokens[rows],
            positions=self.positions[rows],
            custom_mask=mask,
            retrieve_index=index,
            retrieve_next_token=self.retrieve_next_token[requests],
            retrieve_next_sibling=self.retrieve_next_sibling[requests],
        )


@dataclass(frozen=True)
class CommonAttentionMetadata:
    """The batch of one step or one lane, as every attention back end sees it. The runner fills it; it never changes.

    Attributes:
        query_start_loc: `[R + 1]` int32, where each request's tokens start; the last entry is `num_actual_tokens`.
        seq_lens: `[R]` int32, tokens of each request in the KV cache once this step has written its own.
        block_table: `[R, max_blocks]` int32, the KV blocks of each request; entries past its length are meaningless.
        slot_mapping: `[T]` int64, the slot of each token's key and value: `block * block_size + offset`, or -1 for
            padding, which is not stored. May be longer than `num_actual_tokens`; the rest is padding.
        query_start_loc_cpu: `query_start_loc` on the host.
        seq_lens_cpu: `seq_lens` on the host.
        num_reqs: `R`.
        num_actual_tokens: tokens without padding.
        max_query_len: most tokens of one request in this step; 0 for an empty batch.
        max_seq_len: longest of `seq_lens`; 0 for an empty batch.
        mode: the batch's forward mode; see `attention.modes`.
        spec_verify: drafts and their tree, in a target-verify batch only.
        state_slots: on the host, the slot of each request's recurrent states: its row of the request-to-token table;
            may be None for a model without linear attention.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    query_start_loc_cpu: tuple[int, ...]
    seq_lens_cpu: tuple[int, ...]
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    mode: ForwardMode = ForwardMode.PREFILL
    spec_verify: SpecVerifyInput | None = None
    state_slots: tuple[int, ...] | None = None

    @property
    def has_padding(self) -> bool:
        """Whether some tokens belong to no request."""
        return self.slot_mapping.shape[0] > self.num_actual_tokens

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: Tensor,
        slot_mapping: Tensor,
        mode: ForwardMode = ForwardMode.PREFILL,
        spec_verify: SpecVerifyInput | None = None,
        lengths: tuple[Tensor, Tensor] | None = None,
        state_slots: Sequence[int] | None = None,
    ) -> CommonAttentionMetadata:
        """Make the metadata from lengths on the host; its tensors are on `slot_mapping`'s device.

        Args:
            query_lens: tokens of each request in this step.
            seq_lens: each request's total tokens, those of this step included.
            block_table: `[R, max_blocks]` int32.
            slot_mapping: `[T]` int64.
            mode: the batch's forward mode.
            spec_verify: drafts and their tree, of a target-verify batch.
            lengths: `query_start_loc` and `seq_lens` if they are on the device already; else they are copied there.
            state_slots: of each request, for a model with linear attention.

        Raises:
            ConfigError: lengths, table and slots do not fit together.
            SplitError: `spec_verify` describes another batch.
        """
        _check_sizes(query_lens, seq_lens, block_table, slot_mapping)
        if spec_verify is not None:
            drafts = spec_verify.num_draft_tokens
            rows = [(drafts, prefix + drafts) for prefix in spec_verify.prefix_lens]
            if list(zip(query_lens, seq_lens, strict=True))[: len(rows)] != rows or any(query_lens[len(rows) :]):
                raise SplitError(
                    f"spec_verify has {len(rows)} requests of {drafts} drafts behind prefixes of "
                    f"{spec_verify.prefix_lens}; the batch has queries {list(query_lens)} of {list(seq_lens)} tokens."
                )
        starts = (0, *accumulate(query_lens))
        if lengths is None:
            host = [torch.tensor(values, dtype=torch.int32) for values in (starts, tuple(seq_lens))]
            on_device = to_device(host, slot_mapping.device)
            lengths = on_device[0], on_device[1]
        return cls(
            query_start_loc=lengths[0],
            seq_lens=lengths[1],
            block_table=block_table,
            slot_mapping=slot_mapping,
            query_start_loc_cpu=starts,
            seq_lens_cpu=tuple(seq_lens),
            num_reqs=len(query_lens),
            num_actual_tokens=starts[-1],
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            mode=mode,
            spec_verify=spec_verify,
            state_slots=None if state_slots is None else tuple(state_slots),
        )

    @property
    def has_tree(self) -> bool:
        """Whether the step verifies drafts with a mask of their own; a chain of drafts is causal and has none."""
        return self.spec_verify is not None and self.spec_verify.custom_mask is not None

    @property
    def query_lens_cpu(self) -> tuple[int, ...]:
        """Tokens of each request in this step, on the host."""
        starts = self.query_start_loc_cpu
        return tuple(stop - start for start, stop in pairwise(starts))


def _check_sizes(query_lens: Sequence[int], seq_lens: Sequence[int], block_table: Tensor, slot_mapping: Tensor) -> None:
    num_reqs, num_tokens = len(query_lens), sum(query_lens)
    if len(seq_lens) != num_reqs or block_table.shape[0] != num_reqs or slot_mapping.shape[0] < num_tokens:
        raise ConfigError(
            f"{num_reqs} query lengths of {num_tokens} tokens need as many sequence lengths and rows of the block "
            f"table, and a slot per token; there are {len(seq_lens)}, {block_table.shape[0]} and "
            f"{slot_mapping.shape[0]}."
        )
    for request, (query, seq) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if not 0 <= query <= seq:
            raise ConfigError(
                f"request {request} has {query} new tokens of {seq} in all; seq_lens count those of this step, too."
            )


@dataclass(frozen=True)
class _Lane:
    """One lane's lengths on the host, computed once."""

    requests: slice
    tokens: slice
    starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    cut: int
    """tokens of the lane's last request that belong to later lanes"""
    straddles: bool = False
    """whether its first or last request is cut"""


def _fields_of(whole: CommonAttentionMetadata, lane: _Lane) -> dict[str, Any]:
    """A lane's metadata, field by field. A field that is not here is an error, so that a new one cannot be
    forgotten."""
    requests, starts, seq_lens = lane.requests, lane.starts, lane.seq_lens
    return {
        "query_start_loc": _lane_starts(whole, lane),
        "seq_lens": _lane_seq_lens(whole, lane),
        "block_table": whole.block_table[requests],
        "slot_mapping": whole.slot_mapping[lane.tokens],
        "query_start_loc_cpu": starts,
        "seq_lens_cpu": seq_lens,
        "num_reqs": len(seq_lens),
        "num_actual_tokens": starts[-1],
        "max_query_len": max(map(int.__sub__, starts[1:], starts), default=0),
        "max_seq_len": max(seq_lens, default=0),
        "mode": whole.mode if starts[-1] else ForwardMode.IDLE,
        "spec_verify": None if whole.spec_verify is None else _lane_spec_verify(whole.spec_verify, lane),
        "state_slots": None if whole.state_slots is None else whole.state_slots[requests],
    }


def split_attn_metadata(
    slices: Sequence[UBatchSlice], metadata: CommonAttentionMetadata
) -> list[CommonAttentionMetadata]:
    """Cut a batch's metadata into one per lane. `block_table`, `slot_mapping` and uncut `seq_lens` are views.

    Args:
        slices: the lanes in token order; together they cover the batch. Lanes may be empty, and a request that
            straddles a cut is in the request slices of all lanes that hold a part of it.
        metadata: the whole batch's metadata.

    Raises:
        SplitError: the slices do not fit the batch or each other, or the metadata has a field without a rule.
    """
    lanes = [_fields_of(metadata, lane) for lane in _lanes(slices, metadata)]
    unknown = type(metadata).__dataclass_fields__.keys() - lanes[0].keys() if lanes else ()
    if unknown:
        raise SplitError(
            f"{type(metadata).__name__} has the field {min(unknown)!r}, and split_attn_metadata does not know how to "
            f"split it; add it there, or keep the field out of the metadata."
        )
    return [type(metadata)(**fields) for fields in lanes]


def _lanes(slices: Sequence[UBatchSlice], whole: CommonAttentionMetadata) -> list[_Lane]:
    lanes = []
    end = 0
    for index, piece in enumerate(slices):
        start, stop = piece.token_slice.start, piece.token_slice.stop
        if start != end or stop < start:
            raise SplitError(
                f"lane {index} holds tokens {start} to {stop}, but the lanes before it end at {end}: "
                f"slices must follow each other without gaps."
            )
        end = stop
        lanes.append(_lane(index, piece, whole))
    if end < whole.num_actual_tokens:
        raise SplitError(f"the slices cover {end} of {whole.num_actual_tokens} tokens; every token needs a lane.")
    return lanes


def _lane(index: int, piece: UBatchSlice, whole: CommonAttentionMetadata) -> _Lane:
    requests = slice(piece.request_slice.start, piece.request_slice.stop)
    tokens = slice(piece.token_slice.start, piece.token_slice.stop)
    # Padding at the end of the batch belongs to no request: the last lane's slots include it, its starts do not.
    start, stop = min(tokens.start, whole.num_actual_tokens), min(tokens.stop, whole.num_actual_tokens)
    edges = whole.query_start_loc_cpu[requests.start : requests.stop + 1]
    if requests.stop <= requests.start or not edges:
        if stop > start:
            raise SplitError(f"lane {index} holds tokens {start} to {stop} but no request.")
        return _Lane(slice(requests.start, requests.start), tokens, (0,), (), 0)
    if len(edges) != requests.stop - requests.start + 1 or not edges[0] <= start <= stop <= edges[-1]:
        raise SplitError(
            f"lane {index} holds tokens {start} to {stop}, which its requests {requests.start} to {requests.stop} "
            f"(tokens {edges[0]} to {edges[-1]} of {whole.num_reqs} requests) do not contain."
        )
    if (len(edges) > 2 and edges[1] < start) or (len(edges) > 2 and edges[-2] > stop):
        raise SplitError(
            f"lane {index} names requests {requests.start} to {requests.stop}, but its tokens {start} to {stop} lie "
            f"outside of some of them."
        )
    starts = (0, *[edge - start for edge in edges[1:-1]], stop - start)
    seq_lens = whole.seq_lens_cpu[requests]
    cut = edges[-1] - stop
    if cut:
        seq_lens = (*seq_lens[:-1], seq_lens[-1] - cut)
    return _Lane(requests, tokens, starts, seq_lens, cut, straddles=bool(cut) or start > edges[0])


def _lane_starts(whole: CommonAttentionMetadata, lane: _Lane) -> Tensor:
    if not lane.seq_lens:
        return whole.query_start_loc.new_zeros(1)
    # Computed on the device: copying the host's values would wait for the device.
    first = min(lane.tokens.start, whole.num_actual_tokens)
    edges = whole.query_start_loc[lane.requests.start : lane.requests.stop + 1]
    return (edges - first).clamp_(0, lane.starts[-1])


def _lane_seq_lens(whole: CommonAttentionMetadata, lane: _Lane) -> Tensor:
    seq_lens = whole.seq_lens[lane.requests]
    if lane.cut:
        seq_lens = seq_lens.clone()
        seq_lens[-1] -= lane.cut
    return seq_lens


def _lane_spec_verify(drafts: SpecVerifyInput, lane: _Lane) -> SpecVerifyInput | None:
    if not lane.starts[-1]:
        return None
    if lane.straddles:
        raise SplitError("a verify batch cannot be cut inside a request: its tree would be torn. Cut between requests.")
    last = min(lane.requests.stop, drafts.num_reqs)  # the requests after these are padding
    return drafts.split(slice(lane.requests.start, last))
