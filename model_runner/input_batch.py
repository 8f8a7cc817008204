"""Requests, and the flattened batch that one step runs.

A request's tokens are prompt and output in one list. `num_computed_tokens` of them are in the KV cache; a step takes
the next ones: a whole prompt, a chunk of it, or the one token that was generated last. Where a step reaches the end of
the list, the next token is sampled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from attention import (
    CacheSpec,
    CommonAttentionMetadata,
    KVCacheExhausted,
    RequestToTokenTable,
    reads_of_later_writes,
)
from model_runner.dp import BatchShape
from model_runner.errors import RequestError
from model_runner.sampler import SamplingParams
from ubatch import ForwardMode

__all__ = ["InputBatch", "Request", "ScheduledRequest", "build_input_batch"]


@dataclass(eq=False)
class Request:
    """One sequence while it is generated. The scheduler owns it; the runner only reads it.

    Attributes:
        request_id: what errors call it.
        token_ids: prompt, then output so far.
        params: how to generate.
        num_prompt_tokens: how many of `token_ids` are the prompt.
        num_computed_tokens: how many of them are in the KV cache.
        row: its row of the block table; None while it waits.
        generator: its own random numbers.
    """

    request_id: int | str
    token_ids: list[int]
    params: SamplingParams
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    row: int | None = None
    generator: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.generator = random.Random(self.params.seed)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that the next steps must run; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def advance(self, num_tokens: int, token: int | None) -> None:
        """A step ran `num_tokens` of it and, at the end of the list, sampled `token`."""
        self.num_computed_tokens += num_tokens
        if token is not None:
            self.token_ids.append(token)


@dataclass(frozen=True)
class ScheduledRequest:
    """A request's share of one step: its next `num_tokens` tokens."""

    request: Request
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the request's tokens, so that one is sampled."""
        return self.num_tokens == self.request.num_uncomputed_tokens


@dataclass(frozen=True)
class InputBatch:
    """What one step runs, on the device.

    Attributes:
        scheduled: the requests' shares, in order.
        input_ids: `[T]` int64.
        positions: `[T]` int64, each token's place in its request.
        metadata: for attention.
        shape: for the vote.
        logits_rows: `[S]` int64, the last token of every share that samples.
    """

    scheduled: tuple[ScheduledRequest, ...]
    input_ids: Tensor
    positions: Tensor
    metadata: CommonAttentionMetadata
    shape: BatchShape
    logits_rows: Tensor

    @property
    def mode(self) -> ForwardMode:
        """Decode, prefill, mixed or idle."""
        return self.shape.mode

    @property
    def num_tokens(self) -> int:
        """Tokens of this step."""
        return self.metadata.num_actual_tokens

    @property
    def sampled(self) -> tuple[Request, ...]:
        """The requests of `logits_rows`."""
        return tuple(share.request for share in self.scheduled if share.samples)


def build_input_batch(
    scheduled: Sequence[ScheduledRequest],
    table: RequestToTokenTable,
    spec: CacheSpec,
    device: torch.device | str = "cpu",
) -> InputBatch:
    """Flatten the requests' next tokens.

    Args:
        scheduled: the shares of this step; none at all is an idle step.
        table: has every request's blocks.
        spec: of the KV cache.
        device: where the tensors go.

    Raises:
        RequestError: a share is empty, or longer than what is left of its request, or the request has no row.
        KVCacheExhausted: a request has not enough blocks for its share.
    """
    for share in scheduled:
        _check(share, table, spec)
    shares = tuple(scheduled)
    query_lens = [share.num_tokens for share in shares]
    computed = [share.request.num_computed_tokens for share in shares]
    starts = [0, *accumulate(query_lens)]
    input_ids: list[int] = []
    for share, start in zip(shares, computed, strict=True):
        input_ids += share.request.token_ids[start : start + share.num_tokens]

    rows = [share.request.row for share in shares if share.request.row is not None]
    request_of_token = torch.repeat_interleave(torch.tensor(query_lens, dtype=torch.int64))
    shift = torch.tensor([done - start for done, start in zip(computed, starts, strict=False)], dtype=torch.int64)
    positions = torch.arange(starts[-1]) + shift[request_of_token]
    slots = table.slots(torch.tensor(rows, dtype=torch.int64)[request_of_token], positions)
    pages = table.page_table(rows)
    seq_lens = [done + length for done, length in zip(computed, query_lens, strict=True)]
    mode = _mode(shares)
    late_reads = reads_of_later_writes(query_lens, seq_lens, pages, spec.block_size)
    sampled_rows = [stop - 1 for share, stop in zip(shares, starts[1:], strict=True) if share.samples]
    return InputBatch(
        scheduled=shares,
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        positions=positions.to(device),
        metadata=CommonAttentionMetadata.build(query_lens, seq_lens, pages.to(device), slots.to(device), mode),
        shape=BatchShape(query_lens, mode, computed, late_reads),
        logits_rows=torch.tensor(sampled_rows, dtype=torch.int64, device=device),
    )


def _check(share: ScheduledRequest, table: RequestToTokenTable, spec: CacheSpec) -> None:
    request = share.request
    if not 1 <= share.num_tokens <= request.num_uncomputed_tokens:
        raise RequestError(
            f"request {request.request_id!r}: {share.num_tokens} tokens were scheduled, "
            f"it has {request.num_uncomputed_tokens} to run."
        )
    if request.row is None:
        raise RequestError(f"request {request.request_id!r} has no row in the block table; admit it first.")
    needed, held = request.num_computed_tokens + share.num_tokens, len(table.blocks(request.row)) * spec.block_size
    if needed > held:
        raise KVCacheExhausted(
            f"request {request.request_id!r} has KV blocks for {held} tokens and needs {needed}; reserve them first."
        )


def _mode(shares: Sequence[ScheduledRequest]) -> ForwardMode:
    """Decode: every request adds one token to what it has cached. Such a batch splits by request count."""
    decodes = [share.num_tokens == 1 and share.request.num_computed_tokens > 0 for share in shares]
    if not decodes:
        return ForwardMode.IDLE
    if all(decodes):
        return ForwardMode.DECODE
    return ForwardMode.MIXED if any(decodes) else ForwardMode.PREFILL
