"""`ubatch tune` on its ranks: with tensor parallelism, on two machines (both this one), and where one of them fails."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from repository import TINY_MOE

import serving.engine.launch  # noqa: F401 - so ranks are forked here, not spawned; see `forked.py`
from ranks import free_port
from serving.cli import main
from serving.workbench.tuning.measure import state_file
from ubatch import UBatchConfig

pytestmark = pytest.mark.ranks

QUICK = ["--load-format", "dummy", "--dtype", "float32", "--attention-backend", "torch", "--moe-backend", "grouped"]
QUICK += ["--modes", "decode", "--lanes", "2", "--max-decode-tokens", "8", "--context", "8"]
WITHOUT_END = ["--rounds", "100000", "--search-best", "0"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "dbo.yaml"


def tune(out: Path, *words: str) -> int:
    return main(["tune", str(TINY_MOE), *QUICK, "--out", str(out), *words])


def on_two_machines(
    out: Path, *words: str, other: Sequence[str] = (), meanwhile: Callable[[], None] | None = None
) -> tuple[int, int]:
    """The exit statuses of machines 0 and 1; `other` are more words of machine 1."""
    shared = [*words, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(tune, out, *shared, "--node-rank", "1", *other)
        done = threads.submit(meanwhile) if meanwhile is not None else None
        first = tune(out, *shared)
        if done is not None:
            done.result(0)
        return first, second.result(60)


def wait_for_a_cell(out: Path) -> None:
    """Until the first cell has been measured."""
    deadline = time.monotonic() + 60
    while not (state_file(out).exists() and "decode/8" in state_file(out).read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.wide
def test_two_machines_measure_together_and_the_first_one_writes(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_two_machines(out, "--rounds", "2", "--search-best", "0") == (0, 0)
    UBatchConfig.from_yaml(out)
    text = out.read_text(encoding="utf-8")
    assert "# ranks: 2, on 2 machines, experts shared, torch_dist" in text
    assert "2 whole rounds" in text
    assert not state_file(out).exists()
    shown, progress = capfd.readouterr()
    assert shown.count("wrote ") == 1
    assert shown.count(f"machine 0 (127.0.0.1) writes {out}") == 1

    # Progress is on standard error, which is no terminal here: whole lines, of one rank only.
    assert progress.count("round 2 of at most 2: 100%") == 1
    assert "stage times" in progress
    assert "\r" not in progress
    assert "round" not in shown.replace("whole rounds", "")


@pytest.mark.wide
def test_with_tensor_parallelism(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The vote of every step checks that the ranks of a replica have the same batch."""
    words = ["-tp", "2", "--data-parallel-size", "1", "--rounds", "1", "--search-best", "1"]
    assert tune(out, *words) == 0
    assert "# ranks: 1, each of 2 processes (tensor parallel), experts shared" in out.read_text(encoding="utf-8")
    (table,) = (line for line in capfd.readouterr().out.splitlines() if "serial" in line and "x2" in line)
    assert table.split()[-1] == "searched_decode_1"


def test_machines_that_would_measure_other_things_say_so(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_two_machines(out, "--rounds", "2", other=["--rounds", "3"]) == (2, 2)
    assert capfd.readouterr().err.count("--rounds is ") == 2


@pytest.mark.wide
def test_a_rank_that_dies_ends_both_machines_and_is_named(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def kill_rank_1() -> None:
        wait_for_a_cell(out)
        (rank,) = (each for each in multiprocessing.active_children() if each.name == "rank 1")
        os.kill(rank.pid, signal.SIGKILL)

    assert on_two_machines(out, *WITHOUT_END, meanwhile=kill_rank_1) == (1, 1)
    assert "ubatch tune: rank 1 was killed by SIGKILL." in capfd.readouterr().err
    assert state_file(out).exists(), "the next run goes on where this one ended"
    assert not out.exists()


@pytest.mark.wide
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_machine_that_is_interrupted_ends_the_other(
    out: Path, number: signal.Signals, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        wait_for_a_cell(out)
        os.kill(os.getpid(), number)

    def tuned() -> tuple[int, int]:
        return on_two_machines(out, *WITHOUT_END, meanwhile=interrupt)

    began = time.monotonic()
    if number == signal.SIGINT:
        assert tuned() == (status, 1)
    else:
        with pytest.raises(SystemExit, match=str(status)):
            tuned()
    assert time.monotonic() - began < 30
    assert "ended before all was measured; machine 0 (127.0.0.1) says why" in capfd.readouterr().err
    assert not [each for each in multiprocessing.active_children() if each.name.startswith("rank ")]
