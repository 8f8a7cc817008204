"""The flattened batch of one step, built from the requests' state at that moment.

It stores everything that is needed after the launch, because the requests may change while the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from attention import (
    CacheSpec,
    CommonAttentionMetadata,
    KVCacheExhausted,
    RequestToTokenTable,
    SpecVerifyInput,
    reads_of_later_writes,
)
from model_runner.errors import RequestError
from model_runner.step.dp import BatchShape
from model_runner.step.draft_trees import DraftTrees, chain_of_drafts, drafts_per_request
from model_runner.step.logprobs import PromptSpan
from model_runner.step.request import PENDING_TOKEN, Request, ScheduledRequest
from ubatch import ForwardMode
from ubatch.streams.small_copies import to_device

__all__ = ["InputBatch", "build_input_batch"]


@dataclass(frozen=True)
class InputBatch:
    """The batch of one step, on the device.

    Attributes:
        scheduled: the requests' shares, in order.
        input_ids: `[T]` int64; `-(row + 1)` for a pending token, see `FutureMap`.
        positions: `[T]` int64, each token's position in its request; in a tree of drafts, the position if its path is
            accepted.
        metadata: for attention.
        shape: for the vote.
        logits_rows: `[S]` int64, indices of the sampled rows: the last token of every share that reaches the end of its
            request's tokens; in a verify batch all rows.
        future_places: `[S]` int64, row + 1 of the sampled requests; empty in a verify batch, whose tokens the host must
            read before the next step.
        lengths: tokens of every request when the batch was built.
        rows_per_share: number of `logits_rows` of each share.
        logits_rows_cpu: `logits_rows` on the host.
        future_owners: (request, index of the new token in it, row) of `future_places`.
        pending: (request, index of the token in it, row) of every pending token.
        prompt_spans: the parts of prompts in this step that need prompt log-probabilities.
    """

    scheduled: tuple[ScheduledRequest, ...]
    input_ids: Tensor
    positions: Tensor
    metadata: CommonAttentionMetadata
    shape: BatchShape
    logits_rows: Tensor
    future_places: Tensor
    lengths: tuple[int, ...]
    rows_per_share: tuple[int, ...]
    logits_rows_cpu: tuple[int, ...] = ()
    future_owners: tuple[tuple[Request, int, int], ...] = ()
    pending: tuple[tuple[Request, int, int], ...] = ()
    prompt_spans: tuple[PromptSpan, ...] = ()

    @property
    def mode(self) -> ForwardMode:
        """Decode, prefill, mixed, target-verify or idle."""
        return self.shape.mode

    @property
    def num_tokens(self) -> int:
        """Tokens of this step."""
        return self.metadata.num_actual_tokens

    @property
    def needed_rows(self) -> tuple[int, ...] | None:
        """Rows whose hidden states are read, if these are few; None for all. Prompts that are scored read theirs."""
        few = self.mode is not ForwardMode.DECODE and len(self.logits_rows_cpu) < self.num_tokens
        return self.logits_rows_cpu if few and not self.prompt_spans else None

    @property
    def sampled(self) -> tuple[Request, ...]:
        """The requests that get a token."""
        return tuple(share.request for share, rows in zip(self.scheduled, self.rows_per_share, strict=True) if rows)


def build_input_batch(
    scheduled: Sequence[ScheduledRequest],
    table: RequestToTokenTable,
    spec: CacheSpec,
    device: torch.device | str = "cpu",
    *,
    mask_chains: bool = False,
) -> InputBatch:
    """Flatten the requests' next tokens, and their drafts.

    Args:
        scheduled: the shares of this step; empty for an idle step.
        table: block table of every request.
        spec: spec of the KV cache.
        device: device of the tensors.
        mask_chains: also give chains of drafts a mask, because graphs that verify trees need one.

    Raises:
        RequestError: a share is empty or longer than the rest of its request; a request has no row; shares have
            different numbers of drafts; drafts are no tree, or follow a pending token.
        KVCacheExhausted: a request has too few blocks for its share.
    """
    shares, device = tuple(scheduled), torch.device(device)
    num_drafts = drafts_per_request(shares)
    rows = [_checked_row(share, table, spec) for share in shares]
    computed = [share.request.num_computed_tokens for share in shares]
    query_lens = [share.num_tokens + num_drafts for share in shares]
    seq_lens = list(map(int.__add__, computed, query_lens))
    starts = [0, *accumulate(query_lens)]
    mode = ForwardMode.TARGET_VERIFY if num_drafts else _mode(query_lens, computed)

    positions, slots = _places(table, rows, query_lens, computed)
    trees = None
    if num_drafts:
        trees = DraftTrees.of([share.parents for share in shares], num_drafts, chains=mask_chains)
    if trees is not None:
        positions = trees.positions(computed)
    pages = table.page_table(rows)
    ids, pending = _input_ids(shares, computed)
    lengths = [share.request.num_tokens for share in shares]
    owners: list[tuple[Request, int, int]] = []
    if num_drafts:
        rows_per_share = [num_drafts + 1] * len(shares)
        sampled_rows = list(range(starts[-1]))
    else:
        rows_per_share = [int(end == length) for end, length in zip(seq_lens, lengths, strict=True)]
        sampled_rows = [stop - 1 for stop, samples in zip(starts[1:], rows_per_share, strict=True) if samples]
        everyone = zip(shares, lengths, rows, rows_per_share, strict=True)
        owners = [(share.request, length, row) for share, length, row, samples in everyone if samples]

    future_places = [row + 1 for _, _, row in owners]
    host = [torch.tensor(values, dtype=torch.int64) for values in (ids, sampled_rows, future_places)]
    host += [torch.tensor(values, dtype=torch.int32) for values in (starts, seq_lens)]
    on_device = to_device((*host, positions, pages, slots), device)
    input_ids, logits_rows, places, query_start_loc, lens, positions, table_on_device, slots = on_device
    drafts: SpecVerifyInput | None = None
    if num_drafts:
        if trees is None:
            drafts = chain_of_drafts(num_drafts, computed, input_ids, positions)
        else:
            drafts = trees.verify_input(computed, input_ids, positions)
    metadata = CommonAttentionMetadata.build(
        query_lens, seq_lens, table_on_device, slots, mode, drafts, (query_start_loc, lens), rows
    )
    late_reads = partial(reads_of_later_writes, query_lens, seq_lens, pages, spec.block_size)
    return InputBatch(
        scheduled=shares,
        input_ids=input_ids,
        positions=positions,
        metadata=metadata,
        shape=BatchShape(query_lens, mode, computed, late_reads),
        logits_rows=logits_rows,
        future_places=places,
        lengths=tuple(lengths),
        rows_per_share=tuple(rows_per_share),
        logits_rows_cpu=tuple(sampled_rows),
        future_owners=tuple(owners),
        pending=pending,
        prompt_spans=_prompt_spans(shares, starts),
    )


def _places(
    table: RequestToTokenTable, rows: Sequence[int], query_lens: Sequence[int], computed: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Every token's position in its request, and its KV slot, `[T]` each."""
    row_of_request = torch.tensor(rows, dtype=torch.int64)
    done = torch.tensor(computed, dtype=torch.int64)
    num_tokens = sum(query_lens)
    if num_tokens == len(rows):  # one each
        return done, table.slots(row_of_request, done)
    lengths = torch.tensor(query_lens, dtype=torch.int64)
    owner = torch.repeat_interleave(lengths)
    positions = torch.arange(num_tokens) + (done - lengths.cumsum(0) + lengths)[owner]
    return positions, table.slots(row_of_request[owner], positions)


