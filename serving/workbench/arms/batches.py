"""Synthetic batches: every request has its own random tokens, because the tokens determine the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attention import CommonAttentionMetadata
from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, Step, build_input_batch
from serving.workbench.arms.cells import Cell, Grid
from ubatch import ForwardMode


@contextmanager
def make_batch(runner: ModelRunner, cell: Cell, grid: Grid, seed: int) -> Iterator[Step]:
    """A batch of this cell, random by `seed`; its KV blocks are released at the end of the `with` block."""
    generator = torch.Generator().manual_seed(seed)
    shares: list[ScheduledRequest] = []
    try:
        for index, (cached, length, drafts) in enumerate(request_shapes(cell, grid)):
            size = cached + length + drafts
            tokens = torch.randint(0, runner.config.vocab_size, (size,), generator=generator).tolist()
            request = Request(index, tokens[: cached + length], SamplingParams(max_tokens=1))
            runner.admit(request, size)
            request.num_computed_tokens = cached
            shares.append(ScheduledRequest(request, length, tuple(tokens[cached + length :])))
        yield build_input_batch(shares, runner.request_table, runner.kv_cache.spec, runner.device)
    finally:
        for share in shares:
            runner.release(share.request)


def scattered_metadata(
    requests: int, query_len: int, seq_len: int, page: int, device: torch.device
) -> CommonAttentionMetadata:
    """Attention's metadata of requests of equal length, the new tokens included, whose pages of `page` tokens are
    scattered over a cache of just the size needed."""
    pages = -(-seq_len // page)
    table = torch.randperm(requests * pages, generator=torch.Generator().manual_seed(0)).view(requests, pages).int()
    places = torch.arange(seq_len - query_len, seq_len)
    slots = (table.long()[:, places // page] * page + places % page).flatten()
    mode = ForwardMode.DECODE if query_len == 1 else ForwardMode.PREFILL
    lengths = ([query_len] * requests, [seq_len] * requests)
    return CommonAttentionMetadata.build(*lengths, table.to(device), slots.to(device), mode)


def kv_blocks_needed(grid: Grid, block_size: int) -> int:
    """KV blocks per rank of the largest cell of a grid."""
    shapes = (request_shapes(cell, grid) for cell in grid.cells())
    return max(sum(-(-sum(shape) // block_size) for shape in of_cell) for of_cell in shapes)


def requests_needed(grid: Grid) -> int:
    """Requests of the cell with the most requests."""
    return max(len(request_shapes(cell, grid)) for cell in grid.cells())


def request_shapes(cell: Cell, grid: Grid) -> list[tuple[int, int, int]]:
    """For each request: tokens in the cache, tokens to run, and drafts."""
    if cell.mode == "decode":
        return [(grid.context, 1, 0)] * cell.tokens
    if cell.mode == "verify":
        return [(grid.context, 1, grid.drafts)] * (cell.tokens // (grid.drafts + 1))
    length = min(grid.prompt_len, max(1, cell.tokens // 2))
    whole, rest = divmod(cell.tokens, length)
    return [(0, length, 0)] * whole + ([(0, rest, 0)] if rest else [])
