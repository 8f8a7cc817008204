"""A pytest plugin: writes a line of JSON as soon as a test ends, so that a crash or a hang loses no earlier result."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from serving.workbench.gpu.checks import LINES

_LONGEST = 2000
"""Most characters of an error; its end is kept."""


_worker = False
"""Whether this is one of several processes of a section. The process that began them receives every test's report."""


def pytest_configure(config: pytest.Config) -> None:
    global _worker
    _worker = hasattr(config, "workerinput")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's call, and its set-up or clean-up if one of them failed or was skipped."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.duration, report.longreprtext)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write a line for a test file that cannot be imported, or is skipped for a missing package."""
    if report.outcome != "passed":
        _write(report.nodeid, report.outcome, 0.0, report.longreprtext)


def _write(test: str, outcome: str, seconds: float, error: str) -> None:
    if _worker:
        return
    line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3)}
    if error:
        line["error"] = error[-_LONGEST:]
    with Path(os.environ[LINES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
