"""Which versions of Triton's interpreter and of numpy do not work together.

Up to 3.6 the interpreter takes the number out of an array of one element as numpy did before 2.4, which refuses it now.
Where both are installed (CUDA builds of torch bring their own Triton), tests that fail of this are skipped, and say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest

_FIRST_THAT_WORKS = {"triton": (3, 7), "numpy": (2, 4)}
"""The first Triton that works with any numpy, and the first numpy that an earlier one does not work with."""
_ERROR = "only 0-dimensional arrays can be converted to Python scalars"


def why_no_interpreter(version_of: Callable[[str], str] = version) -> str | None:
    """Why Triton's interpreter cannot run kernels here; None if it can, or if there is no Triton."""
    try:
        found = {name: version_of(name) for name in _FIRST_THAT_WORKS}
    except PackageNotFoundError:
        return None
    numbers = {name: tuple(map(int, re.findall(r"\d+", text)[:2])) for name, text in found.items()}
    if numbers["triton"] >= _FIRST_THAT_WORKS["triton"] or numbers["numpy"] < _FIRST_THAT_WORKS["numpy"]:
        return None
    return (
        f"the interpreter of Triton {found['triton']} needs a numpy below 2.4, and {found['numpy']} is installed; "
        "install an older numpy, or Triton 3.7"
    )


def looks_for_a_smaller_failure(item: pytest.Item) -> bool:
    """Whether hypothesis would spend minutes on a failure, so that it is better skipped before."""
    return getattr(getattr(item, "function", None), "is_hypothesis_test", False)


def skip_if_numpy_is_too_new(report: pytest.TestReport, why: str | None) -> None:
    """Make a failure of that kind a skipped test, for the reason `why`; nothing if that is None.

    By its error, because lanes, ranks and whole models run in the interpreter, too, where no import tells.
    """
    if why is not None and report.failed and _ERROR in report.longreprtext:
        report.outcome = "skipped"
        file, line, _ = report.location
        report.longrepr = (file, line or 0, f"Skipped: {why}")
