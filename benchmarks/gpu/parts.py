"""Which sections of `make test-gpu` and `make bench-gpu` run: by name, or what comes first where time is short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["FIRST", "REHEARSAL", "REST", "names_in"]

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
