"""What the API process keeps of the experts' load, and the file that it writes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import ROOT, TINY_MOE

from moe import ExpertPlacement
from moe.balance import LoadKind, read_loads
from serving.balance import LoadBook, check_load_out, load_book
from ubatch import ConfigError

COUNTS = np.array([[[30, 0]], [[0, 10]]])


def test_balance_is_of_the_placement_and_the_kind() -> None:
    book = LoadBook(ExpertPlacement.default(1, 2, 2))
    assert book.balance().balancedness().tolist() == [1.0]
    book.add(0, 1, COUNTS)
    balance = book.balance()
    assert balance.rank_tokens().tolist() == [[30, 10]]
    assert balance.balancedness().tolist() == [pytest.approx(20 / 30)]
    assert balance.balancedness("decode").tolist() == [0.5]
    assert balance.tokens(LoadKind.PREFILL).tolist() == [[30, 0]]
    with pytest.raises(ConfigError, match="unknown kind of steps 'prefil'; did you mean 'prefill'"):
        balance.tokens("prefil")
    book.placement = ExpertPlacement(np.array([[0, 1, 0, 1]]), 2, 2)
    assert book.balance().balancedness().tolist() == [1.0]
    assert LoadBook(ExpertPlacement.default(1, 2, 1)).balance().rank_tokens().shape == (1, 1)


async def test_the_file_is_written_now_and_then_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_book, "EVERY_S", 0.02)
    path = tmp_path / "loads.json"
    book = LoadBook(ExpertPlacement.default(1, 2, 2), path)

    found = []
    task = asyncio.create_task(book.keep())
    for _ in range(2):
        book.add(0, 1, COUNTS)
        await asyncio.sleep(0.3)
        found.append(read_loads(path).sum())
    at = path.stat().st_mtime_ns
    await asyncio.sleep(0.1)
    assert path.stat().st_mtime_ns == at, "nothing has come, so nothing is written"
    monkeypatch.setattr(load_book, "EVERY_S", 100.0)
    await asyncio.sleep(0.1)
    book.add(0, 1, COUNTS)
    book.end()
    await task
    assert [*found, read_loads(path).sum()] == [40, 80, 120]


def test_an_engine_without_a_loop_writes_as_it_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loads.npy"
    book = LoadBook(ExpertPlacement.default(1, 2, 2), path)
    book.add(0, 1, COUNTS)
    book.tick()
    assert not path.exists()
    monkeypatch.setattr(load_book, "EVERY_S", 0.0)
    book.tick()
    assert read_loads(path).sum() == 40


def test_a_file_that_cannot_be_written_is_told_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book = LoadBook(ExpertPlacement.default(1, 2, 2), tmp_path / "gone" / "loads.npy")
    book.add(0, 1, COUNTS)
    with caplog.at_level(logging.ERROR):
        book.write()
    assert "the experts' load cannot be written" in caplog.text


def test_files_that_cannot_be_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_load_out(tmp_path / "loads.npy")
    for path, why in (
        (tmp_path / "loads.csv", r"ends with \.npy or \.json"),
        (tmp_path / "none" / "loads.npy", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_load_out(path)
    (tmp_path / "loads.json").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        check_load_out(tmp_path / "loads.json")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="cannot be written to"):
        check_load_out(tmp_path / "loads.npy")


SCRIPT = """
import os, signal, sys
from serving import LLM, SamplingParams
from serving.balance import load_book

load_book.EVERY_S = 0.0
llm = LLM(sys.argv[1], expert_load_out=sys.argv[2])
llm.generate("def main(", SamplingParams(temperature=0, max_tokens=110, ignore_eos=True), use_tqdm=False)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.wide
def test_a_process_that_is_killed_leaves_its_last_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "loads.npy"
    words = [sys.executable, "-c", SCRIPT, str(TINY_MOE), str(path)]
    ended = subprocess.run(words, cwd=ROOT, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    loads = read_loads(path)
    assert loads.shape[1:] == (4, 8)
    assert loads[:, 0].sum() > 2 * 100, "of the first hundred steps"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
