"""Cost of a hand-off in eager steps without communication.

The two halves of a decode batch run one after the other, and in lanes, over the `local` transport, so that there is
nothing to hide. The difference is the cost of lanes: hand-offs, contexts, splitting, merging. Eager steps of this size
are bound by the CPU that launches kernels, and every hand-off delays it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe import make_all2all
from serving.workbench.bench.statistics import bootstrap
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.model import QWEN3_30B_A3B, TINY, Model, Step
from serving.workbench.gpu.report import Section

_LAYERS = 8


@torch.inference_mode()
def measure(bench: Bench, section: Section) -> None:
    """Measure and print the cost; there is no goal."""
    requests, context = (2, 20) if bench.tiny else (64, 1024)
    size = TINY if bench.tiny else replace(QWEN3_30B_A3B, num_hidden_layers=_LAYERS)
    model = Model.random(bench, size, make_all2all("local", group=None, num_experts=size.num_experts))
    step = Step(bench, model, requests, 1, context)
    section.shape = {**vars(size), "requests": requests, "context": context, "dtype": str(bench.dtype)}
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
        measured = bench.interleave(arms, "eager lanes")
        seen = wrapper.statistics()
    finally:
        wrapper.close()
    section.arms_ms["lanes"] = measured
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
