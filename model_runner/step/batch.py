"""A step's tokens, flattened, on the host and on the device: built from the requests' state at that moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from model_runner.step.draft_trees import DraftTrees, chain_of_drafts, drafts_per_request
from model_runner.step.logprobs import PromptSpan
from model_runner.step.request import PENDING_TOKEN, Request, ScheduledRequest
from model_runner.step.step import Step
from ubatch import ForwardMode
from ubatch.streams import to_device


def build_input_batch(
    scheduled: Step | Sequence[ScheduledRequest],
    table: RequestToTokenTable,
    spec: CacheSpec,
    device: torch.device | str = "cpu",
    *,
    mask_chains: bool = False,
) -> Step:
    """Flatten the requests' next tokens, and their drafts; returns the step with its batch.

    Args:
        scheduled: a step, or its shares; without shares it is idle.
        table: block table of every request.
        spec: spec of the KV cache.
        device: device of the tensors.
        mask_chains: also give chains of drafts a mask, because graphs that verify trees need one.

    Raises:
        RequestError: a share is empty or longer than the rest of its request; a request has no row; shares have
            different numbers of drafts; drafts are no tree, or follow a pending token.
        KVCacheExhausted: a request has too few blocks for its share.
    """
    step, device = scheduled if isinstance(scheduled, Step) else Step.of(scheduled), torch.device(device)
    shares, query_lens, computed = step.shares, step.query_lens, step.prefix_lens
    num_drafts = 0 if step.mode is not ForwardMode.TARGET_VERIFY else drafts_per_request(shares)
    seq_lens = list(map(int.__add__, computed, query_lens))
    rows = _checked_rows(step, seq_lens, table)
    starts = [0, *accumulate(query_lens)]

    positions, slots = _places(table, rows, query_lens, computed)
    trees = None
    if num_drafts:
        trees = DraftTrees.of([share.parents for share in shares], num_drafts, chains=mask_chains)
    if trees is not None:
        positions = trees.positions(computed)
    pages = table.page_table(rows)
    ids, pending = _input_ids(shares, computed)
    lengths = [len(share.request.token_ids) for share in shares]
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

    def late_reads() -> Sequence[tuple[int, int]]:
        if not table.writes_shared(rows, computed, seq_lens):
            return ()
        return reads_of_later_writes(query_lens, seq_lens, pages, spec.block_size)

    return replace(
        step,
        input_ids=input_ids,
        positions=positions,
        metadata=CommonAttentionMetadata.build(
            query_lens, seq_lens, table_on_device, slots, step.mode, drafts, (query_start_loc, lens), rows
        ),
        logits_rows=logits_rows,
        future_places=places,
        lengths=tuple(lengths),
        rows_per_share=tuple(rows_per_share),
        logits_rows_cpu=tuple(sampled_rows),
        future_owners=tuple(owners),
        pending=pending,
        prompt_spans=_prompt_spans(shares, starts),
        late_reads=late_reads,
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


def _checked_rows(step: Step, seq_lens: Sequence[int], table: RequestToTokenTable) -> list[int]:
    """The row of each request, which has blocks for its share."""
    rows = []
    for share, computed in zip(step.shares, step.prefix_lens, strict=True):
        request = share.request
        if not 1 <= share.num_tokens <= len(request.token_ids) - computed:
            raise RequestError(
                f"request {request.request_id!r}: {share.num_tokens} tokens were scheduled, "
                f"it has {request.num_uncomputed_tokens} to run."
            )
        if request.row is None:
            raise RequestError(f"request {request.request_id!r} has no row in the block table; admit it first.")
        rows.append(request.row)
    for share, needed, room in zip(step.shares, seq_lens, table.room(rows), strict=True):
        if needed > room:
            raise KVCacheExhausted(
                f"request {share.request.request_id!r} has KV blocks for {room} tokens and needs {needed}; reserve "
                "them first."
            )
    return rows
