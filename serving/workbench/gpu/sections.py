"""The sections, and how to run one within its time budget; its errors do not affect other sections."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serving.workbench.gpu.bench import Bench, OutOfTime, describe_machine
from serving.workbench.gpu.report import Section


@dataclass(frozen=True)
class Plan:
    """One section: the title of its table; `"module:function"`, called with a `Bench` and the `Section` to fill;
    seconds it may take on one H200, without imports; and its part of `make gpu`."""

    title: str
    target: str
    budget_s: float
    part: str

    def load(self) -> Callable[[Bench, Section], None]:
        module, _, name = self.target.partition(":")
        function: Callable[[Bench, Section], None] = getattr(importlib.import_module(module), name)
        return function


_HERE = "serving.workbench.gpu"
SECTIONS: Mapping[str, Plan] = {
    "prefill": Plan("Overlapped prefill over host memory, in graphs", f"{_HERE}.prefill:measure", 152, "first"),
    "moe-decode": Plan("Fused MoE, decode sizes", f"{_HERE}.experts:decode", 85, "first"),
    "decode": Plan("Decode steps as graphs", f"{_HERE}.decode:measure", 110, "rest-1"),
    "sms": Plan("Grouped GEMM next to a transport on SMs", f"{_HERE}.sms:measure", 20, "rest-1"),
    "moe-prefill": Plan("Fused MoE, prefill sizes", f"{_HERE}.experts:prefill", 62, "rest-3"),
    "attention": Plan("Paged decode attention", f"{_HERE}.attention:decode", 40, "rest-3"),
    "lanes": Plan("Eager lanes", f"{_HERE}.lanes:measure", 20, "rest-2"),
}
"""The sections in the order in which they run: the most important figures first, in case time is short."""


_LONGEST_ERROR = 600
"""Most characters of an error in the results; the screen shows all of it."""


def run_section(name: str, bench: Bench) -> Section:
    """Run a section in this process; its error, if any, is in the result."""
    plan = SECTIONS[name]
    section = Section(name, plan.title, environment=describe_machine())
    begun = time.monotonic()
    try:
        plan.load()(bench, section)
        bench.synchronize()
    except OutOfTime as late:
        section.error = str(late)
    except Exception as error:
        section.error = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
        traceback.print_exc()
    section.seconds = time.monotonic() - begun
    return section
