"""Steps of decode: CPU time of one that is a CUDA graph, and the cost of a hand-off in eager ones.

`measure` runs Qwen3-30B-A3B, 64 requests, all 48 layers:

    replay      only the launch of the captured graph
    whole step  all work of the model runner: copy the batch to the device, update the static attention plans, copy the
                wrapper's arguments in, launch, and copy the output out

CPU times are measured on an idle device, so that no call waits for it. The plain graph uses the `local` transport; the
overlapped graph runs two lanes over `host_loopback`. A decode of this size is bound by memory, so overlap is not
expected to pay; the device's times show its cost.

`eager_lanes` runs the two halves of such a batch, in 8 layers, one after the other, and in lanes, over the `local`
transport, so that there is no communication to hide. The difference is the cost of lanes: hand-offs, contexts,
splitting, merging. Eager steps of this size are bound by the CPU that launches kernels, and every hand-off delays it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model_runner import RandomQwen3Moe
from moe import All2All, make_all2all
from moe.all2all import HostLoopbackAll2All
from serving.workbench.bench.statistics import Interval, bootstrap
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.model import QWEN3_30B_A3B, TINY, Model, Step
from serving.workbench.gpu.report import Section
from ubatch import set_forward_context

_EAGER_LAYERS = 8
_LAUNCHES = ("GraphLaunch", "LaunchKernel", "Memcpy", "Memset")


@torch.inference_mode()
def measure(bench: Bench, section: Section) -> None:
    """Goals: one graph launch per step; a plain replay at most 30 us of CPU, a whole plain step at most 200 us."""
    size = TINY if bench.tiny else _fitting(QWEN3_30B_A3B)
    model, step = _decode_batch(bench, section, size, static=True)
    section.shape["graphs"] = bench.captures

    arms = {"eager": bench.timed(lambda: step.run(model.module, step.whole))}
    eager = section.arms_ms["eager"] = bench.interleave(arms, "eager")
    section.add("plain, eager: step", bootstrap(eager["eager"]), "ms")
    transports: dict[str, All2All[Any]] = {
        "plain": make_all2all("local", group=None, num_experts=size.num_experts),
        "overlapped": HostLoopbackAll2All(num_experts=size.num_experts),
    }
    for name, transport in transports.items():
        bench.check_time(f"the {name} graph")
        model.travel_by(transport)
        _measure_graph(bench, section, model, step, name)


def _decode_batch(bench: Bench, section: Section, size: RandomQwen3Moe, *, static: bool = False) -> tuple[Model, Step]:
    """A model over the `local` transport, and a batch of requests that decode."""
    requests, context = (2, 20) if bench.tiny else (64, 1024)
    section.shape = {**vars(size), "requests": requests, "context": context, "dtype": str(bench.dtype)}
    model = Model.random(bench, size, make_all2all("local", group=None, num_experts=size.num_experts))
    return model, Step(bench, model, requests, 1, context, static=static)


def _fitting(size: RandomQwen3Moe) -> RandomQwen3Moe:
    """The model with as many layers as fit into free memory, with room for the cache and the graphs."""
    free, _ = torch.cuda.mem_get_info()
    per_layer = 3 * size.num_experts * size.hidden_size * size.moe_intermediate_size * 2 * 1.05
    return replace(size, num_hidden_layers=max(1, min(size.num_hidden_layers, int(0.75 * free / per_layer))))


def _measure_graph(bench: Bench, section: Section, model: Model, step: Step, name: str) -> None:
    overlapped = name == "overlapped"
    context = step.overlapped if overlapped else step.whole
    wrapper = model.wrapped(bench, overlapped=overlapped)

    def whole_step() -> Tensor:
        ids, positions = step.refresh(overlapped=overlapped)
        with set_forward_context(context):
            hidden: Tensor = wrapper(ids, positions)
        return hidden

    try:
        calls = 1 if bench.tiny else 20
        graph = step.capture(bench, wrapper, context, whole_step, whole_step().clone())
        arms: dict[str, Callable[[], float]] = {}
        if graph is not None:
            section.add(f"{name}: capture", graph.seconds, "s")
            section.add(f"{name}: the graph pool grew by", graph.nbytes / 2**20, "MiB")
            arms["replay"] = bench.launched(graph.replay, calls)
        arms["whole_step"] = bench.launched(whole_step, calls)
        arms["device"] = bench.timed(whole_step)
        measured = section.arms_ms[name] = bench.interleave(arms, f"{name} decode")
        launches = _launches(bench, whole_step)
    finally:
        wrapper.close()
    _add(section, name, measured, launches, judged=not overlapped)


def _add(
    section: Section, name: str, measured: dict[str, list[float]], launches: Counter[str] | None, *, judged: bool
) -> None:
    replay = _microseconds(measured["replay"]) if "replay" in measured else None
    note = "" if replay is not None else "nothing is captured here"
    section.add(f"{name}: CPU of replay()", replay, "us", at_most=30 if judged else None, note=note)
    whole = _microseconds(measured["whole_step"])
    section.add(f"{name}: CPU of a whole step", whole, "us", at_most=200 if judged else None)
    section.add(f"{name}: step, until the device is done", bootstrap(measured["device"]), "ms")
    note = "" if launches is not None else "the profiler saw no launches"
    graphs = None if launches is None else float(launches["GraphLaunch"])
    section.add(f"{name}: graph launches per step", graphs, at_most=1, note=note)
    if launches is not None:
        rest = ", ".join(f"{count} {kind}" for kind, count in launches.items() if kind != "GraphLaunch")
        section.add(f"{name}: other launches per step", float(launches.total() - launches["GraphLaunch"]), note=rest)


def _microseconds(milliseconds: list[float]) -> Interval:
    return bootstrap([each * 1e3 for each in milliseconds])


def _launches(bench: Bench, run: Callable[[], object]) -> Counter[str] | None:
    """Launches that one `run` makes through the CUDA runtime and driver, by kind; None if the profiler sees none."""
    if bench.device.type != "cuda":
        return None
    bench.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        bench.synchronize()
    found = count_launches(event.name for event in profile.events())
    return found if found else None


def count_launches(names: Iterable[str]) -> Counter[str]:
    """Count launches by kind in a profile's events: runtime (`cudaLaunchKernel`) or driver (`cuLaunchKernelEx`)."""
    calls = [name for name in names if re.fullmatch(r"cu(da)?[A-Z]\w*", name)]
    return Counter(kind for name in calls for kind in _LAUNCHES if kind in name)


