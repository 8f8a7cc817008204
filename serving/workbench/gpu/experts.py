"""Fused MoE layers in the shapes of Qwen3-30B-A3B: 128 experts of width 768, hidden size 2,048, 8 experts per token.

Decode-sized batches read nearly all weights for a few rows each, so memory bounds them:

    floor    time to move the bytes of the visited experts, the tokens and the results once, at the bandwidth of a copy
             on this device

Prefill-sized batches are bound by the matrix units: 6 T k H I operations, compared with the rate of a large product.

Peers are the same gated experts, computed by torch's grouped product and by other installed libraries. Each peer's
result is compared with this project's before it is timed. A peer that differs, is not installed or does not run here
gets a row with the reason.

`beside_transport` measures grouped GEMMs next to a transport that holds SMs while it sends: `host_loopback` with `sms`.

    dealt       every program has its tiles from the start (used without overlap)
    claimed     programs claim their tiles one by one (used in overlapped lanes)
    reserved    as claimed, but only on the SMs that the transport leaves free (`comm_sms`)

Each runs alone, and while messages are sent all the time. With S of N SMs held, the slow-down is at least N / (N - S).
If a program finds no free SM, the tiles dealt to it wait until a message has been sent.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from moe import experts_backends, make_experts
from moe.all2all import HostLoopbackAll2All
from moe.kernels.align import align_pairs
from moe.kernels.gemm_configs import gemm_configs
from moe.kernels.grouped_gemm import Rows, Weights, project_down, project_up
from serving.workbench.bench.statistics import bootstrap, paired
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.report import Section, in_a_line

_OURS = "triton"
GROUPED_MM = "torch._grouped_mm"
_PRODUCTS = "grouped products alone"


@dataclass(frozen=True)
class MoEShape:
    """Sizes of one layer; by default those of Qwen3-30B-A3B."""

    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    intermediate: int = 768


_TINY = MoEShape(experts=2, top_k=2, hidden=32, intermediate=16)


@dataclass(frozen=True)
class Layer:
    """One MoE layer's experts and a batch for them: `w13` `[E, 2 * I, H]` (gate first), `w2` `[E, H, I]`, `x` `[T, H]`,
    `ids` `[T, k]` int64 and `weights` `[T, k]` float32."""

    w13: Tensor
    w2: Tensor
    x: Tensor
    ids: Tensor
    weights: Tensor


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


# -- peers: torch ------------------------------------------------------------------------------------------------------


def peers(layer: Layer) -> dict[str, Callable[[Layer], Callable[[], Tensor]]]:
    """The libraries on this machine: name -> function that imports and prepares one, and may raise anything.

    What it returns computes the layer's output `[T, H]`.
    """
    found: dict[str, Callable[[Layer], Callable[[], Tensor]]] = {GROUPED_MM: _grouped_mm}
    if layer.x.device.type == "cuda":
        makers = {"flashinfer": _flashinfer, "vllm": _vllm, "sglang": _sglang}
        found |= {name: make for name, make in makers.items() if importlib.util.find_spec(name) is not None}
    return found


def _grouped_mm(layer: Layer) -> Callable[[], Tensor]:
    """Sort pairs by expert, run two grouped products, weigh, un-sort, sum. Reads nothing on the host."""

    def run() -> Tensor:
        tokens, top_k = layer.ids.shape
        order, ends = _sorted_pairs(layer)
        y = _products(layer, layer.x[order // top_k], ends)
        y = y * layer.weights.flatten()[order][:, None].to(y.dtype)
        pairs = torch.empty_like(y)
        pairs[order] = y
        return pairs.view(tokens, top_k, -1).sum(1)

    return run


def grouped_products(layer: Layer) -> Callable[[], Tensor]:
    """The two grouped products and the activation alone, over rows that are already sorted."""
    order, ends = _sorted_pairs(layer)
    rows = layer.x[order // layer.ids.shape[1]].contiguous()
    return lambda: _products(layer, rows, ends)


def _sorted_pairs(layer: Layer) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert, and the index at which each expert's pairs end."""
    expert_of_pair, order = layer.ids.flatten().sort(stable=True)
    experts = torch.arange(layer.w13.shape[0], device=layer.ids.device)
    return order, torch.searchsorted(expert_of_pair, experts, right=True).to(torch.int32)


