"""Launches per layer of a Qwen3-30B-A3B decode step at batch 64, eager. Whoever makes it fewer lowers the table."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from stub_cuda.build import FIGURES
from stub_cuda.counts import counted, launches, of

from moe import All2All, make_all2all
from moe.all2all.host_loopback import HostLoopbackAll2All
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.model import QWEN3_30B_A3B, Model, Step
from ubatch import set_forward_context


@dataclass(frozen=True)
class Arm:
    """A step, and the most launches that one of its layers may take."""

    at_most: int
    lanes: bool
    transport: Callable[[int], All2All]


ARMS = {
    "whole, local": Arm(13, False, lambda experts: make_all2all("local", group=None, num_experts=experts)),
    "whole, host_loopback": Arm(23, False, lambda experts: HostLoopbackAll2All(num_experts=experts)),
    "two lanes, host_loopback": Arm(48, True, lambda experts: HostLoopbackAll2All(num_experts=experts)),
}
FEW, MANY = 2, 6
"""Layers of the two models whose difference is what a layer takes."""
BATCH, TOKENS, RUNS = 64, 1024, 10


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("name", ARMS)
@torch.inference_mode()
def test_a_layer_launches_no_more_than_the_table_says(name: str) -> None:
    arm = ARMS[name]
    few, few_us = measured(arm, FEW)
    many, many_us = measured(arm, MANY)
    per_layer = {what: (many[what] - few[what]) / (MANY - FEW) for what in many}
    total = launches(Counter(per_layer))
    host_us = round((many_us - few_us) / (MANY - FEW))
    print(f"{name}: {total:g} launches per layer, {host_us} us of processor time")
    if FIGURES in os.environ:
        file = Path(os.environ[FIGURES])
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        known[name] = {"launches": total, "at most": arm.at_most, "processor_us": host_us}
        file.write_text(json.dumps(known), encoding="utf-8")
    assert not of(many, "module load", "malloc", "wait", "refused"), "warm, it only launches"
    assert total <= arm.at_most, "\n".join(f"{number:6.2f} {what}" for what, number in sorted(per_layer.items()))


def measured(arm: Arm, layers: int) -> tuple[Counter[str], float]:
    """What one step launches, and its microseconds of the host's processors, of all threads together."""
    bench = Bench(torch.device("cuda", 0), blocks=1)
    size = replace(QWEN3_30B_A3B, num_hidden_layers=layers)
    model = Model.random(bench, size, arm.transport(size.num_experts))
    step = Step(bench, model, BATCH, 1, TOKENS, static=True)
    wrapper = model.wrapped(bench, overlapped=True, captured=False) if arm.lanes else None

    def run() -> None:
        if wrapper is None:
            step.run(model.module, step.whole)
        else:
            with set_forward_context(step.overlapped):
                wrapper(step.input_ids, step.positions)

    try:
        for _ in range(3):
            run()
        with counted() as found:
            run()
        seconds = []
        for _ in range(RUNS):
            torch.cuda.synchronize()
            begun = time.process_time()
            run()
            seconds.append(time.process_time() - begun)
    finally:
        if wrapper is not None:
            wrapper.close()
    return found, statistics.median(seconds) * 1e6
