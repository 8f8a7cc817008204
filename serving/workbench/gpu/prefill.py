"""Overlapped prefill against the best serial one: layers of Qwen3-235B-A22B's shape, 16,384 tokens, `host_loopback`.

Every arm is a CUDA graph, so no arm waits for its launches:

    compute           the whole batch without copies; messages are packed and unpacked, but not sent
    split_compute     the batch's halves one after the other, without copies
    communication     only the copies, of both halves and all layers
    serial            the whole batch, with its copies
    split_serial      the halves one after the other, with their copies
    overlapped        the halves in lanes

    efficiency           max(split compute, communication) / overlapped
    hidden               (split compute + communication - overlapped) / min(split compute, communication)
    speed-up             best serial arm / overlapped
    schedule_efficiency  time of this schedule on an ideal machine, from the measured stage times / overlapped
    GEMM slow-down       the experts of a half batch during copies / the same alone

The schedule hides most if attention and experts take equally long, so the benchmark chooses the request length that is
nearest to that. The table also has the most that the schedule could reach.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moe.all2all import HostLoopbackAll2All
from serving.workbench.bench.statistics import Interval, bootstrap, fastest, overlap_figures, paired
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.model import LANES, QWEN3_235B_A22B, TINY, Model, Step
from serving.workbench.gpu.report import Arms, Section
from ubatch import Schedule, Transfer, UBatchError
from ubatch.schedules import LayerTimes, layer_program, simulate

_RATIOS = (0.5, 1.0)
_DRIFT = 1.02
_LAYERS = 10
_TOKENS = 16_384
_REQUESTS = (2, 4, 8)


class _StaysHere(HostLoopbackAll2All):
    """`host_loopback` without the copies, to measure its compute cost alone."""

    def travel(self, name: str, rows: Tensor) -> Transfer[Tensor]:
        return Transfer.ready(rows, name)


class _EndedEarly(UBatchError):
    """What was to disturb a measurement ended before it."""


@dataclass(frozen=True)
class _Setting:
    """Shared by all arms: the model, the batch, the transport without and with copies, the time of the experts in one
    layer of a half batch, and that of the whole model, in halves, without copies."""

    model: Model
    step: Step
    here: _StaysHere
    loopback: HostLoopbackAll2All
    experts_ms: float
    compute_ms: float

    @property
    def attention_ms(self) -> float:
        """Time of one layer of a half batch, without the experts."""
        return self.compute_ms / (LANES * self.model.size.num_hidden_layers) - self.experts_ms


@torch.inference_mode()
def measure(bench: Bench, section: Section) -> None:
    """Goals: hidden and efficiency at least 0.95, GEMMs at most 1.03 times slower."""
    size = TINY if bench.tiny else replace(QWEN3_235B_A22B, num_hidden_layers=_LAYERS)
    here = _StaysHere(num_experts=size.num_experts)
    model = Model.random(bench, size, here)
    setting = _choose(bench, model, here)
    step = setting.step
    section.shape = {
        **vars(size),
        "requests": step.metadata.num_reqs,
        "tokens": step.metadata.num_actual_tokens,
        "lanes": LANES,
        "dtype": str(bench.dtype),
        "graphs": bench.captures,
    }
    section.add("tokens", step.metadata.num_actual_tokens)
    section.add("attention : experts", setting.attention_ms / setting.experts_ms, note="1 is best for the schedule")
    section.add("host memory there and back", bench.host_bytes_per_s / 1e9, "GB/s")
    _add_gemm_slowdown(bench, section, setting)
    natural = _median_ms(bench, _copies(bench, setting)) / setting.compute_ms
    section.add("communication / compute with each byte sent once", natural)
    for ratio in _RATIOS[1:] if bench.tiny else _RATIOS:
        bench.check_time(f"communication {ratio:g}x compute")
        factor = ratio / natural
        if bench.tiny:  # tiny copies take as long as their launches, so that no ratio can be chosen
            factor = min(max(factor, 1.0), 4.0)
        if factor < 1:
            note = "the link is too slow for this ratio: not every byte of the payload could be sent"
            section.add(f"communication {ratio:g}x compute: hidden", None, at_least=0.95, note=note)
            continue
        setting.loopback.bytes_factor = factor
        _measure_ratio(bench, section, setting, f"communication {ratio:g}x compute")


def _choose(bench: Bench, model: Model, here: _StaysHere) -> _Setting:
    """Choose the batch whose attention and experts take most nearly the same time."""
    tokens = 4 if bench.tiny else _TOKENS
    found: list[_Setting] = []
    for requests in _REQUESTS[:1] if bench.tiny else _REQUESTS:
        step = Step(bench, model, requests, tokens // requests, tokens // requests)
        experts_ms = bench.kernel(_experts_of_a_half(bench, model, step))()
        compute_ms = _median_ms(bench, partial(step.run_halves, model.module))
        loopback = HostLoopbackAll2All(num_experts=here.num_experts)
        found.append(_Setting(model, step, here, loopback, experts_ms, compute_ms))
    return min(found, key=lambda each: abs(each.attention_ms - each.experts_ms))


def _measure_ratio(bench: Bench, section: Section, setting: _Setting, label: str) -> None:
    model, step = setting.model, setting.step
    wrapper = model.wrapped(bench)
    whole, halves = partial(step.run, model.module, step.whole), partial(step.run_halves, model.module)
    try:
        runs = {
            "compute": bench.step(whole),
            "split_compute": bench.step(halves),
            "communication": bench.step(_copies(bench, setting)),
        }
        model.travel_by(setting.loopback)
        runs["serial"] = bench.step(whole)
        runs["split_serial"] = bench.step(halves)
        lanes = partial(step.run, wrapper, step.overlapped)
        graph = step.capture(bench, wrapper, step.overlapped, lanes, torch.cat(halves()))
        runs["overlapped"] = lanes if graph is None else graph.replay
        timed = {name: bench.timed(run) for name, run in runs.items()}
        arms = section.arms_ms[label] = bench.interleave(timed, label)
    finally:
        wrapper.close()
        model.travel_by(setting.here)
    for name, values in arms.items():
        section.add(f"{label}: {name}", bootstrap(values), "ms")
    for name, figure in figures_of(arms, _ideal_ms(setting, arms, wrapper.ubatch_config.resolved_schedule())).items():
        goal = 0.95 if name in ("hidden", "efficiency") else None
        if figure.low > _DRIFT and name != "speed-up":
            section.add(f"{label}: {name}", None, at_least=goal, note=f"void, {figure:.3f}: the machine drifted")
        else:
            section.add(f"{label}: {name}", figure, at_least=goal)


def figures_of(arms: Arms, ideal_ms: float) -> dict[str, Interval]:
    """The figures listed at the top of this module, from the arms' block means and the schedule's time on an ideal
    machine."""
    overlapped = arms["overlapped"]
    efficiency, hidden = overlap_figures(arms["split_compute"], arms["communication"], overlapped)
    best = fastest(arms, ("serial", "split_serial"))
    return {
        "hidden": hidden,
        "efficiency": efficiency,
        "schedule_efficiency": bootstrap([ideal_ms / t for t in overlapped]),
        "speed-up": paired(arms[best], overlapped),
    }


def _ideal_ms(setting: _Setting, arms: Arms, schedule: Schedule) -> float:
    """Time of this schedule on an ideal machine, from the measured stage times."""
    layers = setting.model.size.num_hidden_layers
    per_layer = statistics.median(arms["communication"]) / (LANES * layers)
    scale = statistics.median(arms["split_compute"]) / setting.compute_ms
    times = LayerTimes(
        attn_core=max(0.0, setting.attention_ms) * scale,
        experts=setting.experts_ms * scale,
        dispatch=per_layer / 2,
        combine=per_layer / 2,
    )
    return simulate([layer_program(times, layers, schedule)] * LANES, schedule).seconds


# -- what the arms run ------------------------------------------------------------------------------------------------


def _copies(bench: Bench, setting: _Setting) -> Callable[[], None]:
    """Messages of the halves' sizes, sent one after the other."""
    size, top_k = setting.model.size, setting.model.size.num_experts_per_tok
    routing = 8 * top_k // bench.dtype.itemsize
    messages = []
    for part in setting.step.slices:
        for width, name in ((size.hidden_size + routing, "dispatch"), (size.hidden_size, "combine")):
            rows = bench.randn(part.num_tokens, width)
            messages.append((name, rows))

    def run() -> None:
        for _ in range(size.num_hidden_layers):
            for name, rows in messages:
                setting.loopback.travel(name, rows).wait()

    return run