def _products(layer: Layer, rows: Tensor, ends: Tensor) -> Tensor:
    gate, up = torch._grouped_mm(rows, layer.w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return torch._grouped_mm(F.silu(gate) * up, layer.w2.transpose(1, 2), offs=ends)


# -- peers: other libraries --------------------------------------------------------------------------------------------


def _flashinfer(layer: Layer) -> Callable[[], Tensor]:
    if "flashinfer" not in experts_backends():
        raise RuntimeError("this project's flashinfer back end is not registered")
    experts = make_experts("flashinfer", layer.w13, layer.w2)
    return lambda: experts(layer.x, layer.ids, layer.weights)


def _vllm(layer: Layer) -> Callable[[], Tensor]:
    module = importlib.import_module("vllm.model_executor.layers.fused_moe")
    ids = layer.ids.to(torch.int32)
    return lambda: module.fused_experts(layer.x, layer.w13, layer.w2, layer.weights, ids)


def _sglang(layer: Layer) -> Callable[[], Tensor]:
    triton = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton.fused_moe")
    runner = importlib.import_module("sglang.srt.layers.moe.moe_runner")
    topk = importlib.import_module("sglang.srt.layers.moe.topk")
    experts = layer.w13.shape[0]
    config = runner.MoeRunnerConfig(num_experts=experts, num_local_experts=experts, inplace=False)
    routed = topk.StandardTopKOutput(layer.weights, layer.ids.to(torch.int32), layer.weights)
    return lambda: triton.fused_experts(layer.x, layer.w13, layer.w2, routed, config)


# -- next to a transport on SMs ----------------------------------------------------------------------------------------

_BESIDE, _BESIDE_TINY = MoEShape(hidden=4096, intermediate=1536), MoEShape(4, 2, 32, 32)
_HELD = 16
_MESSAGE = 64 << 20
_TOLERANCE = 1.05


@torch.inference_mode()
def beside_transport(bench: Bench, section: Section) -> None:
    """Goals: slow-down of claimed and reserved at most 1.05 times the least possible; claiming costs at most 3%."""
    total = 4 if bench.tiny else torch.cuda.get_device_properties(bench.device).multi_processor_count
    held = 2 if bench.tiny else _HELD
    shape, tokens, rows = (_BESIDE_TINY, 24, 16) if bench.tiny else (_BESIDE, 4096, 128)
    section.shape = {"experts": shape.experts, "tokens": tokens, "sms": total, "held": held, "tiny": bench.tiny}
    layer = make_layer(bench, shape, tokens)
    runs = {
        "dealt": _tiled_products(layer, rows, total, claimed=False),
        "claimed": _tiled_products(layer, rows, total, claimed=True),
        "reserved": _tiled_products(layer, rows, total - held, claimed=True),
    }
    expected = runs["dealt"]()
    for run in runs.values():
        torch.testing.assert_close(run(), expected, atol=1e-2, rtol=1e-2)

    loopback = HostLoopbackAll2All(num_experts=shape.experts, sms=held)
    message = bench.randn(1, (1 << 12 if bench.tiny else _MESSAGE) // bench.dtype.itemsize)
    beside = _beside(bench, lambda: loopback.travel("message", message).wait(), runs["dealt"])
    arms: dict[str, Callable[[], float]] = {f"{name} alone": bench.kernel(run) for name, run in runs.items()}
    arms |= {f"{name} beside": beside(run) for name, run in runs.items()}
    bench.check_time("the products")
    found = section.arms_ms["products"] = bench.interleave(arms, "products next to a transport on SMs")

    least = total / (total - held)
    section.add(f"least slow-down, with {held} of {total} SMs held", least)
    section.add("claimed / dealt, alone", paired(found["claimed alone"], found["dealt alone"]), at_most=1.03)
    for name in runs:
        slower = paired(found[f"{name} beside"], found["dealt alone"])
        section.add(f"{name} beside: slow-down", slower, at_most=None if name == "dealt" else _TOLERANCE * least)


def _tiled_products(layer: Layer, rows: int, sms: int, *, claimed: bool) -> Callable[[], Tensor]:
    """Both projections, always in the same tiles of so many rows; only how programs get their tiles differs."""
    dtype, top_k = layer.x.dtype, layer.ids.shape[1]
    up, down = (
        replace(gemm_configs(rows, dtype, gated=gated, one_per_sm=True)[0], claimed=claimed) for gated in (True, False)
    )
    work = align_pairs(layer.ids, 0, layer.w13.shape[0], rows)

    def run() -> Tensor:
        inner = project_up(Rows(layer.x), Weights(layer.w13), work, top_k, up, sms)
        return project_down(inner, Weights(layer.w2), work, layer.weights, dtype, down, sms)

    return run


def _beside(
    bench: Bench, send: Callable[[], object], products: Callable[[], object]
) -> Callable[[Callable[[], object]], Callable[[], float]]:
    """Makes arms that run products while messages are sent; the messages last several times as long as the products."""
    send()
    if bench.device.type != "cuda":  # on a CPU nothing runs concurrently
        return lambda run: bench.timed(lambda: (send(), run()))
    messages = max(4, round(8 * bench.kernel(products)() / bench.timed(send)()))
    traffic = bench.captured(send, messages)
    begin, end, ready = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    side = torch.cuda.Stream()

    def arm_of(run: Callable[[], object]) -> Callable[[], float]:
        graph = bench.captured(run, 2)

        def arm() -> float:
            bench.synchronize()
            with torch.cuda.stream(side):
                ready.record()
                traffic.replay()
            ready.synchronize()  # the messages are being sent
            begin.record()
            graph.replay()
            end.record()
            bench.synchronize()
            return float(begin.elapsed_time(end)) / 2

        return arm

    return arm_of
