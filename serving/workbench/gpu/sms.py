"""The experts' grouped GEMMs next to a transport that holds SMs while it sends: `host_loopback` with `sms`.

    dealt       every program has its tiles from the start (used without overlap)
    claimed     programs claim their tiles one by one (used in overlapped lanes)
    reserved    as claimed, but only on the SMs that the transport leaves free (`comm_sms`)

Each runs alone, and while messages are sent all the time. With S of N SMs held, the slow-down is at least N / (N - S).
If a program finds no free SM, the tiles dealt to it wait until a message has been sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from moe.all2all import HostLoopbackAll2All
from moe.kernels.align import align_pairs
from moe.kernels.gemm_configs import gemm_configs
from moe.kernels.grouped_gemm import Rows, Weights, project_down, project_up
from serving.workbench.bench.statistics import paired
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.report import Section

_EXPERTS, _TOP_K, _HIDDEN, _INTERMEDIATE, _TOKENS, _TILE_ROWS = 128, 8, 4096, 1536, 4096, 128
_SMS = 16
_MESSAGE = 64 << 20
_TOLERANCE = 1.05


@torch.inference_mode()
def measure(bench: Bench, section: Section) -> None:
    """Goals: slow-down of claimed and reserved at most 1.05 times the least possible; claiming costs at most 3%."""
    total = 4 if bench.tiny else torch.cuda.get_device_properties(bench.device).multi_processor_count
    held = 2 if bench.tiny else _SMS
    section.shape = {"experts": _EXPERTS, "tokens": _TOKENS, "sms": total, "held": held, "tiny": bench.tiny}
    runs = {
        "dealt": _products(bench, total, claimed=False),
        "claimed": _products(bench, total, claimed=True),
        "reserved": _products(bench, total - held, claimed=True),
    }
    expected = runs["dealt"]()
    for run in runs.values():
        torch.testing.assert_close(run(), expected, atol=1e-2, rtol=1e-2)

    loopback = HostLoopbackAll2All(num_experts=_EXPERTS, sms=held)
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


def _products(bench: Bench, sms: int, *, claimed: bool) -> Callable[[], torch.Tensor]:
    """Both projections, always in the same tiles; only how programs get their tiles differs."""
    experts, tokens, hidden, intermediate = (
        (4, 24, 32, 32) if bench.tiny else (_EXPERTS, _TOKENS, _HIDDEN, _INTERMEDIATE)
    )
    rows, top_k = (16, 2) if bench.tiny else (_TILE_ROWS, _TOP_K)
    generator = torch.Generator(bench.device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=bench.device, dtype=bench.dtype) / shape[-1] ** 0.5

    x, w13, w2 = (
        numbers(tokens, hidden),
        numbers(experts, 2 * intermediate, hidden),
        numbers(experts, hidden, intermediate),
    )
    scores = torch.rand(tokens, experts, generator=generator, device=bench.device)
    weights, ids = scores.topk(top_k)
    up, down = (
        replace(gemm_configs(rows, bench.dtype, gated=gated, one_per_sm=True)[0], claimed=claimed)
        for gated in (True, False)
    )
    work = align_pairs(ids, 0, experts, rows)

    def run() -> torch.Tensor:
        inner = project_up(Rows(x), Weights(w13), work, top_k, up, sms)
        return project_down(inner, Weights(w2), work, weights, bench.dtype, down, sms)

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
