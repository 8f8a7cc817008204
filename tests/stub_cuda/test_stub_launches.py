"""Launches of a Qwen3-30B-A3B step at batch 64, eager: how many, how long one takes the host, what reaches the driver.

Whoever makes them fewer lowers the table.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_cuda.build import FIGURES
from stub_cuda.counts import compare_launches, counted, launches, of

from moe import All2All, make_all2all
from moe.all2all.host_loopback import HostLoopbackAll2All
from serving.workbench.gpu.bench import Bench
from serving.workbench.gpu.model import QWEN3_30B_A3B, Model, Step
from ubatch import set_forward_context
from ubatch.kernels import quick_launch


@dataclass(frozen=True)
class Arm:
    """A step, and the most launches that one of its layers may take."""

    at_most: int
    lanes: bool
    transport: Callable[[int], All2All]


ARMS = {
    "whole, local": Arm(13, False, lambda experts: make_all2all("local", group=None, num_experts=experts)),
    "whole, host_loopback": Arm(23, False, lambda experts: HostLoopbackAll2All(num_experts=experts)),
    "two lanes, host_loopback": Arm(46, True, lambda experts: HostLoopbackAll2All(num_experts=experts)),
}
FEW, MANY = SIZES = 2, 16
"""Layers of the two models whose difference is what a layer takes."""
BATCH, TOKENS, RUNS, BLOCKS = 64, 1024, 20, 100
MOST_OF_WHOLE = 2.4
"""Processor time of two lanes over that of the whole batch. It is 2.1 to 2.2."""
MOST_ADDS = 4
"""Of torch's, in whose time a kernel is launched."""


def note(name: str, figures: Any) -> None:
    """For the file of results."""
    if FIGURES in os.environ:
        file = Path(os.environ[FIGURES])
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps({**known, name: figures}), encoding="utf-8")


@pytest.mark.timeout(300)  # kernels are compiled
@torch.inference_mode()
def test_a_layer_launches_no_more_than_the_table_says() -> None:
    """The host's processors are timed as well, of all threads; in turns, as they are shared."""
    with ExitStack() as stack:
        runs = {(name, layers): stack.enter_context(steps_of(ARMS[name], layers)) for name in ARMS for layers in SIZES}
        launched = {each: launched_by(run) for each, run in runs.items()}
        blocks = [timed_in_turns(runs) for _ in range(BLOCKS)]
    for name, arm in ARMS.items():
        few, many = (launched[name, layers] for layers in SIZES)
        per_layer = {what: (many[what] - few[what]) / (MANY - FEW) for what in many}
        total = launches(Counter(per_layer))
        host_us = round(statistics.median(block[name] for block in blocks))
        print(f"{name}: {total:g} launches per layer, {host_us} us of processor time")
        note(name, {"launches": total, "at most": arm.at_most, "processor_us": host_us})
        assert not of(many, "module load", "malloc", "wait", "refused"), "warm, it only launches"
        assert total <= arm.at_most, "\n".join(f"{number:6.2f} {what}" for what, number in sorted(per_layer.items()))
    whole, lanes = "whole, host_loopback", "two lanes, host_loopback"
    ratio = statistics.median(block[lanes] / block[whole] for block in blocks)
    print(f"two lanes over whole: {ratio:.2f}")
    note("two lanes over whole", round(ratio, 2))
    assert ratio <= MOST_OF_WHOLE