# -- eager lanes -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def eager_lanes(bench: Bench, section: Section) -> None:
    """Measure and print the cost; there is no goal."""
    size = TINY if bench.tiny else replace(QWEN3_30B_A3B, num_hidden_layers=_EAGER_LAYERS)
    model, step = _decode_batch(bench, section, size)
    wrapper = model.wrapped(bench, captured=False)

    def back_to_back() -> Tensor:
        return torch.cat(step.run_halves(model.module))

    def lanes() -> Tensor:
        return step.run(wrapper, step.overlapped)

    try:
        with wrapper.no_timeout():
            torch.testing.assert_close(lanes(), back_to_back(), atol=2e-2, rtol=2e-2)
        before = wrapper.statistics()
        arms = {
            "back_to_back": bench.timed(back_to_back),
            "lanes": bench.timed(lanes),
            "back_to_back_launched": bench.launched(back_to_back),
            "lanes_launched": bench.launched(lanes),
        }
        measured = section.arms_ms["lanes"] = bench.interleave(arms, "eager lanes")
        seen = wrapper.statistics()
    finally:
        wrapper.close()
    handoffs = (seen.handoffs - before.handoffs) / (seen.engaged - before.engaged)
    for name, values in measured.items():
        section.add(name.replace("_", " "), bootstrap(values), "ms")
    layers = size.num_hidden_layers
    section.add("hand-offs per layer", handoffs / layers)
    for what, suffix in (("step", ""), ("launching", "_launched")):
        pairs = zip(measured[f"lanes{suffix}"], measured[f"back_to_back{suffix}"], strict=True)
        extra_us = [(lane - plain) * 1e3 for lane, plain in pairs]
        section.add(f"lanes' cost per layer, {what}", bootstrap([each / layers for each in extra_us]), "us")
        section.add(f"lanes' cost per hand-off, {what}", bootstrap([each / handoffs for each in extra_us]), "us")
