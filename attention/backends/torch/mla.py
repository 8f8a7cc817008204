"""The `torch` back end of multi-head latent attention, on a CPU or any other device of torch.

The cache holds one row per token for all heads: its latent and its rotated key part. A request attends in one of two
ways, which give the same result; the one with fewer multiplications is used:

    absorbed    decode, verify: few queries, many keys. Queries are projected into the latent space and attend to the
                cached rows directly, as if these were one key head; the output is a latent, which is projected again.
    expanded    prefill: keys and values of every head are made from the latents. The new tokens attend to each other
                causally. A prefix in the cache is expanded chunk by chunk; each chunk is attended separately and merged
                by its log-sum-exp, so that memory does not grow with the prefix.

Drafts that form a tree are always absorbed. An fp8 cache is read as it was stored in both ways, the new tokens of a
prefill too, so that a result does not depend on where a batch is cut.

Source: DeepSeek-V2 (2024), section 2.1; the chunked prefix is vLLM's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    additive_mask,
    as_stored,
    bundle,
    gathered_tokens,
    indices,
    list_requests,
    visible_mask,
)
from attention.interface import BackendTraits, MLAInputs, MLAPlan, MLAShape
from attention.kv_cache import MLAKVCache
from attention.lse import merge_states, softmax_attention
from attention.metadata import CommonAttentionMetadata

_CHUNK_TOKENS = 4096  # tokens of a group's cached prefixes that are expanded at once; at least one block per request


class TorchMLABackend(TorchBackend):
    """Plans latent attention over a paged cache of latents."""

    name: ClassVar[str] = "torch_mla"
    traits: ClassVar[BackendTraits] = BackendTraits(
        mha=False, mla=True, devices=("cpu", "cuda"), tree_mask=True, fp8=True
    )
    shape: MLAShape
    kv_cache: MLAKVCache

    def plan(self, metadata: CommonAttentionMetadata) -> MLAPlan:
        """Sort the requests into groups and prepare indices and masks for all layers."""
        return TorchMLAPlan(LatentStep(self.shape, self.kv_cache, metadata, self._workspace))


@dataclass(frozen=True)
class LatentStep:
    """The data that all groups of a step share."""

    shape: MLAShape
    kv_cache: MLAKVCache
    metadata: CommonAttentionMetadata
    workspace: Workspace

    @property
    def row_size(self) -> int:
        """Elements of a cached row."""
        return self.kv_cache.spec.numbers_per_token

    def absorbs(self, request: Request) -> bool:
        """Whether attending to the latents takes fewer multiplications than expanding the prefix."""
        if self.metadata.has_tree:
            return True
        shape = self.shape
        pairs = request.query_len * request.prefix + request.query_len * (request.query_len + 1) // 2
        wider = 2 * shape.kv_lora_rank - shape.qk_nope_head_dim - shape.v_head_dim  # per query and key
        # Multiplications to expand one key; projecting one query takes as many.
        expansion = shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
        return pairs * wider < request.prefix * expansion

    def pages(self, requests: Sequence[Request], ranges: Sequence[tuple[int, int]]) -> KeyPages:
        """A group's blocks; reserves workspace to gather them."""
        pages = KeyPages(requests, ranges, self.metadata, self.kv_cache.spec.block_size)
        self.workspace.reserve(math.prod(pages.buffer_shape(self.row_size)))
        return pages

    def gather(self, pages: KeyPages, layer: int) -> Tensor:
        """Cached rows, `[n, K, row_size]`."""
        buffer = self.workspace.take(*pages.buffer_shape(self.row_size))
        return pages.gather(self.kv_cache.pool, layer, buffer)

    def visible(self, requests: Sequence[Request], positions: Tensor) -> Tensor:
        """The mask of a group over keys at `positions` `[n, K]`, `[n, 1, L, K]`."""
        return visible_mask(requests, positions, self.metadata, self.kv_cache.spec.dtype)

    def expand(self, rows: Tensor, inputs: MLAInputs) -> tuple[Tensor, Tensor]:
        """Expand cached rows `[n, K, row_size]` to keys `[n, heads, K, qk]` and values `[n, heads, K, v]`."""
        count, num_keys, _ = rows.shape
        latent, k_rope = rows.split([self.shape.kv_lora_rank, self.shape.qk_rope_head_dim], dim=-1)
        flat = latent.reshape(count * num_keys, -1)
        k_nope, values = (
            (flat @ weight).unflatten(1, (count, num_keys)).transpose(0, 1)
            for weight in (inputs.w_uk.transpose(1, 2), inputs.w_uv)
        )
        shared = k_rope.unsqueeze(1).expand(-1, self.shape.num_heads, -1, -1)
        return torch.cat((k_nope, shared), dim=-1), values


class _Absorbed:
    """Few queries per request: they attend to the cached rows, which serve all heads."""

    def __init__(self, step: LatentStep, requests: Sequence[Request]) -> None:
        self.tokens = TokenRows(requests, step.metadata.slot_mapping.device)
        self.pages = step.pages(requests, [(0, request.seq_len) for request in requests])
        self.mask = step.visible(requests, self.pages.positions)

    def attend(self, step: LatentStep, inputs: MLAInputs, layer: int) -> Tensor:
        rows = step.gather(self.pages, layer).unsqueeze(1)  # one key head
        q_nope, q_rope = self.tokens.pick(inputs.q_nope), self.tokens.pick(inputs.q_rope)
        q = torch.cat((_per_head(q_nope, inputs.w_uk), q_rope.transpose(1, 2)), dim=-1)
        latents = rows[..., : step.shape.kv_lora_rank]
        out, _ = softmax_attention(q, rows, latents, scale=step.shape.softmax_scale, mask=self.mask)
        return self.tokens.flatten(_per_head(out.transpose(1, 2), inputs.w_uv).transpose(1, 2))


