"""The faster dtype on this CPU for a checkpoint in bfloat16: bfloat16, or float32. Chosen by measuring.

The products of one layer are timed in both, in turns, with the kernels that the model would use for each: projections,
dense MLP, experts, and a layer's share of the logits. Few rows (a decode step, where the time goes into reading
weights) and many (a prefill, where it goes into arithmetic) have equal weight. Large matrices are measured in part, so
that all takes well under a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from attention import MLAShape
from model_runner.decoder.base import ModelConfig
from moe import NativeLinear, fastest_cpu_experts, linear, make_experts
from ubatch import ConfigError

__all__ = ["fastest_cpu_dtype"]

_DTYPES = (torch.bfloat16, torch.float32)
_TOKENS = (16, 256)  # of a decode step, and of a prefill
_MARGIN = 1.1  # bfloat16 must be this much faster, or the choice would follow the noise
_MOST_WEIGHTS = 1 << 21  # that are measured of a matrix, or of a layer's experts
_LEAST_WIDTH = 256  # of experts that are measured in part
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20
_SECONDS = 0.02  # for each product and number of tokens, between these rounds


def fastest_cpu_dtype(
    config: ModelConfig, experts_backend: str = "auto", threads: int | None = None
) -> tuple[str, str]:
    """`bfloat16` or `float32`, and the reason with the measured times. Measured once per process and model's sizes.

    Args:
        config: of a checkpoint in bfloat16.
        experts_backend: as of `ModelRunner`.
        threads: compute threads of a rank; None for those of this process.
    """
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or own)
        bfloat16, float32 = _measure(_Sizes.of(config), experts_backend, torch.get_num_threads())
    except ConfigError as error:  # of experts that were asked for by name
        return "float32", f"bfloat16 cannot be measured here: {error}"
    finally:
        torch.set_num_threads(own)
    ratio = math.sqrt(math.prod(slow / fast for fast, slow in zip(bfloat16, float32, strict=True)))
    times = "; ".join(
        f"{fast * 1e3:.2g} ms, not {slow * 1e3:.2g}, for a layer's products of {tokens} tokens"
        for tokens, fast, slow in zip(_TOKENS, bfloat16, float32, strict=True)
    )
    if ratio < _MARGIN:
        return "float32", f"bfloat16 is {ratio:.2f}x as fast on this CPU ({times})"
    return "bfloat16", f"{ratio:.2f}x as fast as float32 on this CPU ({times})"


@dataclass(frozen=True)
class _Sizes:
    """What the products of a model depend on.

    Attributes:
        projections: (inputs, outputs) of one layer's attention, and of a dense MLP if some layer has one.
        logits: of the last product.
        experts: number, top-k, hidden and intermediate size; None for a dense model.
        layers: of the model.
    """

    projections: tuple[tuple[int, int], ...]
    logits: tuple[int, int]
    experts: tuple[int, int, int, int] | None
    layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> _Sizes:
        shape, hidden = config.attention, config.hidden_size
        if isinstance(shape, MLAShape):
            first = shape.num_heads * shape.qk_head_dim + shape.kv_lora_rank + shape.qk_rope_head_dim
            last = shape.num_heads * shape.v_head_dim
        else:
            first = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
            last = shape.num_heads * shape.head_dim
        projections = [(hidden, first), (last, hidden)]
        dense, width = config.dense_intermediate_size, config.expert_intermediate_size
        if dense is not None:
            projections += [(hidden, 2 * dense), (dense, hidden)]
        experts = None if width is None else (config.num_experts, config.num_experts_per_tok, hidden, width)
        return cls(tuple(projections), (hidden, config.vocab_size), experts, config.num_layers)


_Pair = Sequence[Callable[[], Tensor]]
"""One product in both dtypes."""


@cache
def _measure(sizes: _Sizes, experts_backend: str, threads: int) -> tuple[list[float], list[float]]:
    """Seconds of a layer's products for each of `_TOKENS`, in bfloat16 and in float32; `threads` are torch's now."""
    with torch.inference_mode():
        backends = [fastest_cpu_experts(dtype, torch.device("cpu")) for dtype in _DTYPES]
        if experts_backend != "auto":
            backends = [experts_backend] * len(_DTYPES)
        seconds = [[0.0] * len(_TOKENS) for _ in _DTYPES]
        for each in _products(sizes, backends):
            for index, (share, pair) in enumerate(each):
                for total, best in zip(seconds, _best_times(pair), strict=True):
                    total[index] += share * best
    return seconds[0], seconds[1]


def _products(sizes: _Sizes, backends: Sequence[str]) -> Iterator[list[tuple[float, _Pair]]]:
    """Per product and number of tokens: how many times what is measured a layer has of it, and both ways to run it."""
    for inputs, outputs in sizes.projections:
        yield _linear(inputs, outputs, backends, _TOKENS)
    ((share, pair),) = _linear(*sizes.logits, backends, _TOKENS[:1])  # a prefill needs one row of a prompt
    yield [(share / sizes.layers, pair)]
    if sizes.experts is not None:
        yield _experts(*sizes.experts, backends)


def _linear(inputs: int, outputs: int, backends: Sequence[str], all_tokens: Sequence[int]) -> list[tuple[float, _Pair]]:
    measured = min(outputs, max(64, _MOST_WEIGHTS // inputs))
    ways: list[Callable[[Tensor], Tensor]] = []
    for dtype, backend in zip(_DTYPES, backends, strict=True):
        weight = _ones(dtype, measured, inputs)
        ways.append(NativeLinear(weight) if backend == "native" else partial(linear, weight=weight))
    return [
        (
            outputs / measured,
            [partial(way, _ones(dtype, tokens, inputs)) for dtype, way in zip(_DTYPES, ways, strict=True)],
        )
        for tokens in all_tokens
    ]


def _experts(number: int, top_k: int, hidden: int, width: int, backends: Sequence[str]) -> list[tuple[float, _Pair]]:
    """Some experts, each with as many rows as it has on average; at least one."""
    held = min(number, max(2, _MOST_WEIGHTS // (3 * hidden * width)))
    part = width
    if held * 3 * hidden * width > _MOST_WEIGHTS:
        part = min(width, max(_LEAST_WIDTH, _MOST_WEIGHTS // (3 * hidden * held)) // 64 * 64)
    layers = [
        make_experts(name, _ones(dtype, held, 2 * part, hidden), _ones(dtype, held, hidden, part), num_experts=held)
        for dtype, name in zip(_DTYPES, backends, strict=True)
    ]
    found: list[tuple[float, _Pair]] = []
    for tokens in _TOKENS:
        rows = held * max(1, tokens * top_k // number)
        routed = (torch.arange(rows, device="cpu")[:, None] % held, torch.ones(rows, 1, device="cpu"))
        pair = [
            partial(layer, _ones(dtype, rows, hidden), *routed) for dtype, layer in zip(_DTYPES, layers, strict=True)
        ]
        found.append((min(number, tokens * top_k) * width / (held * part), pair))
    return found


def _ones(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.ones(size, dtype=dtype, device="cpu")


def _best_times(ways: _Pair) -> list[float]:
    """The best time of each, in seconds; in turns, so that load on the machine slows all of them alike."""
    best = [math.inf] * len(ways)
    for way in ways:
        way()
    end = time.perf_counter() + _SECONDS
    for done in range(_MOST_ROUNDS):
        if done >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for index, way in enumerate(ways):
            start = time.perf_counter()
            way()
            best[index] = min(best[index], time.perf_counter() - start)
    return best
