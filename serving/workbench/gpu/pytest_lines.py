"""A pytest plugin: a line of JSON per test as soon as it is over, so that a crash or a hang loses no earlier result."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from serving.workbench.gpu.checks import LINES

_LONGEST = 2000
"""characters of an error, its end"""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Of a test's set-up, call and clean-up: the call, and whatever failed or was skipped beside it."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.duration, report.longreprtext)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be read, or that needs what this Python lacks."""
    if report.outcome != "passed":
        _write(report.nodeid, report.outcome, 0.0, report.longreprtext)


def _write(test: str, outcome: str, seconds: float, error: str) -> None:
    line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3)}
    if error:
        line["error"] = error[-_LONGEST:]
    with Path(os.environ[LINES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
