"""The `torch` back end: batched scaled-dot-product attention, on the CPU and wherever torch runs.

A step's requests are sorted into groups that are each one call:

    fresh    nothing in the cache yet: attend over the new keys and values themselves, causally, without a mask.
             Equal lengths that lie side by side (a batch of prompts) are views, ragged ones are padded.
    decode   one new token: gather the request's blocks, fold the query heads of a group into rows (so that grouped
             heads never need their keys repeated), one mask for the different lengths.
    extend   several new tokens behind a prefix: gather, and a causal mask shifted by the prefix.

Groups are formed so that padding costs little, and gathering groups so that their keys and values still lie in the
processor's cache when attention reads them: gathering 64 x 512 tokens in one go is a third slower than in groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.backends.base import AttentionShape
from attention.kv_cache import PagedKVCache
from attention.metadata import CommonAttentionMetadata

__all__ = ["TorchAttentionBackend", "TorchAttentionPlan"]

_MAX_PADDING = 0.25  # of a group's work; more starts a new group
_FREE_PADDING = 64  # rows of padding that cost less than another call does
_GATHER_BYTES = 4 << 20  # of keys; a group's gathered keys and values stay within a core's share of the cache


class TorchAttentionBackend:
    """Plans batched scaled-dot-product attention over a paged cache."""

    name: ClassVar[str] = "torch"

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache) -> None:
        self.shape = shape
        self.kv_cache = kv_cache

    def plan(self, metadata: CommonAttentionMetadata) -> TorchAttentionPlan:
        """Sort the requests into groups and prepare indices and masks for all layers."""
        return TorchAttentionPlan(self.shape, self.kv_cache, metadata)


@dataclass(frozen=True)
class _Request:
    """One request of the step, on the host."""

    index: int
    start: int
    query_len: int
    seq_len: int


class _Fresh:
    """Requests without anything in the cache: `[n, L]` causal attention over the new tokens."""

    def __init__(self, requests: Sequence[_Request], device: torch.device) -> None:
        self.count = len(requests)
        self.length = max(request.query_len for request in requests)
        self.tokens = _Tokens(requests, self.length, device)

    def attend(self, plan: TorchAttentionPlan, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        q, k, v = (self.tokens.pick(x).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=plan.shape.softmax_scale, enable_gqa=plan.shape.group_size > 1
        )
        return self.tokens.flatten(out.transpose(1, 2))


class _Paged:
    """Requests with a prefix in the cache: gather their blocks, attend with a mask."""

    def __init__(self, requests: Sequence[_Request], metadata: CommonAttentionMetadata, cache: PagedKVCache) -> None:
        self.count = len(requests)
        self.length = max(request.query_len for request in requests)
        device = metadata.slot_mapping.device
        self.tokens = _Tokens(requests, self.length, device)
        blocks = cache.spec.blocks_for(max(request.seq_len for request in requests))
        self.num_keys = blocks * cache.spec.block_size
        rows = _index([request.index for request in requests], device)
        table = metadata.block_table[:, :blocks].index_select(0, rows)
        # Past a request's own blocks a table may say anything, -1 too, which torch would take for "the last block".
        owned = _index([cache.spec.blocks_for(request.seq_len) for request in requests], device)
        inside = torch.arange(blocks, device=device) < owned[:, None]
        self.blocks = torch.where(inside, table, 0).flatten()
        self.mask = self._mask(requests, cache.spec.dtype, device)

    def _mask(self, requests: Sequence[_Request], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """`[n, 1, L, keys]`: query `i` of a request sees keys up to its prefix + i; None if all see all keys."""
        if self.length == 1 and all(request.seq_len == self.num_keys for request in requests):
            return None
        prefix = _index([request.seq_len - request.query_len for request in requests], device)[:, None]
        visible = prefix + torch.arange(self.length, device=device)
        hidden = torch.arange(self.num_keys, device=device) > visible[:, :, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf).unsqueeze(1)

    def attend(self, plan: TorchAttentionPlan, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        shape, cache = plan.shape, plan.kv_cache
        keys, values = (
            self._gather(pool, buffer)
            for pool, buffer in zip((cache.keys(layer), cache.values(layer)), plan.workspace(), strict=True)
        )
        q = self.tokens.pick(q)
        if self.length == 1:
            # [n, 1, heads, d] -> [n, kv heads, heads per kv head, d]: a group's heads are the rows of one product.
            rows = q.reshape(self.count, shape.num_kv_heads, shape.group_size, shape.head_dim)
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=self.mask, scale=shape.softmax_scale)
            return out.reshape(self.count, shape.num_heads, shape.head_dim)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=self.mask,
            scale=shape.softmax_scale,
            enable_gqa=shape.group_size > 1,
        )
        return self.tokens.flatten(out.transpose(1, 2))

    def _gather(self, pool: Tensor, buffer: Tensor) -> Tensor:
        """This group's keys or values, `[n, kv heads, keys, d]`, in the plan's buffer."""
        _, block_size, heads, dim = pool.shape
        gathered = buffer[: self.blocks.numel() * block_size * heads * dim].view(-1, block_size, heads, dim)
        torch.index_select(pool, 0, self.blocks, out=gathered)
        return gathered.view(self.count, self.num_keys, heads, dim).transpose(1, 2)


class _Tokens:
    """Where a group's tokens lie among the step's: a view where they lie side by side, else an index."""

    def __init__(self, requests: Sequence[_Request], length: int, device: torch.device) -> None:
        self.count = len(requests)
        self.length = length
        first = requests[0].start
        uniform = all(request.query_len == length for request in requests)
        adjacent = all(request.start == first + place * length for place, request in enumerate(requests))
        self.rows: slice | Tensor
        self._index: Tensor | None = None
        self._kept: Tensor | None = None
        if uniform and adjacent:
            self.rows = slice(first, first + self.count * length)
            return
        starts = _index([request.start for request in requests], device)[:, None]
        lens = _index([request.query_len for request in requests], device)[:, None]
        step = torch.arange(length, device=device)
        # Padding repeats the request's last token: causal attention lets no earlier one see it.
        index = (starts + torch.minimum(step, lens - 1)).flatten()
        self._index = index
        if uniform:
            self.rows = index
        else:
            real = torch.arange(length) < torch.tensor([request.query_len for request in requests])[:, None]
            self._kept = real.flatten().nonzero().flatten().to(device)
            self.rows = index.index_select(0, self._kept)

    def pick(self, x: Tensor) -> Tensor:
        """This group's part of `x` `[T, heads, d]`, as `[n, L, heads, d]`."""
        part = x[self.rows] if self._index is None else x.index_select(0, self._index)
        return part.view(self.count, self.length, *x.shape[1:])

    def flatten(self, out: Tensor) -> Tensor:
        """The group's results `[n, L, heads, d]` as one row per token, in the order of `rows`."""
        flat = out.reshape(self.count * self.length, *out.shape[2:])
        return flat if self._kept is None else flat.index_select(0, self._kept)


