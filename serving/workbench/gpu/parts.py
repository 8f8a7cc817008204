"""Choose the sections of `make test-gpu` and `make bench-gpu`: by name, or the most important ones first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["FIRST", "REHEARSAL", "REST", "names_in", "why_not_into"]

FIRST, REST = "first", "rest"
REHEARSAL = 3
"""Factor on a section's time budget without a GPU, because kernels are interpreted; nothing is measured then."""


def names_in(sections: Iterable[str], first: Sequence[str], asked: Sequence[str] | None) -> tuple[str, ...]:
    """The sections that were asked for, in order; all if none was.

    Args:
        sections: all sections, in order.
        first: the sections that `FIRST` stands for; `REST` stands for the others.
        asked: names of sections, `FIRST` or `REST`.
    """
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
