"""Batches for attention tests: random inputs over a paged cache in scattered blocks, of every kind a step can be.

Block tables hold -1 past a request's blocks, and the cache holds large stale numbers wherever no token is: whoever
reads what is not the request's gives another result, or an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from attention import (
    AttentionShape,
    BlockAllocator,
    CommonAttentionMetadata,
    KVCacheSpec,
    MLACacheSpec,
    MLAInputs,
    MLAKVCache,
    MLAShape,
    PagedKVCache,
    RopeTable,
    SpecVerifyInput,
)
from attention.kv_cache import FP8, quantize_fp8
from attention.reference import reference_attention, reference_mla
from ubatch import ForwardMode

STALE = 77.0
Drafts = Literal["chain", "tree"]
T = TypeVar("T")


def fp8_scales(layer: int) -> tuple[float, float]:
    """Of a layer's keys (or latents) and values in the fp8 caches made here."""
    return 0.05 * (layer + 1), 0.02 * (layer + 1)


def mapped(x: T, change: Callable[[Tensor], Tensor]) -> T:
    """A dataclass whose tensors, and those of the dataclasses in it, are changed."""
    changes: dict[str, Any] = {}
    for field in fields(x):  # type: ignore[arg-type]
        value = getattr(x, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = change(value)
        elif is_dataclass(value) and not isinstance(value, type):
            changes[field.name] = mapped(value, change)
    return replace(x, **changes)  # type: ignore[type-var]


def rows_of(inputs: MLAInputs, rows: slice | Tensor) -> MLAInputs:
    """The inputs of some tokens."""
    parts = {name: getattr(inputs, name)[rows] for name in ("q_nope", "q_rope", "latent", "k_rope")}
    return replace(inputs, **parts, rope=replace(inputs.rope, positions=inputs.rope.positions[rows]))


@dataclass(frozen=True)
class AnyBatch:
    """A step's inputs, and the cache as the steps before it left it; see the kinds below.

    Attributes:
        past_slots: of every token that is in the cache already.
    """

    shape: Any
    metadata: CommonAttentionMetadata
    spec: Any
    num_blocks: int
    past_slots: Tensor

    PAST: ClassVar[tuple[str, str]]
    """The fields with what the cache holds at `past_slots`, the same in all layers."""

    @property
    def past(self) -> list[Tensor]:
        """What the cache holds at `past_slots`."""
        return [getattr(self, name) for name in self.PAST]

    def scale(self, cache: Any, layer: int) -> None:
        """Set the scales of an fp8 cache."""
        raise NotImplementedError

    def empty_cache(self, num_blocks: int | None = None) -> Any:
        """A cache of zeros, with the scales that are used here."""
        kind = MLAKVCache if isinstance(self.spec, MLACacheSpec) else PagedKVCache
        cache = kind(self.spec, num_blocks or self.num_blocks, self.past_slots.device)
        for layer in range(self.spec.num_layers if self.spec.fp8 else 0):
            self.scale(cache, layer)
        return cache

    def fill(self, cache: Any) -> None:
        """Write the requests' prefixes to every layer, and stale numbers to all other slots."""
        slots = torch.arange(cache.num_blocks * self.spec.block_size, device=self.past_slots.device)
        stale = [x.new_full((len(slots), *x.shape[1:]), STALE) for x in self.past]
        for layer in range(self.spec.num_layers):
            cache.write(layer, *stale, slots)
            cache.write(layer, *self.past, self.past_slots)

    def new_cache(self, num_blocks: int | None = None) -> Any:
        """A cache that holds the requests' prefixes in every layer."""
        cache = self.empty_cache(num_blocks)
        self.fill(cache)
        return cache

    def on(self, device: str | torch.device) -> Self:
        """The same batch on another device."""
        return mapped(self, lambda x: x.to(device))

    def to(self, dtype: torch.dtype) -> Self:
        """The same batch computed in `dtype`; of its numbers, what `dtype` can hold."""
        changed = mapped(self, lambda x: x.to(dtype) if x.is_floating_point() else x)
        return replace(changed, spec=replace(self.spec, dtype=dtype))


@dataclass(frozen=True)
class Batch(AnyBatch):
    """Of multi-head or grouped-query attention."""

    shape: AttentionShape
    spec: KVCacheSpec
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    past_k: Tensor
    past_v: Tensor

    PAST = "past_k", "past_v"

    def scale(self, cache: Any, layer: int) -> None:
        cache.set_scales(layer, *fp8_scales(layer))

    def forward(self, plan: Any, layer: int = 0) -> Tensor:
        out: Tensor = plan.forward(self.q, self.k, self.v, layer, self.sinks)
        return out

    def part(self, rows: slice | Tensor, metadata: CommonAttentionMetadata | None = None) -> Batch:
        q, k, v = (x[rows] for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, metadata=metadata or self.metadata)

    def expected(self, layer: int = 0, cache: PagedKVCache | None = None) -> Tensor:
        """What the oracle says; `cache` is written."""
        cache = self.new_cache() if cache is None else cache
        return reference_attention(self.q, self.k, self.v, layer, self.metadata, cache, self.shape, self.sinks)

    def exact_in_fp8(self) -> Batch:
        """The same with queries that fp8 holds exactly: some kernels get them in fp8."""
        return replace(self, q=_exact(self.q))


@dataclass(frozen=True)
class MLABatch(AnyBatch):
    """Of multi-head latent attention.

    Attributes:
        past_k_rope: rotated.
        scaled: whether fp8 caches have the scales of `fp8_scales`, or 1.
    """

    shape: MLAShape
    spec: MLACacheSpec
    inputs: MLAInputs
    past_latent: Tensor
    past_k_rope: Tensor
    scaled: bool = True

    PAST = "past_latent", "past_k_rope"

    def scale(self, cache: Any, layer: int) -> None:
        cache.set_scale(layer, fp8_scales(layer)[0] if self.scaled else 1.0)

    def forward(self, plan: Any, layer: int = 0) -> Tensor:
        out: Tensor = plan.forward(self.inputs, layer)
        return out

    def part(self, rows: slice | Tensor, metadata: CommonAttentionMetadata | None = None) -> MLABatch:
        return replace(self, inputs=rows_of(self.inputs, rows), metadata=metadata or self.metadata)

    def expected(self, layer: int = 0, cache: MLAKVCache | None = None) -> Tensor:
        """What the oracle says; `cache` is written."""
        cache = self.new_cache() if cache is None else cache
        return reference_mla(self.inputs, layer, self.metadata, cache, self.shape)

    def to(self, dtype: torch.dtype) -> MLABatch:
        """As of every batch; angles stay as they are."""
        changed = super().to(dtype)
        return replace(changed, inputs=replace(changed.inputs, rope=self.inputs.rope))

    def exact_in_fp8(self) -> MLABatch:
        """The same with queries and latents that fp8 holds exactly, also after absorption and rotation.

        Each number of a query goes to one number of the latent's space, and rotations are by quarters of a circle.
        """
        inputs, shape = self.inputs, self.shape
        generator = torch.Generator().manual_seed(0)
        w_uk, nope = torch.zeros_like(inputs.w_uk), torch.arange(shape.qk_nope_head_dim)
        for head in range(shape.num_heads):
            w_uk[head, nope, torch.randperm(shape.kv_lora_rank, generator=generator)[: len(nope)]] = 1.0
        quarters = torch.randint(4, (1024, shape.qk_rope_head_dim // 2), generator=generator) * (torch.pi / 2)
        cos_sin = torch.cat((quarters.cos(), quarters.sin()), dim=-1).round()
        exact = {name: _exact(getattr(inputs, name)) for name in ("q_nope", "q_rope", "latent", "k_rope")}
        rope = replace(inputs.rope, cos_sin=cos_sin)
        return replace(self, inputs=replace(inputs, **exact, w_uk=w_uk, rope=rope), scaled=False)


def _exact(x: Tensor) -> Tensor:
    return quantize_fp8(x.contiguous(), 1.0).view(FP8).float()


def make_batch(
    requests: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int, int] = (4, 2, 8),
    shape: AttentionShape | None = None,
    block_size: int = 4,
    num_layers: int = 1,
    padding: int = 0,
    fp8: bool = False,
    drafts: Drafts | None = None,
    mode: ForwardMode | None = None,
    seed: int = 0,
) -> Batch:
    """A batch of requests given as (tokens in the cache, new tokens).

    Args:
        requests: one pair each; (0, 0) is a padding request.
        heads: query heads, key/value heads, head dimension; or
        shape: the whole shape.
        block_size: tokens per block.
        num_layers: layers of the cache.
        padding: rows at the end that belong to no request.
        fp8: whether the cache is.
        drafts: a verify batch, whose requests all have as many new tokens; padding requests come last.
        mode: of the batch; by default what the requests look like.
        seed: of everything random.
    """
    shape = AttentionShape(*heads) if shape is None else shape
    spec = shape.cache_spec(num_layers, block_size, torch.float32, fp8=fp8)
    generator = torch.Generator().manual_seed(seed)
    layout = _layout(requests, spec, padding, drafts, mode, seed)
    heads_and_dims = [
        (shape.num_heads, shape.head_dim),
        (shape.num_kv_heads, shape.head_dim),
        (shape.num_kv_heads, shape.value_dim),
    ]
    past_k, past_v = (torch.randn(len(layout.past_slots), *row, generator=generator) for row in heads_and_dims[1:])
    # As a model makes them: strided views of one fused projection.
    rows, sizes = len(layout.metadata.slot_mapping), [number * dim for number, dim in heads_and_dims]
    parts = torch.randn(rows, sum(sizes), generator=generator).split(sizes, dim=1)
    q, k, v = (part.unflatten(1, size) for part, size in zip(parts, heads_and_dims, strict=True))
    sinks = torch.randn(shape.num_heads, generator=generator) if shape.sinks else None
    placed = (layout.num_blocks, layout.past_slots)
    return Batch(shape, layout.metadata, spec, *placed, q, k, v, sinks, past_k, past_v)


def make_mla_batch(
    requests: Sequence[tuple[int, int]],
    *,
    shape: MLAShape | None = None,
    block_size: int = 4,
    num_layers: int = 1,
    padding: int = 0,
    fp8: bool = False,
    drafts: Drafts | None = None,
    mode: ForwardMode | None = None,
    interleaved: bool = True,
    seed: int = 0,
) -> MLABatch:
    """As `make_batch`.

    Args:
        requests: (tokens in the cache, new tokens) each.
        shape: by default one for which a `torch` prefill of 3 tokens and more is expanded, a decode absorbed.
        block_size: tokens per block.
        num_layers: layers of the cache.
        padding: rows at the end that belong to no request.
        fp8: whether the cache is.
        drafts: a verify batch.
        mode: of the batch.
        interleaved: how rope pairs numbers.
        seed: of everything random.
    """
    shape = MLAShape(4, 16, 2, 4, 3) if shape is None else shape
    spec = shape.cache_spec(num_layers, block_size, torch.float32, fp8=fp8)
    generator = torch.Generator().manual_seed(seed)
    layout = _layout(requests, spec, padding, drafts, mode, seed)
    rows, rank, rope = len(layout.metadata.slot_mapping), shape.kv_lora_rank, shape.qk_rope_head_dim

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    angles = torch.outer(torch.arange(1024.0), 0.1 ** torch.arange(rope // 2))
    q = draw(rows, shape.num_heads, shape.qk_head_dim)
    w_kv = draw(shape.num_heads, shape.qk_nope_head_dim + shape.v_head_dim, rank) * rank**-0.5
    w_uk, w_uv = w_kv.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=1)
    q_nope, q_rope = q.split([shape.qk_nope_head_dim, rope], dim=-1)
    inputs = MLAInputs(
        q_nope=q_nope,
        q_rope=q_rope,
        latent=draw(rows, rank),
        k_rope=draw(rows, rank + rope)[:, rank:],
        w_uk=w_uk,
        w_uv=w_uv.transpose(1, 2),
        rope=RopeTable(torch.cat((angles.cos(), angles.sin()), dim=-1), layout.positions, interleaved),
    )
    past = len(layout.past_slots)
    placed = (layout.num_blocks, layout.past_slots)
    return MLABatch(shape, layout.metadata, spec, *placed, inputs, draw(past, rank), draw(past, rope))


@dataclass(frozen=True)
class _Layout:
    """Where everything of a batch is."""

    metadata: CommonAttentionMetadata
    num_blocks: int
    past_slots: Tensor
    positions: Tensor


def _layout(
    requests: Sequence[tuple[int, int]],
    spec: KVCacheSpec | MLACacheSpec,
    padding: int,
    drafts: Drafts | None,
    mode: ForwardMode | None,
    seed: int,
) -> _Layout:
    rng = random.Random(seed)
    block_size = spec.block_size
    needed = [spec.blocks_for(prefix + new) for prefix, new in requests]
    num_blocks = sum(needed) + 3
    free = BlockAllocator(num_blocks).allocate(num_blocks)
    rng.shuffle(free)
    table = torch.full((len(requests), max(needed, default=0) + 1), -1, dtype=torch.int32)
    slots: list[int] = []
    past: list[int] = []
    positions: list[int] = []
    for row, (prefix, new) in enumerate(requests):
        blocks = [free.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        places = [blocks[i // block_size] * block_size + i % block_size for i in range(prefix + new)]
        past += places[:prefix]
        slots += places[prefix:]
        positions += range(prefix, prefix + new)
    spec_verify = _spec_verify(requests, drafts, rng)
    if spec_verify is not None:
        positions = spec_verify.positions.tolist()
    metadata = CommonAttentionMetadata.build(
        [new for _, new in requests],
        [prefix + new for prefix, new in requests],
        table,
        torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        _mode_of(requests, drafts) if mode is None else mode,
        spec_verify,
    )
    return _Layout(
        metadata,
        num_blocks,
        torch.tensor(past, dtype=torch.int64),
        torch.tensor(positions + [0] * padding, dtype=torch.int64),
    )


def _mode_of(requests: Sequence[tuple[int, int]], drafts: Drafts | None) -> ForwardMode:
    news = [new for _, new in requests if new]
    if not news:
        return ForwardMode.IDLE
    if drafts is not None:
        return ForwardMode.TARGET_VERIFY
    if max(news) == 1:
        return ForwardMode.DECODE
    return ForwardMode.MIXED if min(news) == 1 else ForwardMode.PREFILL


def _spec_verify(
    requests: Sequence[tuple[int, int]], drafts: Drafts | None, rng: random.Random
) -> SpecVerifyInput | None:
    real = [(prefix, new) for prefix, new in requests if new]
    if drafts is None or not real:
        return None
    number = real[0][1]
    masks: list[Tensor] = []
    positions: list[int] = []
    for prefix, _ in real:
        # Draft 0 is the root; every other one hangs on an earlier one, in a chain on the one before it.
        parents = [-1, *(i - 1 if drafts == "chain" else rng.randrange(i) for i in range(1, number))]
        mask = torch.zeros(number, prefix + number, dtype=torch.bool)
        mask[:, :prefix] = True
        depth = [0] * number
        for i, parent in enumerate(parents):
            if parent >= 0:
                mask[i, prefix:] = mask[parent, prefix:]
                depth[i] = depth[parent] + 1
            mask[i, prefix + i] = True
        masks.append(mask.flatten())
        positions += [prefix + d for d in depth]
    none = torch.full((len(real), number), -1, dtype=torch.int64)
    return SpecVerifyInput(
        num_draft_tokens=number,
        prefix_lens=tuple(prefix for prefix, _ in real),
        draft_tokens=torch.arange(len(positions)),
        positions=torch.tensor(positions, dtype=torch.int64),
        custom_mask=torch.cat(masks) if drafts == "tree" else None,
        retrieve_index=torch.arange(len(positions)).view(-1, number),
        retrieve_next_token=none,
        retrieve_next_sibling=none,
    )
