"""The faster dtype on this CPU for a checkpoint in bfloat16: bfloat16, or float32. Chosen by measuring.

The products of one layer are timed in both, in turns, with the kernels that the model would use for each: projections,
dense MLP, experts, and a layer's share of the logits. Few rows (a decode step, where the time goes into reading
weights) and many (a prefill, where it goes into arithmetic) have equal weight. Large matrices are measured in part, so
that all takes well under a second.

A decode step reads all weights once, so those of a layer are in no cache unless the whole model is. Before the products
of few rows are timed, other memory is read in their place; or they run once, if the rank's weights fit in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from attention import MLAShape
from model_runner.decoder.base import ModelConfig
from model_runner.parallel.tensor_parallel import Shard
from moe import NativeLinear, fastest_cpu_experts, linear, make_experts
from ubatch import ConfigError
from ubatch.kernels import best_times

_DTYPES = (torch.bfloat16, torch.float32)
_TOKENS = (16, 256)  # of a decode step, and of a prefill
_MARGIN = 1.1  # bfloat16 must be this much faster, or the choice would follow the noise
_MOST_WEIGHTS = 1 << 21  # that are measured of a matrix, or of a layer's experts
_LEAST_WIDTH = 256  # of experts that are measured in part
_SECONDS = 0.1  # for all products of a number of tokens
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_CACHE, _LARGEST_CACHE = 32 << 20, 256 << 20
"""Bytes of the last cache, where the system does not say; and most that are believed and read in its place."""


def fastest_cpu_dtype(
    config: ModelConfig, experts_backend: str = "auto", threads: int | None = None, tensor_parallel_size: int = 1
) -> tuple[str, str]:
    """`bfloat16` or `float32`, and the reason with the measured times. Measured once per process and model's sizes.

    Args:
        config: of a checkpoint in bfloat16.
        experts_backend: as of `ModelRunner`.
        threads: compute threads of a rank; None for those of this process.
        tensor_parallel_size: ranks that share a replica: a rank's products are narrower, and it has fewer experts.
    """
    own = torch.get_num_threads()
    if config.biased_experts and experts_backend == "auto":
        experts_backend = "grouped"
    try:
        torch.set_num_threads(threads or own)
        bfloat16, float32 = _measure(_Sizes.of(config, tensor_parallel_size), experts_backend, torch.get_num_threads())
    except ConfigError as error:  # of experts that were asked for by name
        return "float32", f"bfloat16 cannot be measured here: {error}"
    finally:
        torch.set_num_threads(own)
    pairs = list(zip(_TOKENS, bfloat16, float32, strict=True))
    ratio = math.sqrt(math.prod(slow / fast for _, fast, slow in pairs))
    words = "{:.2g} ms, not {:.2g}, for a layer's products of {} tokens"
    times = "; ".join(words.format(fast * 1e3, slow * 1e3, tokens) for tokens, fast, slow in pairs)
    if ratio < _MARGIN:
        return "float32", f"bfloat16 is {ratio:.2f}x as fast on this CPU ({times})"
    return "bfloat16", f"{ratio:.2f}x as fast as float32 on this CPU ({times})"


@dataclass(frozen=True)
class _Sizes:
    """What the products of a rank depend on.

    Attributes:
        projections: (inputs, outputs) of one layer's attention, and of a dense MLP if some layer has one.
        logits: of the last product.
        experts: number, top-k, hidden and intermediate size; None for a dense model.
        layers: of the model.
        ranks: that share the experts, and the tokens that visit them.
    """

    projections: tuple[tuple[int, int], ...]
    logits: tuple[int, int]
    experts: tuple[int, int, int, int] | None
    layers: int
    ranks: int = 1

    @classmethod
    def of(cls, config: ModelConfig, tensor_parallel_size: int = 1) -> _Sizes:
        """Of a rank, with the shares of attention and dense MLPs that the layers load."""
        shard, hidden = Shard(0, tensor_parallel_size), config.hidden_size
        shape = shard.attention(config.attention)
        if isinstance(shape, MLAShape):
            first = shape.num_heads * shape.qk_head_dim + shape.kv_lora_rank + shape.qk_rope_head_dim
            last = shape.num_heads * shape.v_head_dim
        else:
            first = shape.num_heads * shape.head_dim + shape.num_kv_heads * (shape.head_dim + shape.value_dim)
            last = shape.num_heads * shape.value_dim
        projections = [(hidden, first), (last, hidden)]
        dense, width = config.dense_intermediate_size, config.expert_intermediate_size
        if dense is not None:
            columns = shard.part(dense).size
            projections += [(hidden, 2 * columns), (columns, hidden)]
        experts = None if width is None else (config.num_experts, config.num_experts_per_tok, hidden, width)
        return cls(tuple(projections), (hidden, config.vocab_size), experts, config.num_layers, tensor_parallel_size)

    @property
    def weights(self) -> int:
        """Numbers of all layers and the logits, as if all layers were alike."""
        layer = sum(inputs * outputs for inputs, outputs in self.projections)
        if self.experts is not None:
            number, _, hidden, width = self.experts
            layer += number * 3 * hidden * width // self.ranks
        return self.layers * layer + math.prod(self.logits)


_Part = tuple[int, float, Callable[[], Tensor]]
"""Tokens of a product, how many times what is measured a layer has of it, and how to run it."""


@cache
def _measure(sizes: _Sizes, experts_backend: str, threads: int) -> tuple[list[float], list[float]]:
    """Seconds of a layer's products for each of `_TOKENS`, in bfloat16 and in float32; `threads` are torch's now."""
    found: tuple[list[float], list[float]] = [], []
    with torch.inference_mode():
        backends = [fastest_cpu_experts(dtype, torch.device("cpu")) for dtype in _DTYPES]
        if experts_backend != "auto":
            backends = [experts_backend] * len(_DTYPES)
        both = list(zip(*map(partial(_products, sizes), _DTYPES, backends), strict=True))
        for tokens, fits in zip(_TOKENS, (_fits(sizes), [True, True]), strict=True):
            parts = [part for pair in both for part in pair if part[0] == tokens]  # a dtype has every other one
            times = _best_times([run for _, _, run in parts], fits)
            layer = [share * seconds for (_, share, _), seconds in zip(parts, times, strict=True)]
            for place, seconds in enumerate(found):
                seconds.append(sum(layer[place::2]))
    return found


def _fits(sizes: _Sizes) -> list[bool]:
    """For each dtype, whether all weights of the rank fit in the last cache."""
    return [sizes.weights * dtype.itemsize < _cache_bytes() for dtype in _DTYPES]


def _cache_bytes() -> int:
    """Bytes of the processor's last cache, as far as the system knows."""
    try:
        found = [file.read_text(encoding="ascii").strip() for file in _CACHES.glob("index*/size")]
        largest = max((int(size.removesuffix("K")) << 10 for size in found), default=0)
    except (OSError, ValueError):
        largest = 0
    return min(largest or _USUAL_CACHE, _LARGEST_CACHE)


