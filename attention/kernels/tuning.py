"""The tiles that are timed on a GPU, and the batches that they are timed on.

The fastest tile depends on the GPU and on the shapes, so it is measured on the GPU (`ubatch.kernels.autotuner`), with
synthetic batches: as many requests as the step has, all of one length, in pages scattered over the pool. They read the
cache with any contents, and write only scratch memory. If measuring is not possible, the first choice is used. Tiles
that spill registers come last; `kernels_sm90.json` among the tests has what every tile takes.

In a tuning key, sizes that change from step to step are rounded to a few values, so that measuring ends soon.
"""

from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from attention.interface import AttentionShape, MLAShape, RopeTable
from attention.kernels.attend import num_tiles, plan_tiles, prefill_attention
from attention.kernels.decode import DecodeSplits, decode_attention
from attention.kernels.latent import LatentTile, as_attention, latent_decode
from attention.kernels.tile import PagedBatch, PagedLayer, TileSize
from attention.kv_cache import MLAKVCache, PagedKVCache
from ubatch.kernels import autotune
from ubatch.kernels.triton_jit import INTERPRETED, power_of_2

_LENGTHS = (512, 2048, 8192)
_PREFILL_TOKENS = 4096
_RULE = " (2)"
"""Of the keys of timed choices: which rule of `DecodeSplits.choose` they were timed by."""


@dataclass(frozen=True)
class DecodeChoice:
    """One way to run a decode.

    Attributes:
        keys, num_warps, num_stages: the tile of a program; see `TileSize`.
        waves: programs per multiprocessor that the key splits aim for.
    """

    keys: int
    num_warps: int
    num_stages: int
    waves: int

    def tile(self, shape: AttentionShape, max_queries: int) -> TileSize:
        """The tile of a program."""
        rows, dims = power_of_2(max_queries * shape.group_size, 16), power_of_2(shape.head_dim, 16)
        return TileSize(rows, self.keys, dims, self.num_warps, self.num_stages)


@dataclass(frozen=True)
class LatentChoice(LatentTile):
    """One way to run a decode over latents: the tile of a program, and how keys are split.

    Attributes:
        waves: programs per multiprocessor that the key splits aim for.
    """

    waves: int

    def splits(
        self, shape: MLAShape, num_reqs: int, max_queries: int, max_seq_len: int, processors: int
    ) -> DecodeSplits:
        """How a batch's keys are split; see `DecodeSplits.choose`."""
        return DecodeSplits.choose(
            as_attention(shape),
            num_reqs,
            max_queries,
            max_seq_len,
            self.waves * processors,
            blocks=self.blocks(shape, max_queries),
        )


