"""Run sections, each in a process of its own, and write each result as soon as the section ends.

Each section has its own process because a device error (or a hang) ends the whole process. One file keeps results by
section: a run of some sections keeps the others' results, with the machine and commit that they were measured on.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from serving.workbench.gpu.bench import Bench, OutOfTime, describe_machine
from serving.workbench.gpu.parts import REHEARSAL, read_sections, write_section
from serving.workbench.gpu.report import Section, as_markdown, as_text
from ubatch import ConfigError

if TYPE_CHECKING:
    from ubatch import GraphBackend


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
    "sms": Plan("Grouped GEMM next to a transport on SMs", f"{_HERE}.experts:beside_transport", 20, "rest-1"),
    "linear": Plan("Linear attention, prompts", f"{_HERE}.attention:prompts", 20, "rest-1"),
    "moe-prefill": Plan("Fused MoE, prefill sizes", f"{_HERE}.experts:prefill", 62, "rest-3"),
    "attention": Plan("Paged decode attention", f"{_HERE}.attention:decode", 40, "rest-3"),
    "lanes": Plan("Eager lanes", f"{_HERE}.decode:eager_lanes", 20, "rest-2"),
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


SLACK_S = 60.0
"""Seconds beyond its budget, for imports and a started table row, after which a section's process is ended."""


@dataclass(frozen=True)
class Options:
    """What to run, as the flags say it; `graphs` captures the steps of a smoke test within this process."""

    only: tuple[str, ...] = tuple(SECTIONS)
    device: str = "cuda"
    tiny: bool = False
    blocks: int = 15
    json_file: Path | None = None
    markdown_file: Path | None = None
    graphs: GraphBackend | None = None


def run(options: Options, *, in_process: bool = False) -> int:
    """Run, print and write; returns 0 if every section is complete.

    Raises:
        ConfigError: the file to write has results of an earlier version; before anything runs.
    """
    judge = not options.tiny and options.device == "cuda"
    kind = {"device": options.device, **({"smoke": True} if options.tiny or options.device == "cpu" else {})}
    if options.json_file is not None:
        _check_kept(options.json_file, kind)
    complete = True
    for name in options.only:
        section = run_here(options, name) if in_process else _run_apart(options, name)
        complete &= section.complete
        print("\n" + as_text(section, judge=judge), flush=True)
        if options.json_file is not None:
            sections = write_section(options.json_file, kind, SECTIONS, name, section.as_json())
            if options.markdown_file is not None:
                found = [Section.from_json(values) for values in sections.values()]
                options.markdown_file.write_text(as_markdown(found, judge=judge), encoding="utf-8")
    if not complete:
        print("\nNot every figure could be measured; see above.", file=sys.stderr)
    return 0 if complete else 1


def _check_kept(file: Path, kind: Mapping[str, Any]) -> None:
    for name, values in read_sections(file, kind).items():
        try:
            Section.from_json(values)
        except ConfigError as error:
            raise ConfigError(f"{file}: {name}: {error}. Delete the file, or give another one.") from error


def run_here(options: Options, name: str) -> Section:
    bench = Bench(
        torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu"),
        tiny=options.tiny,
        blocks=options.blocks,
        budget_s=_budget_s(options, name),
        graphs=options.graphs,
    )
    return run_section(name, bench)


def _budget_s(options: Options, name: str) -> float:
    return SECTIONS[name].budget_s * (1 if options.device == "cuda" else REHEARSAL)


def _run_apart(options: Options, name: str) -> Section:
    """Run one section in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "section.json"
        command = [sys.executable, "-m", "serving.workbench.gpu", "--only", name, "--in-process", "--json", str(file)]
        command += ["--device", options.device, "--blocks", str(options.blocks), *(["--tiny"] if options.tiny else [])]
        try:
            limit_s = _budget_s(options, name) + SLACK_S
            done = subprocess.run(command, timeout=limit_s, stdout=subprocess.DEVNULL, check=False)
            ended = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired as late:
            ended = f"it took more than {late.timeout:.0f} s, and was ended"
        if file.exists():
            return Section.from_json(json.loads(file.read_text(encoding="utf-8"))["sections"][name])
    return Section(name, SECTIONS[name].title, error=ended, environment=describe_machine())
