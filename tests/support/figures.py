"""What tests that compare documents with measured files share: the files, the tables, and how a figure is written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repository import ROOT

__all__ = ["GPU", "MEASURED", "README", "RESULTS", "as_table", "interval", "results", "table_below"]

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
GPU = ROOT / "docs" / "gpu.md"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def interval(value: Mapping[str, float], spec: str = ".2f", unit: str = "x") -> str:
    """`1.66x [1.49, 1.77]`."""
    return f"{value['median']:{spec}}{unit} [{value['low']:{spec}}, {value['high']:{spec}}]"


def table_below(heading: str, document: Path = MEASURED) -> list[list[str]]:
    """Rows of the table whose first line begins like this, cell by cell."""
    lines = document.read_text(encoding="utf-8").splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(heading)]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [line.strip("| ").split(" | ") for line in rows]


def as_table(rows: list[list[str]]) -> str:
    """What to put into the document where it differs."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