@cache
def decode_choices(
    shape: AttentionShape, max_queries: int, dtype: torch.dtype, *, fp8: bool
) -> tuple[DecodeChoice, ...]:
    """The choices that are timed for requests of at most `max_queries` queries; the default first."""
    tile = TileSize.decode(shape, max_queries, dtype)
    default = DecodeChoice(tile.keys, tile.num_warps, tile.num_stages, waves=2)
    if INTERPRETED or dtype == torch.float32:
        return (default,)
    keys = tile.keys * 2 if fp8 else tile.keys  # half the bytes per key, so twice the keys
    warps, fewer = tile.num_warps, max(16, keys // 2)
    tiles = [(tile.keys, warps, 3), (fewer, warps, 5)]
    if tile.rows == 16 and not (fp8 and tile.dims > 128):  # more does not fit the registers of two warps
        tiles += [(fewer, 2, 5), (tile.keys, 2, 4)]
    if not fp8:  # converting so many keys at once takes all registers of four warps
        tiles += [(2 * keys, warps, 3)]
    tiles += [(2 * keys, 8, 3), (keys, warps, 4)]
    tried = [DecodeChoice(*each, waves) for each in tiles for waves in (2, 1, 4)]
    return tuple(dict.fromkeys([default, *tried]))


@cache
def prefill_choices(shape: AttentionShape, dtype: torch.dtype) -> tuple[TileSize, ...]:
    """The tiles that are timed for prompts; the default first."""
    default = TileSize.prefill(shape, dtype)
    if INTERPRETED or dtype == torch.float32:
        return (default,)
    group, dims = power_of_2(shape.group_size, 16), default.dims
    tiles = [(128, 64, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2)]
    if dims > 128:
        tiles = [(128, 32, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2)]
    tried = [TileSize(max(group, rows), keys, dims, warps, stages) for rows, keys, warps, stages in tiles]
    return tuple(dict.fromkeys([default, *tried]))


@cache
def latent_choices(shape: MLAShape, max_queries: int, dtype: torch.dtype, *, fp8: bool) -> tuple[LatentChoice, ...]:
    """The choices that are timed for requests of at most `max_queries` queries; the default first."""
    tile = LatentTile.default(shape, max_queries, dtype, fp8=fp8)
    default = LatentChoice(tile.rows, tile.keys, tile.num_warps, tile.num_stages, waves=1)
    if INTERPRETED or dtype == torch.float32:
        return (default,)
    tiles = [(16, 32, 8, 3), (16, 16, 4, 4)]
    if max_queries * shape.num_heads > 16:
        tiles += [(32, 32, 8, 3)]
    tiles += [(64, 16, 8, 4), (64, 32, 8, 3)]
    return tuple(dict.fromkeys([default, *(LatentChoice(*each, waves) for each in tiles for waves in (1, 2, 4))]))


def _length_class(max_seq_len: int) -> int:
    """The rounded length that `max_seq_len` is measured with."""
    return next((length for length in _LENGTHS if max_seq_len <= length), _LENGTHS[-1])


def _scattered_batch(cache: PagedKVCache | MLAKVCache, num_reqs: int, queries: int, seq_len: int) -> PagedBatch:
    """A batch of requests with `queries` queries and `seq_len` tokens each. They share pages if the pool is small."""
    device, blocks = cache.device, cache.spec.blocks_for(seq_len)
    numbers = torch.arange(num_reqs * blocks, dtype=torch.int64, device=device)
    table = (numbers * 7919 % cache.num_blocks).to(torch.int32).view(num_reqs, blocks)  # a prime scatters pages
    return PagedBatch(
        num_reqs,
        torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * queries,
        torch.full((num_reqs,), seq_len, dtype=torch.int32, device=device),
        table,
    )


def _inputs(
    shape: AttentionShape, cache: PagedKVCache, num_reqs: int, queries: int, seq_len: int
) -> tuple[PagedBatch, Tensor, Tensor]:
    """Such a batch, its queries, and where the output is written."""
    rows, dtype = num_reqs * queries, cache.spec.dtype
    q = torch.zeros(rows, shape.num_heads, shape.head_dim, dtype=dtype, device=cache.device)
    return _scattered_batch(cache, num_reqs, queries, seq_len), q, q.new_empty(*q.shape[:2], shape.value_dim)


def tune_decode(
    shape: AttentionShape, cache: PagedKVCache, num_reqs: int, max_queries: int, max_seq_len: int, processors: int
) -> DecodeChoice:
    """The fastest way to decode batches like this.

    Args:
        max_queries: most queries of a request.
        max_seq_len: tokens of the longest request.
    """
    spec = cache.spec
    choices = decode_choices(shape, max_queries, spec.dtype, fp8=spec.fp8)
    if len(choices) == 1:
        return choices[0]
    num_reqs, seq_len = power_of_2(num_reqs), max(max_queries, _length_class(max_seq_len))
    inputs = lru_cache(partial(_inputs, shape, cache, num_reqs, max_queries, seq_len))

    def run(choice: DecodeChoice) -> None:
        batch, q, out = inputs()  # allocated only if something is measured
        tile = choice.tile(shape, max_queries)
        splits = DecodeSplits.choose(shape, num_reqs, max_queries, seq_len, choice.waves * processors, tile)
        workspace = torch.empty(splits.workspace_numbers(shape, num_reqs), dtype=torch.float32, device=cache.device)
        decode_attention(q, out, PagedLayer(shape, cache, 0, batch), splits, workspace)

    key = f"decode attention{_RULE}, {_name(shape, cache)}, {num_reqs} x {max_queries} queries, {seq_len} keys"
    return autotune(key, choices, run, device=cache.device)


def tune_prefill(shape: AttentionShape, cache: PagedKVCache) -> TileSize:
    """The fastest tiles for prompts, timed on one long prompt."""
    choices = prefill_choices(shape, cache.spec.dtype)
    if len(choices) == 1:
        return choices[0]
    inputs = lru_cache(partial(_inputs, shape, cache, 1, _PREFILL_TOKENS, _PREFILL_TOKENS))

    def run(size: TileSize) -> None:
        batch, q, out = inputs()
        queries = size.queries(shape)
        tiles = torch.empty(num_tiles(1, _PREFILL_TOKENS, queries), 2, dtype=torch.int32, device=cache.device)
        plan_tiles(tiles, batch.query_start_loc, 1, queries)
        prefill_attention(q, out, PagedLayer(shape, cache, 0, batch), tiles, size)

    return autotune(f"prefill attention, {_name(shape, cache)}", choices, run, device=cache.device)


def tune_latent_decode(
    shape: MLAShape, cache: MLAKVCache, num_reqs: int, max_queries: int, max_seq_len: int, processors: int
) -> LatentChoice:
    """The fastest way to decode batches like this over latents; arguments as for `tune_decode`."""
    spec, device = cache.spec, cache.device
    choices = latent_choices(shape, max_queries, spec.dtype, fp8=spec.fp8)
    if len(choices) == 1:
        return choices[0]
    num_reqs, seq_len = power_of_2(num_reqs), max(max_queries, _length_class(max_seq_len))
    made: list[tuple[PagedBatch, Tensor, Tensor, RopeTable]] = []

    def run(choice: LatentChoice) -> None:
        rows = num_reqs * max_queries
        if not made:
            q = torch.zeros(rows, shape.num_heads, shape.kv_lora_rank, dtype=spec.dtype, device=device)
            q_rope = torch.zeros(rows, shape.num_heads, shape.qk_rope_head_dim, dtype=spec.dtype, device=device)
            angles = torch.zeros(1, shape.qk_rope_head_dim, device=device)
            rope = RopeTable(angles, torch.zeros(rows, dtype=torch.int64, device=device))
            made.append((_scattered_batch(cache, num_reqs, max_queries, seq_len), q, q_rope, rope))
        batch, q, q_rope, rope = made[0]
        splits = choice.splits(shape, num_reqs, max_queries, seq_len, processors)
        numbers = splits.workspace_numbers(as_attention(shape), num_reqs)
        workspace = torch.empty(numbers, dtype=torch.float32, device=device)
        latent_decode(q, q_rope, rope, torch.empty_like(q), shape, cache, 0, batch, splits, choice, workspace)

    heads = f"{shape.num_heads} heads over {shape.kv_lora_rank} + {shape.qk_rope_head_dim}"
    size = f"{num_reqs} x {max_queries} queries, {seq_len} keys"
    return autotune(f"latent decode{_RULE}, {heads}, {_stored(cache)}, {size}", choices, run, device=device)


def _name(shape: AttentionShape, cache: PagedKVCache) -> str:
    """The part of a tuning key with everything that a kernel is compiled for."""
    options = f"window {shape.sliding_window}, cap {shape.soft_cap}"
    dims = f"{shape.head_dim}" + (f" and {shape.value_dim}" if shape.value_dim != shape.head_dim else "")
    heads = f"{shape.num_heads} / {shape.num_kv_heads} heads of {dims}"
    return f"{heads}, {_stored(cache)}, {options}"


def _stored(cache: PagedKVCache | MLAKVCache) -> str:
    """The part of a tuning key with the cache's storage, compute dtype and page size."""
    spec = cache.spec
    return f"{spec.dtype} over {'fp8' if spec.fp8 else spec.dtype}, pages of {spec.block_size}"
