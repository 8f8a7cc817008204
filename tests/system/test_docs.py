"""The documents are true: their figures are the measured ones, and what they name exists."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import re
import runpy
import statistics
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import COMMON, GROUPED, make_checkpoint
from documents import DOCUMENTS
from model_checks import check_decode, check_prefill
from repository import ROOT

from model_runner import UnknownArchitecture, model_class
from model_runner.models import registry
from ubatch import Span, SpanKind, write_chrome

pytestmark = pytest.mark.long

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
NAMES = ROOT / "docs" / "names.md"
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


def test_the_page_of_figures_shows_the_measured_overlap() -> None:
    """Every row of the table of links, from the two files that `make bench` writes; where they differ, put in these."""
    shown = table_below("| communication | lanes | best serial |")
    rows = [row for name in ("overlap-ratios", "overlap") for row in measured_rows(RESULTS / f"{name}.json")]
    expected = [row for _, row in sorted(rows, key=lambda ratio_and_row: ratio_and_row[0])]
    shown[0][0] = shown[0][0].removesuffix(" compute")  # said once
    assert shown == expected, "\n".join("| " + " | ".join(row) + " |" for row in expected)


def test_the_page_of_figures_shows_what_wrapping_a_model_of_transformers_gives() -> None:
    measured = json.loads((RESULTS / "transformers.json").read_text(encoding="utf-8"))["over_not_wrapped"]
    figures = "{median:.2f}x [{low:.2f}, {high:.2f}]".format(**measured)
    assert [row[1] for row in table_below("| what | measured |") if "that transformers shards" in row[0]] == [figures]


def test_the_page_of_figures_shows_what_long_prompts_cost_and_what_a_limit_costs() -> None:
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


def test_the_page_of_figures_shows_what_attacks_do() -> None:
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


def test_the_readme_shows_figures_of_that_page() -> None:
    measured = set(MEASURED.read_text(encoding="utf-8").splitlines())
    lines = iter(README.read_text(encoding="utf-8").splitlines())
    shown = list(itertools.takewhile(bool, itertools.dropwhile(lambda line: line != "| what | measured |", lines)))
    assert len(shown) > 2
    assert [line for line in shown if line not in measured] == []


@pytest.mark.parametrize("name", ["overlap.json", "overlap-ratios.json"])
def test_no_measured_step_passes_the_bound(name: str) -> None:
    for link in json.loads((RESULTS / name).read_text(encoding="utf-8"))["links"]:
        for lanes, figures in link["lanes"].items():
            assert figures["efficiency"]["high"] <= 1.0, (link["ratio"], lanes)
            assert figures["hidden"]["high"] <= 1.0, (link["ratio"], lanes)


def measured_rows(file: Path) -> Iterator[tuple[tuple[float, int], list[str]]]:
    """Rows of the table of links, by link and number of lanes."""
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
    """Rows of the figures' table whose first line begins like this, cell by cell."""
    lines = MEASURED.read_text(encoding="utf-8").splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(heading)]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [line.strip("| ").split(" | ") for line in rows]


# -- names -------------------------------------------------------------------------------------------------------------

CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = ("ubatch", "moe", "attention", "model_runner", "serving", "tests", "docs", "examples", "benchmarks", ".ci")
PACKAGES = ("ubatch", "moe", "attention", "model_runner", "serving")
WRITTEN = {"benchmarks/results/gpu-tests.json", "benchmarks/results/gpu.json"}
"""Files that a command writes, and nobody commits."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_files_and_modules_that_a_document_names_exist(document: Path) -> None:
    """A file by its path from the root, or by its name alone; a module, or what is in it, by its dotted path."""
    missing = []
    for word in named(document):
        if re.fullmatch(r"[\w./*-]+/[\w./*-]*|[\w-]+\.(py|md|c|html|yaml|toml)", word):
            if word not in WRITTEN and not file_exists(word, document):
                missing.append(word)
        elif re.fullmatch(rf"({'|'.join(PACKAGES)})(\.\w+)+", word) and not is_importable(word):
            missing.append(word)
    assert not missing, f"{document.name} names what is not there: {missing}"


def named(document: Path) -> Iterator[str]:
    """The words of inline code and of links that may be a path or a module."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for code in CODE.findall(text):
        for word in code.split():
            yield word.removesuffix(":").removesuffix(",").split("::")[0]
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not link.startswith("https://"):
            yield link


def file_exists(word: str, document: Path) -> bool:
    top = word.split("/")[0]
    if "/" in word and top not in FOLDERS:
        return True  # an API's path, a model's name
    if "/" not in word:  # beside the document, at the root, or of a folder that the document names
        here = [document.parent / word, ROOT / word]
        return any(path.exists() for path in here) or any(next((ROOT / top).rglob(word), None) for top in FOLDERS)
    return next(ROOT.glob(word.rstrip("/")), None) is not None


