"""Ranks on this machine: results, failures, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from repository import ROOT, SUPPORT

import serving.ranks
from serving.ranks import RankFailed, run_ranks
from ubatch import CommGroup, ConfigError


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users have it; in other tests ranks are forked from a server."""
    monkeypatch.setattr(serving.ranks, "mp", torch.multiprocessing)


def add_up(rank: int, world_size: int, start: int) -> tuple[int, int]:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total), torch.get_num_threads()


def listening(rank: int, world_size: int) -> set[str]:
    """What this rank, and where it is the first the process that spawned it, listen on."""
    CommGroup.from_process_group()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo", "else gloo takes what the host's name resolves to"
    processes = [psutil.Process()] + [psutil.Process(os.getppid())] * (rank == 0)
    found = {
        each.laddr.ip
        for process in processes
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    of_all: list[set[str]] = [set()] * world_size
    dist.all_gather_object(of_all, found)
    return set().union(*of_all)


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("no luck")
    time.sleep(60)


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def report_and_sleep(rank: int, world_size: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    time.sleep(60)


def test_rank_0_brings_the_result_back() -> None:
    assert run_ranks(add_up, 2, 10) == (21, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("spawned")
def test_spawned_ranks_too() -> None:
    assert run_ranks(add_up, 2, 10) == (21, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("spawned")
def test_ranks_listen_on_loopback_only() -> None:
    assert run_ranks(listening, 2) == {"127.0.0.1"}


@pytest.mark.usefixtures("no_interface")
@pytest.mark.parametrize(
    ("local", "rank", "interface", "warnings"), [("2", "0", "lo", 0), ("1", "0", None, 1), ("1", "1", None, 0)]
)
def test_launched_on_several_machines_one_rank_warns(
    local: str,
    rank: str,
    interface: str | None,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", local)):
        monkeypatch.setenv(name, value)
    serving.ranks._choose_launched_interface()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    assert sum("not authenticated" in each.getMessage() for each in caplog.records) == warnings


@pytest.mark.sample(2)
@pytest.mark.parametrize(("fn", "message"), [(fail_on_rank_1, "no luck"), (die_on_rank_1, "exit status 7")])
def test_the_first_failure_ends_the_others(fn: object, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=message):
        run_ranks(fn, 2)  # type: ignore[arg-type]
    assert time.monotonic() - start < 40


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="launcher started 3"):
        run_ranks(add_up, 2, 0)


@pytest.mark.slow
def test_terminating_the_parent_ends_its_ranks(tmp_path: Path) -> None:
    code = (
        "import sys; from serving.ranks import run_ranks; from test_serving_ranks import report_and_sleep\n"
        "if __name__ == '__main__': run_ranks(report_and_sleep, 2, sys.argv[1])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT), str(Path(__file__).parent)])}
    script = tmp_path / "main.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    pids: list[int] = []
    deadline = time.monotonic() + 40
    while len(pids) < 2 and time.monotonic() < deadline:
        pids = [
            int(file.read_text()) for file in (tmp_path / "0", tmp_path / "1") if file.exists() and file.read_text()
        ]
        time.sleep(0.1)
    assert len(pids) == 2
    parent.terminate()
    assert parent.wait(20) == 128 + signal.SIGTERM
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
