"""The code in the documents runs, and does what they say."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import COMMON, GROUPED, make_checkpoint
from model_checks import check_decode, check_prefill
from repository import ROOT

from attention import MODES
from model_runner import UnknownArchitecture, model_class
from model_runner.models import registry

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
ADDING_A_MODEL = ROOT / "docs" / "adding-a-model.md"


def test_adding_a_model_in_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet alone makes a checkpoint of an architecture run that nobody knew before, and gives its logits."""
    (snippet,) = re.findall(r"```python\n(.*?)```", ADDING_A_MODEL.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in snippet.splitlines() if line]) <= 10
    with pytest.raises(UnknownArchitecture):
        model_class("MistralForCausalLM")

    monkeypatch.setattr(registry._MODELS, "_targets", dict(registry._MODELS._targets))  # forgotten after the test
    module = types.ModuleType("mistral_of_the_document")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(snippet, str(ADDING_A_MODEL), "exec"), module.__dict__)

    path = make_checkpoint(tmp_path, "Mistral", **{**COMMON, **GROUPED, "sliding_window": 6, "num_hidden_layers": 2})
    check_prefill(path)
    check_decode(path)


def test_files_that_the_document_names_exist() -> None:
    root = ADDING_A_MODEL.parents[1]
    named = re.findall(r"`((?:[a-z_]+/)*[a-z0-9_]+\.py)`", ADDING_A_MODEL.read_text(encoding="utf-8"))
    assert named
    for name in named:
        assert (root / name).exists() or (root / "model_runner" / "models" / name).exists(), name


def test_the_readme_shows_the_table_of_forward_modes() -> None:
    shown = {row[0].split(" (")[0]: (row[3], row[4]) for row in table_below("| mode | tokens per request |")}
    assert shown == {
        str(mode).replace("_", " "): (str(traits.kernel), "yes" if traits.graph else "no")
        for mode, traits in MODES.items()
    }


def test_the_readme_shows_the_measured_overlap() -> None:
    """Every row of the table of links, from the two files that `make bench` writes; where they differ, put in these."""
    shown = table_below("| communication | lanes | best serial |")
    rows = [row for name in ("overlap-ratios", "overlap") for row in measured_rows(RESULTS / f"{name}.json")]
    expected = [row for _, row in sorted(rows, key=lambda ratio_and_row: ratio_and_row[0])]
    shown[0][0] = shown[0][0].removesuffix(" compute")  # said once
    assert shown == expected, "\n".join("| " + " | ".join(row) + " |" for row in expected)


def test_the_readme_shows_what_wrapping_a_model_of_transformers_gives() -> None:
    measured = json.loads((RESULTS / "transformers.json").read_text(encoding="utf-8"))["over_not_wrapped"]
    figures = "{median:.2f}x [{low:.2f}, {high:.2f}]".format(**measured)
    assert [row[1] for row in table_below("| what | measured |") if "that transformers shards" in row[0]] == [figures]


def test_the_readme_shows_what_long_prompts_cost_and_what_a_limit_costs() -> None:
    """Where they differ, put these in."""
    arms = json.loads((RESULTS / "fairness.json").read_text(encoding="utf-8"))["arms"]
    figures = {
        (arm["limit"], arm["dbo"], name): "{median:.2f}x [{low:.2f}, {high:.2f}]".format(**arm[name])
        for arm in arms
        for name in ("stretch", "throughput")
    }
    stretch = [
        f"{figures['off', dbo, 'stretch']} of decodes alone, with `auto` {figures['auto', dbo, 'stretch']}"
        for dbo in (False, True)
    ]
    throughput = [figures["auto", dbo, "throughput"] for dbo in (False, True)]
    expected = [
        f"{stretch[0]}; with `--enable-dbo` {stretch[1]}",
        f"{throughput[0]}; with `--enable-dbo` {throughput[1]}",
    ]
    rows = [
        row for row in table_below("| what | measured |") if "max-prefill-tokens" in row[0] or "900 tokens" in row[0]
    ]
    assert [row[1] for row in rows] == expected, "\n".join(expected)


def test_the_readme_shows_what_attacks_do() -> None:
    """Where it differs, put this in."""
    found = json.loads((RESULTS / "abuse.json").read_text(encoding="utf-8"))
    windows = found["windows"]
    shorts = [f"{wait:.2f} s" for window in windows for wait in window["waits_s"]]
    wrong, ended = (sum(window["seen"][name] for window in windows) for name in ("wrong", "ended"))
    expected = (
        f"{wrong} of {ended} streams with a wrong token; `/health` within "
        f"{max(window['health_s'] for window in windows):.2f} s; the API process at most "
        f"{found['peak_resident_bytes'] / 1e6:.0f} MB; inter-token p99 {found['gap_p99_ratio']:.2f} of that alone "
        f"while prompts of 900 tokens arrive; a short request behind 1,000 prompts {shorts[0]}, behind 200 of 1,000 "
        f"tokens {shorts[1]}"
    )
    rows = [row[1] for row in table_below("| what | measured |") if "attacks" in row[0]]
    assert rows == [expected], expected
    assert not found["faults"]


@pytest.mark.parametrize("name", ["overlap.json", "overlap-ratios.json"])
def test_no_measured_step_passes_the_bound(name: str) -> None:
    for link in json.loads((RESULTS / name).read_text(encoding="utf-8"))["links"]:
        for lanes, figures in link["lanes"].items():
            assert figures["efficiency"]["high"] <= 1.0, (link["ratio"], lanes)
            assert figures["hidden"]["high"] <= 1.0, (link["ratio"], lanes)


def measured_rows(file: Path) -> Iterator[tuple[tuple[float, int], list[str]]]:
    """Rows of the README's table, by link and number of lanes."""
    for link in json.loads(file.read_text(encoding="utf-8"))["links"]:
        medians = {arm: statistics.median(values) for arm, values in link["arms_ms"].items()}
        serial = min(value for arm, value in medians.items() if arm.startswith("serial_"))
        for lanes, figures in link["lanes"].items():
            efficiency, schedule, hidden, speedup = (
                [figures[name][part] for part in ("median", "low", "high")]
                for name in ("efficiency", "schedule_efficiency", "hidden", "speedup")
            )
            yield (
                (link["ratio"], int(lanes)),
                [
                    f"{link['ratio']:g}x",
                    lanes,
                    f"{serial:.0f} ms",
                    f"{medians[f'overlapped_{lanes}']:.0f} ms",
                    "{:.2f} [{:.2f}, {:.2f}]".format(*efficiency),
                    "{:.2f} [{:.2f}, {:.2f}]".format(*schedule),
                    f"{hidden[0]:.2f}",
                    "{:.2f}x [{:.2f}, {:.2f}]".format(*speedup),
                ],
            )


def table_below(heading: str) -> list[list[str]]:
    """Rows of the README's table whose first line begins like this, cell by cell."""
    lines = README.read_text(encoding="utf-8").splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(heading)]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [line.strip("| ").split(" | ") for line in rows]