def _experts_of_a_half(bench: Bench, model: Model, step: Step) -> Callable[[], Tensor]:
    """One layer's experts on the tokens of a half, with random routing."""
    size, kernel = model.size, next(model.kernels)
    x = bench.randn(step.slices[0].num_tokens, size.hidden_size)
    weights, ids = torch.rand(x.shape[0], size.num_experts, device=bench.device).topk(size.num_experts_per_tok)
    return lambda: kernel.experts(x, ids, weights)


def _median_ms(bench: Bench, run: Callable[[], object]) -> float:
    arm = bench.timed(bench.step(run))
    return statistics.median(arm() for _ in range(1 if bench.tiny else 5))


# -- do copies slow products down? ------------------------------------------------------------------------------------


def _add_gemm_slowdown(bench: Bench, section: Section, setting: _Setting) -> None:
    """Time the experts' products alone, and while copies run all the time."""
    products = _experts_of_a_half(bench, setting.model, setting.step)
    copies = _copies(bench, setting)
    if bench.device.type == "cuda":
        alone, beside = _beside_copies(bench, products, copies)
    else:  # on a CPU nothing runs concurrently
        alone, beside = bench.timed(products), bench.timed(products)
    figure, note = None, ""
    try:
        timed = {"alone": alone, "beside_copies": beside}
        arms = section.arms_ms["GEMM slow-down"] = bench.interleave(timed, "GEMM slow-down")
        figure = paired(arms["beside_copies"], arms["alone"])
    except _EndedEarly as early:
        note = str(early)
    section.add("GEMM slow-down beside copies", figure, at_most=1.03, note=note)


def _beside_copies(
    bench: Bench, products: Callable[[], object], copies: Callable[[], object]
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Two arms for one graph of products: with an idle and with a busy link."""
    for run in (products, copies):
        run()
    copies_ms, products_ms = bench.timed(copies)(), bench.timed(products)()
    repeats = max(1, round(copies_ms / (4 * products_ms)))  # so that the copies last longer than the products
    graph, traffic = bench.captured(products, repeats), bench.captured(copies)
    begin, end, copied = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    side = torch.cuda.Stream()

    def measure(busy: bool) -> float:
        bench.synchronize()
        if busy:
            with torch.cuda.stream(side):
                traffic.replay()
                copied.record()
        begin.record()
        graph.replay()
        end.record()
        bench.synchronize()
        # Tiny copies end before the host has launched the products.
        if busy and not bench.tiny and begin.elapsed_time(copied) < begin.elapsed_time(end):
            raise _EndedEarly("the copies ended before the products, so the slow-down would be understated")
        return float(begin.elapsed_time(end)) / repeats

    return lambda: measure(False), lambda: measure(True)