def is_importable(name: str) -> bool:
    """`package.module`, `package.module.name` or `package.name`."""
    module, rest = name, list[str]()
    while module:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
            continue
        return all(hasattr(found := getattr(found, part, None), "__class__") and found is not None for part in rest)
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_flags_that_a_document_names_exist(document: Path) -> None:
    """In the settings, a command of the workbench, an example, or the list of others' flags."""
    text = document.read_text(encoding="utf-8")
    unknown = []
    for flag in sorted(set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?![\w-])", text)) - OTHERS):
        name = flag.replace("-", "_")
        known = not words().isdisjoint({name, name.removeprefix("no_")})
        if not known and not re.search(rf"--{flag}\b", sources()):
            unknown.append(f"--{flag}")
    assert not unknown, f"{document.name} names flags that no command takes: {unknown}"


OTHERS = {"nproc-per-node", "enable-two-batch-overlap", "no-build-isolation"}
"""Flags of torchrun, SGLang's, and pip's."""


@functools.cache
def sources() -> str:
    files = itertools.chain(
        (ROOT / "serving").rglob("*.py"), (ROOT / "examples").glob("*.py"), [ROOT / "docs/timeline.py"]
    )
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


@functools.cache
def words() -> frozenset[str]:
    return frozenset(re.findall(r"\w+", sources()))


def test_the_readme_needs_no_tree_around_it() -> None:
    """On a package index there is nothing beside it: links are absolute, and there is no picture in a file."""
    text = README.read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")] == []
    assert "<img" not in text


def test_other_systems_names_lead_to_ours() -> None:
    """Every file of `docs/names.md` holds the names of its row."""
    wrong, rows = [], 0
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if len(cells) != 3 or "`" not in cells[2]:
            continue
        rows += 1
        theirs, ours, files = (CODE.findall(cell) for cell in cells)
        texts = {file: (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else "" for file in files}
        names = [name for name in (ours or theirs) if not name.startswith("_sync")]
        held = {name: [file for file, text in texts.items() if re.search(rf"\b{name}\b", text)] for name in names}
        wrong += [f"{name} is not in {files}" for name, where in held.items() if not where]
        wrong += [
            f"{file} has nothing of {names}" for file in files if not any(file in where for where in held.values())
        ]
    assert rows > 80
    assert not wrong, "\n".join(wrong)


def test_the_tour_names_what_is_there() -> None:
    """Every function and class of a chapter is in one of the files that the page names."""
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    files = {word for word in CODE.findall(text) if word.endswith(".py")}
    code = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
    names = {part for word in CODE.findall(text) for part in re.findall(r"[A-Za-z_]\w+", word) if "/" not in word}
    assert sorted(name for name in names - {"model", "wrapper"} if not re.search(rf"\b{name}\b", code)) == []
    methods = re.findall(r"`[A-Z]\w+\.([a-z_]\w+)`", text)
    assert sorted(name for name in methods if f"def {name}(" not in code) == []


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_timeline_draws_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer of a hundred columns' time: each lane computes half of it, and has a dispatch on the link meanwhile."""
    half, whole = 42.0, 84.0  # one second is one column
    spans = [
        Span(SpanKind.COMPUTE, "select", 0, 0.0, 20.0, 1),
        Span(SpanKind.COMPUTE, "combine.1", 0, 20.0, half, 1),
        Span(SpanKind.TRANSFER, "combine", 0, half, whole, 1),
        Span(SpanKind.COMPUTE, "layer", 0, whole - 0.1, whole, 1),
        Span(SpanKind.COMPUTE, "select", 1, half, whole, 1),
        Span(SpanKind.TRANSFER, "dispatch", 1, 0.0, half, 1),
    ]
    write_chrome(tmp_path / "trace.json", {0: spans})
    timeline = runpy.run_path(str(ROOT / "docs" / "timeline.py"))
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(tmp_path / "trace.json"), "--layers", "0", "1"])
    assert timeline["main"]() == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert rows == [
        "lane 0 computes  " + "A" * 20 + "E" * 22,
        "       on the link " + " " * 42 + "c" * 42,
        "lane 1 computes  " + " " * 42 + "A" * 42,
        "       on the link " + "d" * 42,
    ]
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(tmp_path / "trace.json"), "--rank", "3"])
    with pytest.raises(SystemExit):
        timeline["main"]()
    assert "has no rank 3, only [0]" in capsys.readouterr().err
