"""Choose the sections of `make test-gpu` and `make bench-gpu`: by name, or the most important ones first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FIRST", "REHEARSAL", "REST", "names_in", "read_sections", "why_not_into", "write_section"]

FIRST, REST = "first", "rest"
REHEARSAL = 3
"""Factor on a section's time budget without a GPU, because kernels are interpreted; nothing is measured then."""


def names_in(sections: Iterable[str], first: Sequence[str], asked: Sequence[str] | None) -> tuple[str, ...]:
    """Those of `sections` that were asked for by name, or as `FIRST`, which stands for `first`, or `REST`, which stands
    for the others; all if none was."""
    wanted = {FIRST, REST} if asked is None else set(asked)
    return tuple(name for name in sections if {name, FIRST if name in first else REST} & wanted)


def why_not_into(file: Path | None, *, rehearsal: bool) -> str | None:
    """Why results must not be written into `file`; None if they may. A rehearsal never replaces a GPU's results."""
    if file is None or not rehearsal or not file.exists():
        return None
    old = json.loads(file.read_text(encoding="utf-8"))
    if old.get("device") != "cuda" or old.get("smoke"):
        return None
    return f"{file} has a GPU's results, and a rehearsal would replace them: give another file, or move that one."


def read_sections(file: Path, kind: Mapping[str, Any]) -> dict[str, Any]:
    """The results by section that a file has; none if it is of another kind of run, or not there."""
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    sections: dict[str, Any] = old.pop("sections", {})
    return sections if old == kind else {}


def write_section(
    file: Path, kind: Mapping[str, Any], order: Iterable[str], name: str, found: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a section's results in their place, and return all; other sections' results of the same kind of run are
    kept. `kind` is at the head of the file: the device, and whether it was a smoke test."""
    sections = {**read_sections(file, kind), name: found}
    ordered = {each: sections[each] for each in order if each in sections}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**kind, "sections": ordered}, indent=1) + "\n", encoding="utf-8")
    return ordered