@torch.inference_mode()
def test_a_launch_takes_the_host_no_longer_than_a_few_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kernel of a step; an add of torch's in place follows every launch, so both are as cold as in a step."""
    forget_launches(monkeypatch)
    x, original = torch.ones(64, device="cuda"), quick_launch.QuickFunction.__getitem__
    adds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(self: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter_ns()
            result = original(self, grid)(*args, **kwargs)
            launched = time.perf_counter_ns()
            x.add_(x)
            adds[self.__name__].append((launched - begun) / (time.perf_counter_ns() - launched))
            return result

        return launch

    bench, model = random_model(ARMS["whole, local"], MANY)
    step = Step(bench, model, BATCH, 1, TOKENS, static=True)
    for _ in range(3):
        step.run(model.module, step.whole)
    monkeypatch.setattr(quick_launch.QuickFunction, "__getitem__", timed)
    rounds = []
    for _ in range(3):
        adds.clear()
        for _ in range(RUNS):
            step.run(model.module, step.whole)
        rounds.append({name: round(statistics.median(each), 2) for name, each in sorted(adds.items())})
    found = min(rounds, key=lambda each: max(each.values()))  # something else may run beside one
    print(f"host time of launches, in adds: {found}")
    note("adds per launch", found)
    assert len(found) > 5
    assert max(found.values()) <= MOST_ADDS


@torch.inference_mode()
def test_every_launch_passes_what_tritons_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, and to the kernel that Triton would take; in three steps of a kind, whose tensor maps are kept."""
    forget_launches(monkeypatch)
    launched, original = set(), quick_launch.QuickFunction.__getitem__

    def checked(self: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            found = original(self, grid)(*args, **kwargs)
            assert found is self.run(*args, grid=grid, warmup=True, **kwargs), f"{self.__name__}: another kernel"
            launched.add(self.__name__)
            return found

        return launch

    monkeypatch.setattr(quick_launch.QuickFunction, "__getitem__", checked)
    compared = compare_launches(every=True)
    bench, model = random_model(ARMS["whole, local"], FEW)
    for queries in (1, 16):
        step = Step(bench, model, BATCH, queries, TOKENS, static=queries == 1)
        for _ in range(3):
            step.run(model.module, step.whole)
    forget_launches(monkeypatch)
    assert {"_grouped_gemm_kernel", "_attention_kernel"} <= compared.keys() == launched
    assert min(compared.values()) >= 2


def forget_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find launches anew, and do not compare them as the sections of the stub do."""
    monkeypatch.setattr(quick_launch, "direct_launch", inspect.unwrap(quick_launch.direct_launch))  # not compared twice
    for each in gc.get_objects():
        if type(each) is quick_launch.QuickFunction:  # `isinstance` would wake what warns that it is deprecated
            each._kept.clear()


def random_model(arm: Arm, layers: int) -> tuple[Bench, Model]:
    bench, size = Bench(torch.device("cuda", 0), blocks=1), replace(QWEN3_30B_A3B, num_hidden_layers=layers)
    return bench, Model.random(bench, size, arm.transport(size.num_experts))


@contextmanager
def steps_of(arm: Arm, layers: int) -> Iterator[Callable[[], object]]:
    """Runs a step of an arm."""
    bench, model = random_model(arm, layers)
    step = Step(bench, model, BATCH, 1, TOKENS, static=True)
    if not arm.lanes:
        yield lambda: step.run(model.module, step.whole)
        return

    def run() -> None:
        with set_forward_context(step.overlapped):
            wrapper(step.input_ids, step.positions)

    wrapper = model.wrapped(bench, overlapped=True, captured=False)
    try:
        yield run
    finally:
        wrapper.close()


def launched_by(run: Callable[[], object]) -> Counter[str]:
    """What one step launches, warm."""
    for _ in range(3):
        run()
    with counted() as found:
        run()
    return found


def timed_in_turns(runs: Mapping[tuple[str, int], Callable[[], object]]) -> dict[str, float]:
    """Microseconds of the host's processors per layer, by arm: A B B A."""
    seconds = dict.fromkeys(runs, 0.0)
    for each in (*runs, *reversed(runs)):
        torch.cuda.synchronize()
        begun = time.process_time()
        runs[each]()
        seconds[each] += (time.process_time() - begun) / 2
    return {name: (seconds[name, MANY] - seconds[name, FEW]) / (MANY - FEW) * 1e6 for name in ARMS}
