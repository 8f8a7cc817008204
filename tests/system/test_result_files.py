"""Every file of results says when and how it was measured, and `make bench` measures it again."""

from __future__ import annotations

import re

from figures import RESULTS, check_table
from repository import ROOT

from serving.workbench.bench.provenance import read_provenance

MEASUREMENTS = [
    file
    for file in sorted(RESULTS.glob("*.json"), key=lambda file: file.stem)
    if file.name not in ("stub-cuda.json", "gpu.json", "gpu-tests.json")
]
"""Without the counts over a device that computes nothing, and those of a GPU, whose sections each have their commit."""


def test_every_file_says_at_which_commit_and_by_which_command_it_was_measured() -> None:
    """The page has a row for each; where it differs, put in these."""
    found = {file.stem: read_provenance(file) for file in MEASUREMENTS}
    expected = [[f"`{name}`", f"`{each.command}`", each.commit or ""] for name, each in found.items()]
    assert all(all(row) for row in expected)
    check_table(expected, "| file of `benchmarks/results` | command | measured at |")


def test_make_bench_runs_the_commands_that_wrote_the_files() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    runs = dict(re.findall(r"^\t\$\(BIN\)/(ubatch bench .*) --json \$\(RESULTS\)/(.*)$", makefile, re.MULTILINE))
    assert {name: command for command, name in runs.items()} == {
        file.name: read_provenance(file).command for file in MEASUREMENTS
    }
