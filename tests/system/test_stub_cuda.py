"""The stub of CUDA where it is not loaded: its lists name tests that exist, and it asks for the Python it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import TESTS
from stub_cuda import build
from stub_cuda.counts import counts, is_loaded
from stub_cuda.mute import LEFT_OUT, UNTIL_NUMBERS


@pytest.mark.parametrize("name", [*LEFT_OUT, *UNTIL_NUMBERS])
def test_what_is_left_out_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    (found,) = TESTS.rglob(file)
    assert re.search(rf"^def {test.partition('[')[0]}\(", found.read_text(encoding="utf-8"), re.MULTILINE)


def test_another_python_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_version", lambda name: {"torch": "2.11.0+cpu", "triton": "3.6.0"}[name])
    with pytest.raises(
        build.WrongPython, match=r"has torch 2\.11\.0\+cpu, .* the CUDA build of 2\.11\.x\. `make stub`"
    ):
        build.headers()


def test_without_the_stub_nothing_is_counted() -> None:
    assert is_loaded() or not counts()
