"""What was measured once for a process on a CPU, and may be taken over by the process that takes its place.

A process that does not remember measures for itself. One that remembers decides as the earlier one did: it starts
sooner, and its kernels, and so the last bits of its results, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

_remembered: MutableMapping[str, bool] | None = None


def remember_choices(choices: MutableMapping[str, bool] | None) -> None:
    """Take over what `choices` says from now on in this process, and note there what else is measured; None: do not."""
    global _remembered
    _remembered = choices


def choice(what: str, measure: Callable[[], bool]) -> bool:
    """The remembered answer; else what `measure` finds.

    Args:
        what: the question, the same in every process.
    """
    if _remembered is None:
        return measure()
    if what not in _remembered:
        _remembered[what] = measure()
    return _remembered[what]
