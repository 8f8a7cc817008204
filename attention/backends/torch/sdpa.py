"""The `torch` back end: batched scaled-dot-product attention, on a CPU or any other device of torch.

A step's requests are sorted into groups that are each one call:

    fresh    nothing in the cache yet: attend over the new keys and values directly, causally, without a mask.
             Contiguous requests of equal length (a batch of prompts) are views, ragged ones are padded.
    decode   one new token: gather the request's blocks, fold the query heads of a group into rows (so that grouped
             heads never need their keys repeated), one mask for the different lengths.
    extend   several new tokens behind a prefix: gather, and a causal mask shifted by the prefix.
    verify   drafts as a tree: as extend, with the tree's own mask, with or without a prefix.

Groups are formed so that padding costs little. Groups that gather are small enough that their keys and values are still
in the processor's cache when attention reads them: gathering 64 x 512 tokens at once is a third slower than in groups.
With a sliding window only the blocks that it touches are gathered.

`softmax_attention` computes the cases that `scaled_dot_product_attention` cannot: soft caps, sinks, and trees, in which
a row may see nothing (no kernel guarantees 0 for that). Every group uses the values as stored in an fp8 cache, also for
the new tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.backends.torch.groups import (
    KeyPages,
    Request,
    TokenRows,
    TorchBackend,
    Workspace,
    as_stored,
    bundle,
    gathered_tokens,
    list_requests,
    visible_mask,
)
from attention.interface import AttentionPlan, AttentionShape, BackendTraits
from attention.kv_cache import PagedKVCache
from attention.lse import softmax_attention
from attention.metadata import CommonAttentionMetadata


class TorchAttentionBackend(TorchBackend):
    """Plans batched scaled-dot-product attention over a paged cache."""

    name: ClassVar[str] = "torch"
    traits: ClassVar[BackendTraits] = BackendTraits(
        devices=("cpu", "cuda"),
        sliding_window=True,
        soft_cap=True,
        sinks=True,
        v_head_dim=True,
        tree_mask=True,
        fp8=True,
    )
    shape: AttentionShape
    kv_cache: PagedKVCache

    def plan(self, metadata: CommonAttentionMetadata) -> AttentionPlan:
        """Sort the requests into groups and prepare indices and masks for all layers."""
        step = AttentionStep(self.shape, self.kv_cache, metadata, self._workspace)
        return TorchAttentionPlan(step, make_groups(step, step.requests))


@dataclass(frozen=True)
class AttentionStep:
    """The data that all groups of a step share."""

    shape: AttentionShape
    kv_cache: PagedKVCache
    metadata: CommonAttentionMetadata
    workspace: Workspace

    @cached_property
    def requests(self) -> list[Request]:
        """The requests with new tokens, in the batch's order."""
        return list_requests(self.metadata, self.kv_cache.spec, self.shape.sliding_window)

    @cached_property
    def by_scores(self) -> bool:
        """Whether `softmax_attention` must compute this step: `scaled_dot_product_attention` cannot."""
        return self.metadata.has_tree or self.shape.soft_cap is not None or self.shape.sinks

    def visible(self, requests: Sequence[Request], positions: Tensor) -> Tensor:
        """The mask of a group over keys at `positions` `[n, K]`, `[n, 1, L, K]`."""
        window = self.shape.sliding_window
        return visible_mask(requests, positions, self.metadata, self.kv_cache.spec.dtype, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """Attend from queries `[n, heads, L, d]` to those keys `[n, kv_heads, K, d]` that `mask` does not hide."""
        shape = self.shape
        if self.by_scores:
            scale, soft_cap = shape.softmax_scale, shape.soft_cap
            return softmax_attention(q, k, v, scale=scale, mask=mask, soft_cap=soft_cap, sinks=sinks)[0]
        if q.shape[2] > 1:
            gqa = shape.group_size > 1
            return F.scaled_dot_product_attention(q, k, v, mask, scale=shape.softmax_scale, enable_gqa=gqa)
        # [n, heads, 1, d] -> [n, kv heads, heads per kv head, d]: heads that share keys are the rows of one product.
        rows = q.reshape(q.shape[0], shape.num_kv_heads, shape.group_size, shape.head_dim)
        return F.scaled_dot_product_attention(rows, k, v, mask, scale=shape.softmax_scale).reshape(*q.shape[:3], -1)

    def attend_causally(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of queries `[n, heads, L, d]` over `L` keys, without a mask tensor."""
        shape = self.shape
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=shape.softmax_scale, enable_gqa=shape.group_size > 1
        )


class _Fresh:
    """Requests without anything in the cache: `[n, L]` causal attention over the new tokens.

    `attend` gives the output of the group's tokens, `[tokens, heads, value_dim]`, in the order of `tokens.rows`. `q`,
    `k` and `v` are the whole step's; the new tokens are in the cache already.
    """

    def __init__(self, step: AttentionStep, requests: Sequence[Request]) -> None:
        device = step.metadata.slot_mapping.device
        self.tokens = TokenRows(requests, device)
        length, window = self.tokens.length, step.shape.sliding_window
        self.mask: Tensor | None = None
        self.causal = not step.by_scores and (window is None or window >= length)
        if not self.causal:
            # All requests start at token 0, so they share the causal mask of the longest.
            longest = max(requests, key=lambda request: request.query_len)
            self.mask = step.visible([longest], torch.arange(length, device=device)[None])

    def attend(self, step: AttentionStep, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        cache = step.kv_cache
        q, k, v = (self.tokens.pick(x).transpose(1, 2) for x in (q, k, v))
        k, v = as_stored(cache.key_pool, k, layer), as_stored(cache.value_pool, v, layer)
        out = step.attend_causally(q, k, v) if self.causal else step.attend(q, k, v, self.mask, sinks)
        return self.tokens.flatten(out.transpose(1, 2))


class _Paged:
    """Requests with a prefix in the cache: gather their blocks, attend with a mask; see `_Fresh`."""

    def __init__(self, step: AttentionStep, requests: Sequence[Request]) -> None:
        metadata, spec = step.metadata, step.kv_cache.spec
        self.tokens = TokenRows(requests, metadata.slot_mapping.device)
        ranges = [(request.first_key, request.seq_len) for request in requests]
        self.pages = KeyPages(requests, ranges, metadata, spec.block_size)
        dims = (spec.head_dim, spec.value_dim)
        self.buffers = [self.pages.buffer_shape(spec.num_kv_heads, dim) for dim in dims]
        step.workspace.reserve(sum(map(math.prod, self.buffers)))
        self.mask: Tensor | None = None
        if step.metadata.has_tree or not self._all_see_all(requests):
            self.mask = step.visible(requests, self.pages.positions)

    def _all_see_all(self, requests: Sequence[Request]) -> bool:
        """Whether every gathered key is visible, as in a decode whose tokens fill its blocks."""
        return self.tokens.length == 1 and all(
            request.num_keys == self.pages.num_keys and request.first_key == request.first_visible
            for request in requests
        )

    def attend(self, step: AttentionStep, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        cache = step.kv_cache
        of_keys, of_values = step.workspace.take_several(*self.buffers)
        keys = self.pages.gather(cache.key_pool, layer, of_keys).transpose(1, 2)
        values = self.pages.gather(cache.value_pool, layer, of_values).transpose(1, 2)
        out = step.attend(self.tokens.pick(q).transpose(1, 2), keys, values, self.mask, sinks)
        return self.tokens.flatten(out.transpose(1, 2))


class TorchAttentionPlan:
    """The groups of one step of one lane, with their indices and masks.

    Args:
        groups: together they hold each request with new tokens once.
    """

    def __init__(self, step: AttentionStep, groups: Sequence[_Fresh | _Paged]) -> None:
        self._step = step
        self._num_rows = step.metadata.slot_mapping.shape[0]
        self._slots = step.kv_cache.write_slots(step.metadata.slot_mapping)
        self.groups = groups

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`.

        Raises:
            ConfigError: sinks are given to a shape that has none, or are missing.
        """
        step = self._step
        step.shape.check_sinks(sinks)
        step.kv_cache.write(layer, k, v, self._slots)
        if len(self.groups) == 1 and self.groups[0].tokens.covers(self._num_rows):
            return self.groups[0].attend(step, q, k, v, layer, sinks)
        out = q.new_zeros(*q.shape[:2], step.shape.value_dim)
        for group in self.groups:
            out[group.tokens.rows] = group.attend(step, q, k, v, layer, sinks)
        return out


def make_groups(step: AttentionStep, requests: Sequence[Request]) -> list[_Fresh | _Paged]:
    """Sort some of a step's requests into this module's groups."""
    spec = step.kv_cache.spec
    fresh: list[Request] = []
    decode: list[Request] = []
    extend: list[Request] = []
    for request in requests:
        if not request.prefix and not step.metadata.has_tree:
            fresh.append(request)
        else:
            (decode if request.query_len == 1 else extend).append(request)
    limit = gathered_tokens(spec.num_kv_heads * max(spec.head_dim, spec.value_dim), spec.dtype)
    groups: list[_Fresh | _Paged] = [_Fresh(step, requests) for requests in bundle(fresh)]
    groups += [_Paged(step, requests) for kind in (decode, extend) for requests in bundle(kind, limit)]
    return groups
