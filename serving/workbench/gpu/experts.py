"""Fused MoE layers in the shapes of Qwen3-30B-A3B: 128 experts of width 768, hidden size 2,048, 8 experts per token.

Decode-sized batches read nearly all weights for a few rows each, so memory bounds them:

    floor    time to move the bytes of the visited experts, the tokens and the results once, at the bandwidth of a copy
             on this device

Prefill-sized batches are bound by the matrix units: 6 T k H I operations, compared with the rate of a large product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe import make_experts
from serving.workbench.bench.statistics import bootstrap, paired
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.peers import GROUPED_MM, Layer, grouped_products, peers
from serving.workbench.gpu.report import Section, in_a_line

_OURS = "triton"
_PRODUCTS = "grouped products alone"


@dataclass(frozen=True)
class MoEShape:
    """Sizes of one layer; by default those of Qwen3-30B-A3B."""

    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    intermediate: int = 768


_TINY = MoEShape(experts=2, top_k=2, hidden=32, intermediate=16)


def make_layer(bench: Bench, shape: MoEShape, tokens: int, like: Layer | None = None) -> Layer:
    """Random tokens and random experts (those of `like` if given); every choice of experts is equally likely."""
    torch.manual_seed(tokens)
    if like is None:
        w13 = bench.randn(shape.experts, 2 * shape.intermediate, shape.hidden).mul_(shape.hidden**-0.5)
        w2 = bench.randn(shape.experts, shape.hidden, shape.intermediate).mul_(shape.intermediate**-0.5)
    else:
        w13, w2 = like.w13, like.w2
    scores = torch.rand(tokens, shape.experts, device=bench.device)
    weights, ids = scores.topk(shape.top_k, dim=1)
    return Layer(w13, w2, bench.randn(tokens, shape.hidden), ids, weights / weights.sum(1, keepdim=True))


def decode(bench: Bench, section: Section) -> None:
    """Goals: at least 0.8 of the floor, and no slower than any peer."""
    section.add("copy bandwidth", bench.copy_bytes_per_s / 1e9, "GB/s")
    for label, layer in _layers(bench, section, (4,) if bench.tiny else (64, 128, 256)):
        floor_ms = _floor_bytes(layer) / bench.copy_bytes_per_s * 1e3
        _measure(bench, section, layer, label, "bandwidth floor", floor_ms, at_least=0.8, peer_goal=1.0)


def prefill(bench: Bench, section: Section) -> None:
    """Goal: at least 0.7 of the measured matrix peak."""
    section.add("matrix peak", bench.matrix_flops_per_s / 1e12, "TFLOP/s")
    for label, layer in _layers(bench, section, (8,) if bench.tiny else (4096, 8192, 16384)):
        flops = 6 * layer.ids.numel() * layer.w2[0].numel()
        peak_ms = flops / bench.matrix_flops_per_s * 1e3
        _measure(bench, section, layer, label, "matrix peak", peak_ms, at_least=0.7, peer_goal=None)


def _layers(bench: Bench, section: Section, sizes: Sequence[int]) -> Iterator[tuple[str, Layer]]:
    """The same experts with each number of tokens."""
    shape = _TINY if bench.tiny else MoEShape()
    section.shape = {**vars(shape), "tokens": list(sizes), "dtype": str(bench.dtype)}
    layer = None
    for tokens in sizes:
        bench.check_time(f"{tokens} tokens")
        layer = make_layer(bench, shape, tokens, like=layer)
        yield f"{tokens} tokens", layer


def _measure(
    bench: Bench,
    section: Section,
    layer: Layer,
    label: str,
    bound: str,
    bound_ms: float,
    *,
    at_least: float,
    peer_goal: float | None,
) -> None:
    """This project's kernels against their bound, and against every peer that computes the same."""
    experts = make_experts(_OURS, layer.w13, layer.w2)
    expected = experts(layer.x, layer.ids, layer.weights)
    arms = {_OURS: bench.kernel(lambda: experts(layer.x, layer.ids, layer.weights))}
    for name, make in peers(layer).items():
        try:
            run = make(layer)
            _check_equal(run(), expected)
            arms[name] = _kernel_or_eager(bench, run)
        except Exception as error:  # a peer library may raise anything; our kernels are measured all the same
            needed = peer_goal if name == GROUPED_MM else None  # torch is always installed; other peers may fail
            section.add(f"{label}: speed against {name}", None, at_least=needed, note=in_a_line(error))
    if GROUPED_MM in arms:
        arms[_PRODUCTS] = bench.kernel(grouped_products(layer))
    measured = section.arms_ms[label] = bench.interleave(arms, label)
    section.add(f"{label}: time", bootstrap(measured[_OURS]), "ms")
    share = bootstrap([bound_ms / each for each in measured[_OURS]])
    section.add(f"{label}: share of the {bound}", share, at_least=at_least)
    for name in [each for each in measured if each != _OURS]:
        goal = peer_goal if name != _PRODUCTS else None
        section.add(f"{label}: speed against {name}", paired(measured[name], measured[_OURS]), at_least=goal)


def _kernel_or_eager(bench: Bench, run: Callable[[], Tensor]) -> Callable[[], float]:
    """An arm for a peer: captured if possible; a peer that reads tensors on the host is timed with its launches."""
    try:
        return bench.kernel(run)
    except RuntimeError:
        bench.synchronize()
        return bench.kernel(run, capture=False)


def _floor_bytes(layer: Layer) -> int:
    """Fewest bytes that must be read and written."""
    visited = layer.ids.unique().numel()
    weights = layer.w13[0].nbytes + layer.w2[0].nbytes
    return int(visited * weights + 2 * layer.x.nbytes)


def _check_equal(other: Tensor, ours: Tensor) -> None:
    error = (other.float() - ours.float()).norm() / ours.float().norm()
    if not error < 2e-2:
        raise ValueError(f"its result differs by {error.item():.2g} of the norm")