@dataclass(frozen=True)
class _Chunk:
    """A chunk of the prefixes of a group. The mask hides all keys past the end of a request's prefix."""

    pages: KeyPages
    mask: Tensor


class ExpandedGroup:
    """Many queries per request: they attend causally to the new tokens, and to the prefix chunk by chunk."""

    def __init__(self, step: LatentStep, requests: Sequence[Request]) -> None:
        device = step.metadata.slot_mapping.device
        self.tokens = TokenRows(requests, device)
        self.chunks = _chunks(step, requests)
        self.mask: Tensor | None = None
        if self.chunks:
            new = torch.arange(self.tokens.length, device=device)
            hidden = new > new[:, None]
            self.mask = additive_mask(~hidden.unsqueeze(0), step.kv_cache.spec.dtype)

    def attend(self, step: LatentStep, inputs: MLAInputs, layer: int) -> Tensor:
        scale = step.shape.softmax_scale
        q = self.tokens.pick(torch.cat((inputs.q_nope, inputs.q_rope), dim=-1)).transpose(1, 2)
        rows = torch.cat((self.tokens.pick(inputs.latent), self.tokens.pick(inputs.k_rope)), dim=-1)
        keys, values = step.expand(as_stored(step.kv_cache.pool, rows, layer), inputs)
        if not self.chunks:
            out = _causal_attention(q, keys, values, scale)
        else:
            out, lse = softmax_attention(q, keys, values, scale=scale, mask=self.mask)
            for chunk in self.chunks:
                keys, values = step.expand(step.gather(chunk.pages, layer), inputs)
                part = softmax_attention(q, keys, values, scale=scale, mask=chunk.mask)
                out, lse = merge_states(out, lse, *part)
        return self.tokens.flatten(out.transpose(1, 2))


def _chunks(step: LatentStep, requests: Sequence[Request]) -> list[_Chunk]:
    """The prefixes of a group in chunks of at most `_CHUNK_TOKENS` tokens of all requests together."""
    device = step.metadata.slot_mapping.device
    block_size = step.kv_cache.spec.block_size
    size = max(1, _CHUNK_TOKENS // len(requests) // block_size) * block_size
    (prefixes,) = indices(device, [request.prefix for request in requests])
    chunks = []
    for first in range(0, max(request.prefix for request in requests), size):
        ranges = [(first, min(first + size, max(first, request.prefix))) for request in requests]
        pages = step.pages(requests, ranges)
        inside = pages.positions < prefixes[:, None]
        chunks.append(_Chunk(pages, additive_mask(inside.unsqueeze(1), step.kv_cache.spec.dtype)))
    return chunks


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention whose values may be narrower or wider than its keys: padded, so that fused kernels take them."""
    width = max(q.shape[-1], v.shape[-1])
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)[..., : v.shape[-1]]


def _per_head(x: Tensor, weight: Tensor) -> Tensor:
    """`[n, L, heads, a]` times `[heads, a, b]`, as `[n, heads, L, b]`."""
    count, length = x.shape[:2]
    out = x.flatten(0, 1).transpose(0, 1) @ weight
    return out.unflatten(1, (count, length)).transpose(0, 1)


class TorchMLAPlan:
    """The groups of one step of one lane, with their indices and masks."""

    def __init__(self, step: LatentStep) -> None:
        self._step = step
        self._slots = step.kv_cache.write_slots(step.metadata.slot_mapping)
        self.groups = _make_groups(step)

    def forward(self, inputs: MLAInputs, layer: int) -> Tensor:
        step = self._step
        q_rope, k_rope = inputs.rope.rotate(inputs.q_rope), inputs.rope.rotate(inputs.k_rope)
        rotated = replace(inputs, q_rope=q_rope, k_rope=k_rope)
        step.kv_cache.write(layer, inputs.latent, k_rope, self._slots)
        tokens, heads, _ = inputs.q_nope.shape
        out = inputs.q_nope.new_zeros(tokens, heads, step.shape.v_head_dim)
        for group in self.groups:
            out[group.tokens.rows] = group.attend(step, rotated, layer)
        return out


def _make_groups(step: LatentStep) -> list[_Absorbed | ExpandedGroup]:
    spec = step.kv_cache.spec
    absorbed: list[Request] = []
    expanded: list[Request] = []
    for request in list_requests(step.metadata, spec):
        (absorbed if step.absorbs(request) else expanded).append(request)
    groups: list[_Absorbed | ExpandedGroup] = []
    groups += [_Absorbed(step, requests) for requests in bundle(absorbed, gathered_tokens(step.row_size, spec.dtype))]
    return groups + expanded_groups(step, expanded)


def expanded_groups(step: LatentStep, requests: Sequence[Request]) -> list[ExpandedGroup]:
    """Group the requests that attend over keys and values into few groups: first those without a prefix."""
    fresh = [request for request in requests if not request.prefix]
    extend = [request for request in requests if request.prefix]
    groups = [ExpandedGroup(step, members) for members in bundle(fresh)]
    most = max(1, _CHUNK_TOKENS // step.kv_cache.spec.block_size)  # requests: a chunk holds a block of each
    return groups + [ExpandedGroup(step, members) for members in bundle(extend, max_requests=most)]