def _input_ids(
    shares: Sequence[ScheduledRequest], computed: Sequence[int]
) -> tuple[list[int], tuple[tuple[Request, int, int], ...]]:
    """The tokens of all shares, with `-(row + 1)` for pending ones; and the list of pending ones."""
    ids: list[int] = []
    pending = []
    for share, start in zip(shares, computed, strict=True):
        request = share.request
        if share.num_tokens == 1:
            ids.append(request.token_ids[start])
        else:
            ids += request.token_ids[start : start + share.num_tokens]
        if ids[-1] == PENDING_TOKEN and request.row is not None:
            if share.drafts:
                raise RequestError(f"request {request.request_id!r} has drafts behind a token that is not known yet.")
            ids[-1] = -(request.row + 1)
            pending.append((request, start + share.num_tokens - 1, request.row))
        ids += share.drafts
    return ids, tuple(pending)


def _prompt_spans(shares: Sequence[ScheduledRequest], starts: Sequence[int]) -> tuple[PromptSpan, ...]:
    spans = []
    for index, share in enumerate(shares):
        request = share.request
        if request.params.prompt_logprobs is None or request.num_computed_tokens >= request.num_prompt_tokens:
            continue
        start, end = request.num_computed_tokens, request.num_prompt_tokens
        stop = min(start + share.num_tokens, end)
        # If the prompt continues, one token more: this chunk's last row scores the next chunk's first token.
        targets = tuple(request.token_ids[start + 1 : min(stop + 1, end)])
        spans.append(PromptSpan(index, request, start, stop, starts[index], targets))
    return tuple(spans)


def _checked_row(share: ScheduledRequest, table: RequestToTokenTable, spec: CacheSpec) -> int:
    request = share.request
    if not 1 <= share.num_tokens <= request.num_uncomputed_tokens:
        raise RequestError(
            f"request {request.request_id!r}: {share.num_tokens} tokens were scheduled, "
            f"it has {request.num_uncomputed_tokens} to run."
        )
    if request.row is None:
        raise RequestError(f"request {request.request_id!r} has no row in the block table; admit it first.")
    needed = request.num_computed_tokens + share.num_tokens + len(share.drafts)
    held = len(table.blocks(request.row)) * spec.block_size
    if needed > held:
        raise KVCacheExhausted(
            f"request {request.request_id!r} has KV blocks for {held} tokens and needs {needed}; reserve them first."
        )
    return request.row


def _mode(query_lens: Sequence[int], computed: Sequence[int]) -> ForwardMode:
    """Decode: every request runs one token and has cached ones. Such a batch is split by request count."""
    decodes = [length == 1 and done > 0 for length, done in zip(query_lens, computed, strict=True)]
    if not decodes:
        return ForwardMode.IDLE
    if all(decodes):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(decodes) else ForwardMode.PREFILL
