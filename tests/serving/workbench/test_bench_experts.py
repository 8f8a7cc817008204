"""`ubatch bench experts` runs every back end that this CPU has, and writes what it printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serving.workbench.bench.runtime import experts
from serving.workbench.bench.runtime.experts import Options, run
from ubatch.kernels.c_jit import why_not_c


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, size in {"_EXPERTS": 4, "_HIDDEN": 32, "_INTERMEDIATE": 16, "_TOP_K": 2, "_LAYERS": 2}.items():
        monkeypatch.setattr(experts, name, size)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_back_end_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "experts.json"
    assert run(Options(tokens=(3, 9), threads=1, blocks=2, json_file=file)) == 0
    report = json.loads(file.read_text())
    for tokens in ("3", "9"):
        found = report["results"][tokens]
        for dtype in ("float32", "bfloat16"):
            assert (f"native {dtype}" in found) == (why_not_c() is None)
            assert found[f"grouped {dtype}"]["over_grouped"]["median"] == 1.0
        assert all(len(arm) == 2 for arm in report["arms_ms"][tokens].values())
    assert "9 tokens, grouped bfloat16" in capsys.readouterr().out


def test_without_c_it_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "why_not_c", lambda: "no C compiler is installed.")
    assert run(Options(tokens=(3,), dtypes=("bfloat16",), threads=1, blocks=2)) == 0
    out = capsys.readouterr().out
    assert "native is left out: no C compiler is installed." in out
    assert "tokens, native" not in out
