"""Ranks and cores: one core each on a CPU; on a GPU those near it, never one for a whole engine and its compilers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from repository import ROOT, TINY_MOE

import serving.engine.rank.process as process
import serving.pinning as pinning
import ubatch.process.machine
from serving.options import resolve
from serving.pinning import pin_rank
from serving.workbench.tuning import tune
from ubatch.kernels.autotuner import _prepare

GPU = torch.device("cuda", 1)


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
    monkeypatch.setattr(pinning, "_PCI_DEVICES", tmp_path)
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
    import serving.ranks as ranks

    pinned: list[tuple[Any, ...]] = []

    def pin(*how: Any) -> None:
        pinned.append(how)
        raise Stop

    monkeypatch.setattr(ranks, "pin_rank", pin)
    for name, value in (("RANK", "9"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    for device, gpu in (("cpu", None), ("cuda", torch.device("cuda", 1))):
        with pytest.raises(Stop):
            ranks.run_ranks(_stop, 16, device=device)
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
