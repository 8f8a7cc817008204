"""The memory of attention: pools of blocks (pages), written by slot and read by block.

    PagedKVCache   keys and values of multi-head and grouped-query attention
    MLAKVCache     each token's latent and rotated key part, for multi-head latent attention
    LayersKVCache  keys and values of layers whose heads differ: a `PagedKVCache` for each kind, over the same blocks

A slot is `block * block_size + offset`. Both pools may store fp8: values are divided by a static scale per layer and
stored as bytes, because some torch operations that move data do not support fp8 tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from ubatch import ConfigError, UBatchError

FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(FP8).max


class KVCacheExhausted(UBatchError):
    """There are not enough free KV blocks. Give the cache more blocks, or run fewer or shorter requests at once."""


class KVCacheError(UBatchError):
    """KV bookkeeping was violated: a block freed twice, a block lost, a row that is not in use."""


def check_positive(what: str, sizes: object, *names: str) -> None:
    """Refuse an attribute of `sizes` that is below 1, unless it is None; `what` begins the message."""
    for name in names:
        size = getattr(sizes, name)
        if size is not None and size < 1:
            raise ConfigError(f"{what}: {name} must be at least 1, not {size}.")


@dataclass(frozen=True)
class CacheSpec(ABC):
    """The settings that every KV cache has.

    Attributes:
        num_layers: layers with attention.
        block_size: tokens per block (page).
        dtype: attention computes in it; the cache stores it, too, unless `fp8` is set.
        fp8: store one byte per element (float8_e4m3fn), scaled.
    """

    num_layers: int
    block_size: int = field(default=16, kw_only=True)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)
    fp8: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        sizes = [each.name for each in fields(self) if isinstance(getattr(self, each.name), int) and each.name != "fp8"]
        check_positive("KV cache", self, *sizes)

    @property
    @abstractmethod
    def numbers_per_token(self) -> int:
        """Elements that one layer stores per token."""

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of the pools: bytes for fp8."""
        return torch.uint8 if self.fp8 else self.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.block_size * self.numbers_per_token * self.storage_dtype.itemsize

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` tokens of one request."""
        return -(-num_tokens // self.block_size)

    def blocks_in(self, num_bytes: int) -> int:
        """Blocks that fit in `num_bytes`.

        Raises:
            ConfigError: not even one fits.
        """
        blocks = num_bytes // self.bytes_per_block
        if blocks < 1:
            raise ConfigError(
                f"{num_bytes} bytes of KV memory hold no block of {self.bytes_per_block} bytes; give more memory."
            )
        return blocks


@dataclass(frozen=True)
class KVCacheSpec(CacheSpec):
    """The shape of a cache of keys and values.

    Attributes:
        num_kv_heads: key/value heads per layer on this rank.
        head_dim: elements per key head.
        v_head_dim: elements per value head; None is `head_dim`.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Elements per value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def numbers_per_token(self) -> int:
        """Elements of the keys and values of all heads."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class MLACacheSpec(CacheSpec):
    """The shape of a cache of latents. It has no heads: one row serves all of them.

    Attributes:
        kv_lora_rank: elements of the compressed key and value.
        qk_rope_head_dim: elements of the rotated key part.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Elements of the latent and the rotated part, one row for all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LayersCacheSpec(CacheSpec):
    """The shape of a cache of layers whose heads differ.

    Attributes:
        parts: a cache for each kind of layer, all with these blocks, dtype and `fp8`.
        places: for every layer: the number of its cache in `parts`, and its own number in that cache.
    """

    parts: tuple[KVCacheSpec, ...]
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layers: Sequence[KVCacheSpec]) -> LayersCacheSpec:
        """The spec of layers that need these caches, each of a single layer; at least one."""
        kinds = tuple(dict.fromkeys(layers))
        counts = [0] * len(kinds)
        places = []
        for layer in layers:
            kind = kinds.index(layer)
            places.append((kind, counts[kind]))
            counts[kind] += 1
        first = layers[0]
        return cls(
            len(layers),
            tuple(replace(kind, num_layers=count) for kind, count in zip(kinds, counts, strict=True)),
            tuple(places),
            block_size=first.block_size,
            dtype=first.dtype,
            fp8=first.fp8,
        )

    @property
    def numbers_per_token(self) -> int:
        """Elements of the layer that stores the most."""
        return max(part.numbers_per_token for part in self.parts)

    @property
    def bytes_per_block(self) -> int:
        """See `CacheSpec`."""
        return sum(part.bytes_per_block for part in self.parts)


class TokenPool:
    """One pool of rows per layer: `[num_blocks, block_size, *row]`.

    The pool has one extra, hidden block, which padding is written to. So a write has a fixed shape and never asks the
    device which tokens are padding. Free blocks and the unused end of a request's last block may hold anything, also
    nan: no back end lets a request's result depend on them.

    Args:
        row: shape of one token's data.
    """

    def __init__(self, spec: CacheSpec, num_blocks: int, row: Sequence[int], device: torch.device | str) -> None:
        if num_blocks < 1:
            raise ConfigError(f"KV cache: num_blocks must be at least 1, not {num_blocks}.")
        shape = (spec.num_layers, num_blocks + 1, spec.block_size, *row)
        self.memory = torch.zeros(shape, dtype=spec.storage_dtype, device=device)
        self.fp8 = spec.fp8
        self.dtype = spec.dtype
        self.scales = [1.0] * spec.num_layers
        self._slots = tuple(self.memory.view(spec.num_layers, -1, math.prod(row)).unbind())
        self._blocks = tuple(self.memory[:, :num_blocks].unbind())

    def blocks(self, layer: int) -> Tensor:
        """A view of the layer's pool as stored (fp8 as bytes), without the hidden block."""
        return self._blocks[layer]

    def write(self, layer: int, rows: Tensor, slots: Tensor) -> None:
        """Store `rows` `[T, *row]` at `slots` `[T]`, quantised if the pool is fp8."""
        if self.fp8:
            rows = quantize_fp8(rows, self.scales[layer])
        # Flat rows: torch copies each as one contiguous run, but loops over single elements of multi-dimensional rows.
        self._slots[layer].index_copy_(0, slots, rows.flatten(1))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows from slots to slots in all layers, as they are stored; see `PagedKVCache.move`."""
        slots = self.memory.view(self.memory.shape[0], -1, *self.memory.shape[3:])
        slots.index_copy_(1, targets, slots.index_select(1, sources))

    def decode(self, stored: Tensor, layer: int) -> Tensor:
        """Convert data read from `blocks(layer)` to the compute dtype; returned unchanged if the pool is not fp8."""
        if not self.fp8:
            return stored
        return stored.view(FP8).to(self.dtype).mul_(self.scales[layer])


def quantize_fp8(x: Tensor, scale: float) -> Tensor:
    """`x / scale` as float8_e4m3fn, saturated at its largest value, as bytes of the same shape. It is rounded once: the
    quotient is float32."""
    return (x.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(FP8).view(torch.uint8)


class _Cache:
    """Methods of both caches. A subclass lists its pools."""

    spec: CacheSpec
    num_blocks: int

    def __init__(self, num_blocks: int, pools: Sequence[TokenPool]) -> None:
        self.num_blocks = num_blocks
        self._pools = tuple(pools)

    @property
    def device(self) -> torch.device:
        """The device of the pools."""
        return self._pools[0].memory.device

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, the hidden block included."""
        return sum(pool.memory.nbytes for pool in self._pools)

    def write_slots(self, slot_mapping: Tensor) -> Tensor:
        """The slots to pass to `write`, `[T]` int64: padding (-1) goes to the hidden block. Call it once per step."""
        return torch.where(slot_mapping < 0, self.hidden_slot, slot_mapping)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy some tokens' data to other slots, in all layers. All sources are read before any target is written, so a
        slot may be the source of one token and the target of another.

        Args:
            sources: `[n]` int64 slots.
            targets: `[n]` int64 slots, all different.
        """
        for pool in self._pools:
            pool.move(sources, targets)

    @property
    def hidden_slot(self) -> int:
        """The slot that padding is written to: the first of the hidden block."""
        return self.num_blocks * self.spec.block_size


class PagedKVCache(_Cache):
    """Keys `[num_blocks, block_size, num_kv_heads, head_dim]` per layer, and values `[..., value_dim]`."""

    spec: KVCacheSpec

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.key_pool = TokenPool(spec, num_blocks, (spec.num_kv_heads, spec.head_dim), device)
        self.value_pool = TokenPool(spec, num_blocks, (spec.num_kv_heads, spec.value_dim), device)
        super().__init__(num_blocks, (self.key_pool, self.value_pool))

    def set_scales(self, layer: int, k_scale: float, v_scale: float) -> None:
        """Set the static scales of an fp8 cache's layer, as a checkpoint gives them: stored = value / scale.

        Raises:
            ConfigError: the cache is not fp8, or a scale is not positive.
        """
        _check_scales(self.spec, k_scale, v_scale)
        self.key_pool.scales[layer], self.value_pool.scales[layer] = k_scale, v_scale

    def scales(self, layer: int) -> tuple[float, float]:
        """The scales of the layer's keys and values; 1 unless it is fp8."""
        return self.key_pool.scales[layer], self.value_pool.scales[layer]

    @cached_property
    def addresses(self) -> list[tuple[int, int]]:
        """Where the keys and values of each layer begin in memory."""
        return [(self.keys(layer).data_ptr(), self.values(layer).data_ptr()) for layer in range(self.spec.num_layers)]

    def keys(self, layer: int) -> Tensor:
        """The layer's keys, `[num_blocks, block_size, num_kv_heads, head_dim]`, a view; fp8 as bytes."""
        return self.key_pool.blocks(layer)

    def values(self, layer: int) -> Tensor:
        """The layer's values, `[num_blocks, block_size, num_kv_heads, value_dim]`, a view; fp8 as bytes."""
        return self.value_pool.blocks(layer)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store new keys and values.

        Args:
            k: `[T, num_kv_heads, head_dim]`.
            v: `[T, num_kv_heads, value_dim]`.
            slots: `[T]` int64 from `write_slots`; each real slot at most once.
        """
        self.key_pool.write(layer, k, slots)
        self.value_pool.write(layer, v, slots)


class MLAKVCache(_Cache):
    """Latent and rotated key part side by side, `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]` per layer.

    Source: DeepSeek-V2 (2024), section 2.1.
    """

    spec: MLACacheSpec

    def __init__(self, spec: MLACacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.pool = TokenPool(spec, num_blocks, (spec.numbers_per_token,), device)
        super().__init__(num_blocks, (self.pool,))

    def set_scale(self, layer: int, scale: float) -> None:
        """Set the static scale of an fp8 cache's layer; errors as `PagedKVCache.set_scales`."""
        _check_scales(self.spec, scale)
        self.pool.scales[layer] = scale

    def scale(self, layer: int) -> float:
        """The layer's scale; 1 unless it is fp8."""
        return self.pool.scales[layer]

    def rows(self, layer: int) -> Tensor:
        """The layer's pool, `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`, a view; fp8 as bytes."""
        return self.pool.blocks(layer)

    def write(self, layer: int, latent: Tensor, k_rope: Tensor, slots: Tensor) -> None:
        """Store new tokens.

        Args:
            latent: `[T, kv_lora_rank]`, normalised.
            k_rope: `[T, qk_rope_head_dim]`, rotated.
            slots: `[T]` int64 from `write_slots`; each real slot at most once.
        """
        self.pool.write(layer, torch.cat((latent, k_rope), dim=-1), slots)


class LayersKVCache(_Cache):
    """A `PagedKVCache` for each kind of layer. A block has the same number in all of them, so they share block tables.

    Attributes:
        parts: the caches, as in the spec.
    """

    spec: LayersCacheSpec

    def __init__(self, spec: LayersCacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.parts = tuple(PagedKVCache(part, num_blocks, device) for part in spec.parts)
        super().__init__(num_blocks, [pool for part in self.parts for pool in part._pools])

    def set_scales(self, layer: int, k_scale: float, v_scale: float) -> None:
        """See `PagedKVCache.set_scales`."""
        cache, place = self.of_layer(layer)
        cache.set_scales(place, k_scale, v_scale)

    def of_layer(self, layer: int) -> tuple[PagedKVCache, int]:
        """The cache of a layer, and the layer's number in it."""
        part, place = self.spec.places[layer]
        return self.parts[part], place


KVCache = PagedKVCache | MLAKVCache | LayersKVCache


def make_kv_cache(spec: CacheSpec, num_blocks: int, device: torch.device | str = "cpu") -> KVCache:
    """Allocate the cache that a spec describes."""
    if isinstance(spec, MLACacheSpec):
        return MLAKVCache(spec, num_blocks, device)
    if isinstance(spec, KVCacheSpec):
        return PagedKVCache(spec, num_blocks, device)
    if isinstance(spec, LayersCacheSpec):
        return LayersKVCache(spec, num_blocks, device)
    raise ConfigError(f"no KV cache is known for a {type(spec).__name__}.")


def _check_scales(spec: CacheSpec, *scales: float) -> None:
    if not spec.fp8:
        raise ConfigError(f"a KV cache of {spec.dtype} has no scales; only an fp8 cache has.")
    for scale in scales:
        if not 0 < scale < float("inf"):
            raise ConfigError(f"a KV scale must be positive, not {scale}.")
