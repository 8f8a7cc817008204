"""Which sections of `make test-gpu` and `make bench-gpu` run: by name, or what comes first where time is short."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["FIRST", "REHEARSAL", "REST", "names_in", "why_not_into"]

FIRST, REST = "first", "rest"
REHEARSAL = 3
"""So many times the budget is a section's without a GPU, where kernels are interpreted and nothing is measured."""


def names_in(sections: Iterable[str], first: Sequence[str], asked: Sequence[str] | None) -> tuple[str, ...]:
    """The sections that were asked for, in order; all if none was.

    Args:
        sections: all of them, in order.
        first: those that `FIRST` stands for; `REST` are the others.
        asked: names, `FIRST` or `REST`.
    """
    wanted = {FIRST, REST} if asked is None else set(asked)
    return tuple(name for name in sections if {name, FIRST if name in first else REST} & wanted)


def why_not_into(file: Path | None, *, rehearsal: bool) -> str | None:
    """Why results must not be written into `file`; None if they may. A rehearsal never replaces what a GPU gave."""
    if file is None or not rehearsal or not file.exists():
        return None
    old = json.loads(file.read_text(encoding="utf-8"))
    if old.get("device") != "cuda" or old.get("smoke"):
        return None
    return f"{file} has what a GPU gave, and a rehearsal would replace it: give another file, or move that one."