def _products(sizes: _Sizes, dtype: torch.dtype, backend: str) -> Iterator[_Part]:
    """All products of a layer, and its share of the logits."""
    last = sizes.logits, _TOKENS[:1], sizes.layers  # a prefill needs one row of a prompt
    for (inputs, outputs), all_tokens, shared in [*((size, _TOKENS, 1) for size in sizes.projections), last]:
        measured = min(outputs, max(64, _MOST_WEIGHTS // inputs))
        weight = _ones(dtype, measured, inputs)
        layer = NativeLinear(weight) if backend == "native" else partial(linear, weight=weight)
        for tokens in all_tokens:
            yield tokens, outputs / measured / shared, partial(layer, _ones(dtype, tokens, inputs))
    if sizes.experts is not None:
        yield from _experts(sizes.experts, sizes.ranks, dtype, backend)


def _experts(size: tuple[int, int, int, int], ranks: int, dtype: torch.dtype, backend: str) -> Iterator[_Part]:
    """Some experts, each with as many rows as it has on average; at least one."""
    number, top_k, hidden, width = size
    held = min(number, max(2, _MOST_WEIGHTS // (3 * hidden * width)))
    part = width
    if held * 3 * hidden * width > _MOST_WEIGHTS:
        part = min(width, max(_LEAST_WIDTH, _MOST_WEIGHTS // (3 * hidden * held)) // 64 * 64)
    w13, w2 = _ones(dtype, held, 2 * part, hidden), _ones(dtype, held, hidden, part)
    layer = make_experts(backend, w13, w2, num_experts=held)
    for tokens in _TOKENS:
        rows = held * max(1, tokens * top_k // number)
        routed = (torch.arange(rows, device="cpu")[:, None] % held, torch.ones(rows, 1, device="cpu"))
        share = min(number, tokens * top_k) * width / (held * part) / ranks
        yield tokens, share, partial(layer, _ones(dtype, rows, hidden), *routed)


def _ones(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.ones(size, dtype=dtype, device="cpu")


def _best_times(ways: Sequence[Callable[[], Tensor]], fits: Sequence[bool]) -> list[float]:
    """The best time of each way, in seconds.

    Args:
        ways: in turns for each dtype.
        fits: for each dtype, whether the weights are in the last cache when a step needs them, or it does not matter.
    """
    if all(fits):
        return best_times(ways, _SECONDS)
    other = _ones(torch.float32, 3 * _cache_bytes() // 2 // torch.float32.itemsize)

    def before(place: int) -> None:
        if place == 0:
            other.sum()  # takes the place of all weights
        if fits[place % len(fits)]:
            ways[place]()

    return best_times(ways, _SECONDS, before)
