"""Ranks on this machine: results, failures, nothing left behind; and cores: one each on a CPU, on a GPU those near."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from repository import ROOT, SUPPORT, TINY_MOE

import serving.engine.rank.process as process
import serving.ranks
import ubatch.process.machine
from serving.options import resolve
from serving.ranks import RankFailed, pin_rank, run_ranks
from serving.workbench.tuning import tune
from ubatch import CommGroup, ConfigError
from ubatch.kernels.autotuner import _prepare

GPU = torch.device("cuda", 1)


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


# -- cores -------------------------------------------------------------------------------------------------------------


class Machine:
    """Cores that this process may use, and GPUs near some of them."""

    def __init__(self, folder: Path, cores: range) -> None:
        self.allowed: set[int] = set(cores)
        self.folder = folder
        self.threads: list[int] = []

    def place(self, bus: int, cores: str) -> None:
        device = self.folder / f"0000:{bus:02x}:00.0"
        device.mkdir()
        (device / "local_cpulist").write_text(f"{cores}\n")

    def pin(self, pid: int, cores: Any) -> None:
        assert pid == 0
        self.allowed = set(cores)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """96 cores; GPU n is at bus 16 + n."""
    machine = Machine(tmp_path, range(96))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(machine.allowed), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", machine.pin, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(torch, "set_num_threads", machine.threads.append)
    monkeypatch.setattr(serving.ranks, "_PCI_DEVICES", tmp_path)
    at = lambda gpu: SimpleNamespace(pci_domain_id=0, pci_bus_id=16 + torch.device(gpu).index, pci_device_id=0)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", at)
    return machine


def test_a_rank_on_a_cpu_has_one_core(machine: Machine) -> None:
    assert pin_rank(3, 8) == {3}
    assert (machine.allowed, machine.threads) == ({3}, [1])


def test_a_rank_on_a_gpu_has_the_cores_of_its_numa_node(machine: Machine) -> None:
    machine.place(17, "48-71,80-95")
    assert pin_rank(1, 8, GPU) == {*range(48, 72), *range(80, 96)}
    assert machine.allowed == {*range(48, 72), *range(80, 96)}
    assert machine.threads == [12], "its share of all cores"


@pytest.mark.parametrize("near", [None, "", "garbage", "200-210", "5"], ids=str)
def test_where_nobody_knows_a_rank_on_a_gpu_keeps_all_cores(machine: Machine, near: str | None) -> None:
    """Also where the container has hardly any core near the GPU."""
    if near is not None:
        machine.place(17, near)
    assert pin_rank(1, 8, GPU) is None
    assert machine.allowed == set(range(96))


def test_cores_that_may_not_be_used_are_left_out(machine: Machine) -> None:
    machine.allowed = set(range(40, 60))
    machine.place(17, "48-95")
    assert pin_rank(1, 2, GPU) == set(range(48, 60))


class Stop(Exception):
    """What comes after the pinning."""


@pytest.mark.parametrize(("device", "local_size"), [("cpu", 2), ("cuda", 2), ("cuda", 1), ("cpu", 1)])
def test_an_engine_pins_by_its_device(monkeypatch: pytest.MonkeyPatch, device: str, local_size: int) -> None:
    pinned: list[tuple[Any, ...]] = []
    monkeypatch.setattr(process, "pin_rank", lambda *how: pinned.append(how))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(process, "make_runner", _stop)
    options = SimpleNamespace(local_ranks=range(local_size), device=device, local_size=local_size, step_size=1)
    rank = local_size - 1
    loaded: Any = process._loaded
    with pytest.raises(Stop), loaded(options, rank, None, None):
        pass
    if device == "cuda":
        assert pinned == [(rank, local_size, torch.device("cuda", rank))]
    else:
        assert pinned == ([(1, 2)] if local_size == 2 else [])


def _stop(*_: Any, **__: Any) -> None:
    raise Stop


def test_spawned_ranks_are_told_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[Any, ...]] = []

    def pin(*how: Any) -> None:
        pinned.append(how)
        raise Stop

    monkeypatch.setattr(serving.ranks, "pin_rank", pin)
    for name, value in (("RANK", "9"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    for device, gpu in (("cpu", None), ("cuda", torch.device("cuda", 1))):
        with pytest.raises(Stop):
            run_ranks(_stop, 16, device=device)
        assert pinned.pop() == (1, 8, gpu)


def test_tuning_on_gpus_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resolve, "count_gpus", lambda: 2)
    command = tune.read("ubatch tune", "", [str(TINY_MOE), "--out", str(tmp_path / "dbo.yaml")])
    assert command.engine.device == "cuda"


def test_compile_workers_are_as_many_as_cores_may_be_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MagicMock()
    monkeypatch.setattr("ubatch.kernels.autotuner.ThreadPoolExecutor", made)
    machine.allowed = {7, 8}
    _prepare(list(range(50)), lambda _: None, torch.device("cpu"))
    assert made.call_args.args[0] == 3
    assert ubatch.process.machine.num_cores() == 2


def test_nothing_else_asks_for_all_cores_of_the_machine() -> None:
    files = [
        path
        for folder in ("ubatch", "moe", "attention", "model_runner", "serving", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    asking = [path.relative_to(ROOT).as_posix() for path in files if "cpu_count" in path.read_text()]
    assert asking == ["ubatch/process/machine.py"]
