"""The code in the documents runs, and does what they say."""

from __future__ import annotations

import itertools
import re
import sys
import types
from pathlib import Path

import pytest
from checkpoints import COMMON, GROUPED, make_checkpoint
from model_checks import check_decode, check_prefill

from attention import MODES
from model_runner import UnknownArchitecture, model_class
from model_runner.models import registry

README = Path(__file__).parents[1] / "README.md"
ADDING_A_MODEL = Path(__file__).parents[1] / "docs" / "adding-a-model.md"


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
        str(mode).replace("_", " "): (str(traits.kernel), str(traits.captured)) for mode, traits in MODES.items()
    }


def table_below(heading: str) -> list[list[str]]:
    """Rows of the README's table whose first line begins like this, cell by cell."""
    lines = README.read_text(encoding="utf-8").splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(heading)]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [line.strip("| ").split(" | ") for line in rows]
