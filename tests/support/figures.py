"""What tests that compare documents with measured files share: the files, the tables, and how a figure is written."""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from repository import ROOT

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
GPU = ROOT / "docs" / "gpu.md"
_NUMBER = r"[+-]?\d[\d.,]*"
FIGURE = re.compile(
    rf"(?<![\w.,/-]){_NUMBER}(?: to {_NUMBER})? ?(?:ms|us|ns|%|tokens/s|[GM]B/s|GFLOP/s)(?![\w-])|\d[\d.]*x(?![\w-])"
)
"""A number with a unit of something measured."""


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
    return [[cell.strip() for cell in re.split(r" \|(?= )", line.strip("| "))] for line in rows]


def as_table(rows: list[list[str]]) -> str:
    """What to put into the document where it differs."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def check_table(expected: list[list[str]], heading: str, document: Path = MEASURED) -> None:
    """A table has these rows; where they differ, what to put there."""
    assert table_below(heading, document) == expected, as_table(expected)


def check_rows(shown: list[list[str]], expected: Mapping[str, str]) -> None:
    """Every row begins with a label, and has its figure in the last cell; where they differ, what to put there."""
    labels = [next((label for label in expected if row[0].startswith(label)), None) for row in shown]
    assert sorted(map(str, labels)) == sorted(expected), "a row of no figure, or a figure without its row"
    right = [[*row[:-1], expected[str(label)]] for row, label in zip(shown, labels, strict=True)]
    wrong = [row for row, own in zip(right, shown, strict=True) if row != own]
    assert not wrong, as_table(wrong)


class Figures(dict[str, Any]):
    """What the templates of rows name: a file of results, or something `computed`."""

    def __missing__(self, name: str) -> Figure:
        self[name] = Figure(computed().get(name) or results(name))
        return self[name]


class Figure:
    """A value in a file. `:.2fx []` writes an interval, `1.66x [1.49, 1.77]`; `:.2f` its median, or a number."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, place: str | int) -> Figure:
        return Figure(self.value[place])

    def __format__(self, spec: str) -> str:
        number, is_interval, _ = spec.partition(" []")
        if is_interval:
            return interval(self.value, number.removesuffix("x"), "x" if number.endswith("x") else "")
        return format(self.value["median"] if isinstance(self.value, Mapping) else self.value, spec)


@functools.cache
def computed() -> dict[str, Any]:
    """What rows show of a file that is not a value in it, by a name for the rows."""
    experts, offline, overlap = (results(name) for name in ("experts", "engine-offline", "engine-overlap"))
    speculation, abuse, links = (results(name) for name in ("speculation", "abuse", "link"))
    one, eight = speculation["results"]
    lengths = [kind["mean_length"] for batch in (one, eight) for kind in batch["acceptance"].values()]
    windows = abuse["windows"]
    (slow,) = [of["loads"] for of in links["links"] if of["link"] == ["500 us, 600 Mbit/s"]]
    # What says "the same tokens", or that nothing was wrong, has been so.
    assert results("attention")["generate"]["same_tokens"] == 1.0
    assert {*offline["generate"]["same"].values(), *(of["same"] for of in overlap["overlap"]["results"].values())} == {
        1
    }
    assert all(kind["same"] for batch in (one, eight) for kind in batch["acceptance"].values())
    loads = [arm for of in links["links"] for arms in of["loads"].values() for arm in arms.values()]
    assert all(arm["same"] == arm["requests"] for arm in loads)
    assert not abuse["faults"]
    faults = results("faults")
    assert not faults["faults"]
    nodes = faults["nodes"]["healed"]
    assert [each["restarts"] for each in nodes] == [1] * len(nodes)
    return {
        **{"few": experts["results"]["64"], "many": experts["results"]["2048"], "offline": offline["generate"]},
        "host_ms": statistics.median(results("engine-scheduler")["scheduler"]["arms_ms"]["host"]),
        **{"one": one, "eight": eight, "accepted": [min(lengths), max(lengths)], "slow": slow},
        "fair": {f"{arm['limit']} {arm['dbo']}": arm for arm in results("fairness")["arms"]},
        "attacked": {
            **{name: sum(window["seen"][name] for window in windows) for name in ("wrong", "ended")},
            "health_s": max(window["health_s"] for window in windows),
            "mb": abuse["peak_resident_bytes"] / 1e6,
            "waits_s": [wait for window in windows for wait in window["waits_s"]],
        },
        "killed": {
            **killed(faults["kill"]),
            "pause_s": statistics.median(statistics.median(each["streams"]) for each in faults["pause"]["pauses"]),
            "start_s": statistics.median(faults["pause"]["starts_s"]),
            "others": sum(way["others"]["equal"] for way in faults["poison"]),
            "poisoned": len(faults["poison"]),
        },
        "rounded": killed(results("faults-bfloat16")["kill"]),
        "resident_mb": [each["resident"] / 1e6 for each in results("faults-soak")["soak"]["series"]],
        "gpu": {
            name: {each["what"]: each["value"] for each in of["figures"]}
            for name, of in results("gpu")["sections"].items()
        },
    }


def killed(configurations: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Kills of all configurations, and what became of the answers."""
    answers = [each["answers"] for each in configurations]
    found = {name: sum(each[name] for each in answers) for name in ("requests", "lost", "wrong", "excused")}
    return {"kills": sum(each["kills"] for each in configurations), **found}
