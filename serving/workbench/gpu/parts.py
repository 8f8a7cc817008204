"""The parts of `make gpu`, and how `make test-gpu` and `make bench-gpu` choose sections: by name, or by part."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

PARTS = ("first", "rest-1", "rest-2", "rest-3")
"""What `make gpu` runs one after the other, each as a command of at most eight minutes: the tests that decide whether
the rest makes sense, and the headline; then what is left."""
REHEARSAL = 3
"""Factor on a section's time budget without a GPU, because kernels are interpreted; nothing is measured then."""


class InPart(Protocol):
    """A section of tests or of benchmarks, which knows its part."""

    @property
    def part(self) -> str: ...


def names_in(sections: Mapping[str, InPart], asked: Sequence[str] | None) -> tuple[str, ...]:
    """Those of `sections` that were asked for, by name or by part; all if `asked` is None."""
    return tuple(name for name, section in sections.items() if asked is None or {name, section.part} & set(asked))


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
