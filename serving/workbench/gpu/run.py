"""Run sections, each in a process of its own, and write each result as soon as the section ends.

Each section has its own process because a device error (or a hang) ends the whole process. One file keeps results by
section: a run of some sections keeps the others' results, with the machine and commit that they were measured on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from serving.workbench.bench import write_json
from serving.workbench.gpu.bench import Bench, describe_machine
from serving.workbench.gpu.parts import REHEARSAL, names_in
from serving.workbench.gpu.report import Section, as_markdown, as_text
from serving.workbench.gpu.sections import HEADLINE, SECTIONS, run_section

if TYPE_CHECKING:
    from ubatch import GraphBackend

__all__ = ["Options", "run"]

_SLACK_S = 60.0
"""Seconds beyond its budget, for imports and a started table row, after which a section's process is ended."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        only: names of sections to run.
        device: `cuda`, or `cpu` for a smoke test.
        tiny: shapes for a smoke test, which measures nothing.
        blocks: A B B A blocks; 15 or more for figures to quote.
        json_file: file for the results; None only prints them.
        markdown_file: file for the tables; None for none.
        graphs: captures steps in a smoke test; None uses the device's own graphs. Used only within this process.
    """

    only: tuple[str, ...] = tuple(SECTIONS)
    device: str = "cuda"
    tiny: bool = False
    blocks: int = 15
    json_file: Path | None = None
    markdown_file: Path | None = None
    graphs: GraphBackend | None = None


def run(options: Options, *, in_process: bool = False) -> int:
    """Run, print and write; returns 0 if every section is complete."""
    judge = not options.tiny and options.device == "cuda"
    complete = True
    for name in options.only:
        section = run_here(options, name) if in_process else _run_apart(options, name)
        complete &= section.complete
        print("\n" + as_text(section, judge=judge), flush=True)
        if options.json_file is not None:
            _write(options, section, judge)
    if not complete:
        print("\nNot every figure could be measured; see above.", file=sys.stderr)
    return 0 if complete else 1


def run_here(options: Options, name: str) -> Section:
    """Run one section in this process."""
    index = torch.cuda.current_device() if options.device == "cuda" else None
    bench = Bench(
        torch.device(options.device, index) if index is not None else torch.device(options.device),
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
    plan = SECTIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "section.json"
        command = [sys.executable, "-m", "serving.workbench.gpu", "--only", name, "--in-process", "--json", str(file)]
        command += ["--device", options.device, "--blocks", str(options.blocks), *(["--tiny"] if options.tiny else [])]
        try:
            done = subprocess.run(
                command,
                timeout=_budget_s(options, name) + _SLACK_S,
                stdout=subprocess.DEVNULL,
                env={**os.environ},
                check=False,
            )
            ended = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired as late:
            ended = f"it took more than {late.timeout:.0f} s, and was ended"
        if file.exists():
            return Section.from_json(name, read_results(file)["sections"][name])
    return Section(name, plan.title, error=ended, environment=describe_machine())


def _write(options: Options, section: Section, judge: bool) -> None:
    """Write the section into the results file, in its place."""
    file = options.json_file
    if file is None:
        return
    smoke = {"smoke": True} if options.tiny or options.device == "cpu" else {}
    old = read_results(file) if file.exists() else {}
    same_kind = old.get("device") == options.device and ("smoke" in old) == bool(smoke)
    sections = dict(old["sections"]) if same_kind else {}
    sections[section.name] = section.as_json()
    ordered = {name: sections[name] for name in SECTIONS if name in sections}
    write_json(file, {"device": options.device, **smoke, "sections": ordered})
    if options.markdown_file is not None:
        found = [Section.from_json(name, values) for name, values in ordered.items()]
        options.markdown_file.write_text(as_markdown(found, judge=judge), encoding="utf-8")


def read_results(file: Path) -> Mapping[str, Any]:
    """Read the results of an earlier run."""
    values: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return values


def names_of(asked: Sequence[str] | None) -> tuple[str, ...]:
    """The sections that were asked for, in order; all if none was. See `serving.workbench.gpu.parts`."""
    return names_in(SECTIONS, HEADLINE, asked)