class TorchAttentionPlan:
    """The groups of one step of one lane, with their indices, masks and the buffer they gather into."""

    def __init__(self, shape: AttentionShape, kv_cache: PagedKVCache, metadata: CommonAttentionMetadata) -> None:
        self.shape = shape
        self.kv_cache = kv_cache
        self.num_rows = metadata.slot_mapping.shape[0]
        self._slots = kv_cache.write_slots(metadata.slot_mapping)
        self._groups = _make_groups(metadata, kv_cache)
        self._workspace: tuple[Tensor, Tensor] | None = None

    @property
    def num_calls(self) -> int:
        """Attention calls per layer."""
        return len(self._groups)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See `AttentionPlan.forward`."""
        self.kv_cache.write(layer, k, v, self._slots)
        if len(self._groups) == 1 and self._groups[0].tokens.rows == slice(0, self.num_rows):
            return self._groups[0].attend(self, q, k, v, layer)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            out[group.tokens.rows] = group.attend(self, q, k, v, layer)
        return out

    def workspace(self) -> tuple[Tensor, Tensor]:
        """Buffers for gathered keys and values: made once per step, for the largest group, used by all layers."""
        if self._workspace is None:
            spec = self.kv_cache.spec
            keys = max(group.count * group.num_keys for group in self._groups if isinstance(group, _Paged))
            size = keys * spec.num_kv_heads * spec.head_dim
            pool = self.kv_cache.keys(0)
            self._workspace = (pool.new_empty(size), pool.new_empty(size))
        return self._workspace


def _make_groups(metadata: CommonAttentionMetadata, cache: PagedKVCache) -> list[_Fresh | _Paged]:
    """Few groups with little padding; a group's requests keep the batch's order."""
    spec = cache.spec
    starts = metadata.query_start_loc_cpu
    fresh: list[_Request] = []
    decode: list[_Request] = []
    extend: list[_Request] = []
    for index, (query_len, seq_len) in enumerate(zip(metadata.query_lens_cpu, metadata.seq_lens_cpu, strict=True)):
        if query_len:
            kind = fresh if query_len == seq_len else decode if query_len == 1 else extend
            kind.append(_Request(index, starts[index], query_len, seq_len))
    gathered = max(1, _GATHER_BYTES // (spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize))
    groups: list[_Fresh | _Paged] = []
    groups += [_Fresh(requests, metadata.slot_mapping.device) for requests in _bundle(fresh, None)]
    groups += [_Paged(requests, metadata, cache) for kind in (decode, extend) for requests in _bundle(kind, gathered)]
    return groups


@dataclass
class _Bundle:
    """A group while it is formed. Requests come longest first, so the first one sets the query length."""

    requests: list[_Request]
    queries: int = 0
    keys: int = 0
    most_keys: int = 0

    def accepts(self, request: _Request, limit: int | None) -> bool:
        """Whether padding costs little with `request` in it, and its keys, where gathered, stay below `limit`."""
        count = len(self.requests) + 1
        padded_queries = count * self.requests[0].query_len
        padded_keys = count * max(self.most_keys, request.seq_len)
        if limit is not None and padded_keys > limit:
            return False
        return _cheap(padded_queries, self.queries + request.query_len) and _cheap(
            padded_keys, self.keys + request.seq_len
        )

    def add(self, request: _Request) -> None:
        """Take `request` in."""
        self.requests.append(request)
        self.queries += request.query_len
        self.keys += request.seq_len
        self.most_keys = max(self.most_keys, request.seq_len)


def _cheap(padded: int, useful: int) -> bool:
    return padded - useful <= max(_FREE_PADDING, _MAX_PADDING * padded)


def _bundle(requests: list[_Request], gathered: int | None) -> list[list[_Request]]:
    """Requests of one kind, cut into groups; `gathered` limits a group's padded keys where they are gathered."""
    bundles: list[_Bundle] = []
    for request in sorted(requests, key=lambda request: (request.query_len, request.seq_len), reverse=True):
        if not bundles or not bundles[-1].accepts(request, gathered):
            bundles.append(_Bundle([]))
        bundles[-1].add(request)
    return [sorted(bundle.requests, key=lambda request: request.index) for bundle in bundles]


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
