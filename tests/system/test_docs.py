"""The documents are true: what they name exists. `test_docs_figures` has their figures."""

import functools
import importlib
import itertools
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import COMMON, GROUPED, make_checkpoint
from documents import DOCUMENTS
from model_checks import check_decode, check_prefill
from repository import ROOT

from model_runner import UnknownArchitecture, known_architectures, model_class
from model_runner.models import registry
from serving.workbench.tracing.text import draw_lanes
from ubatch import Span, SpanKind, write_chrome

pytestmark = pytest.mark.long

README = ROOT / "README.md"
NAMES = ROOT / "docs" / "names.md"
ADDING_A_MODEL = ROOT / "docs" / "adding-a-model.md"


def test_adding_a_model_in_ten_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippet alone makes a checkpoint of an architecture run that nobody knew before, and gives its logits."""
    (snippet,) = re.findall(r"```python\n(.*?)```", ADDING_A_MODEL.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in snippet.splitlines() if line]) <= 10
    with pytest.raises(UnknownArchitecture):
        model_class("SeedOssForCausalLM")

    monkeypatch.setattr(registry._MODELS, "_targets", dict(registry._MODELS._targets))  # forgotten after the test
    module = types.ModuleType("seed_oss_of_the_document")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(snippet, str(ADDING_A_MODEL), "exec"), module.__dict__)

    path = make_checkpoint(tmp_path, "SeedOss", **{**COMMON, **GROUPED, "num_hidden_layers": 2})
    check_prefill(path)
    check_decode(path)


def test_the_table_of_models_is_whole() -> None:
    table = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [name for name in known_architectures() if f"| `{name}` |" not in table] == []


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
    if "/" not in word:  # next to the document, at the root, or of a folder that the document names
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


OTHERS = {
    "nproc-per-node",
    "enable-two-batch-overlap",
    "no-build-isolation",
    "retry",
    "retry-delay",
    "retry-connrefused",
}
"""Flags of torchrun, SGLang's, pip's, and curl's."""


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
    """On a package index there is nothing around it: links are absolute, and there is no picture in a file."""
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
    """Its rows are those of `tests/serving/workbench/test_trace_drawings.py`; here from a file, layer by layer."""
    spans = [
        Span(SpanKind.COMPUTE, "select", 0, 0.0, 20.0, 1),
        Span(SpanKind.COMPUTE, "layer", 0, 20.0, 81.0, 1),
        Span(SpanKind.TRANSFER, "dispatch", 1, 0.0, 40.5, 1),
    ]
    write_chrome(tmp_path / "trace.json", {0: spans})
    timeline = runpy.run_path(str(ROOT / "docs" / "timeline.py"))
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(tmp_path / "trace.json"), "--layers", "0", "1"])
    assert timeline["main"]() == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.startswith("81000 ms of a step")
    assert rows == draw_lanes(spans, 0.0, 81.0)
    monkeypatch.setattr(sys, "argv", ["timeline.py", str(tmp_path / "trace.json"), "--rank", "3"])
    with pytest.raises(SystemExit):
        timeline["main"]()
    assert "has no rank 3, only [0]" in capsys.readouterr().err
