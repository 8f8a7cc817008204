"""Choose the cores that a rank's threads run on.

on a CPU     one core of its own: a lane hand-off then takes a fifth of the time
on a GPU     the cores of the GPU's NUMA node: engine, lanes, the transports' threads and compilers all need some
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ubatch.process import num_cores

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def pin_rank(local_rank: int, local_size: int, gpu: torch.device | None = None) -> frozenset[int] | None:
    """Pin this thread and the threads that it starts, and set the size of torch's thread pool.

    Args:
        local_rank: index of this process among this machine's processes.
        local_size: number of this machine's processes.
        gpu: the rank's GPU; None for the CPU.

    Returns:
        The cores; None if nothing was pinned. On a CPU, that is because there are fewer cores than ranks; on a GPU,
        because the GPU's NUMA node is unknown or has fewer cores than this rank's share of all cores.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if gpu is None:
        torch.set_num_threads(1)
        return _pin([usable[local_rank]] if len(usable) >= local_size else [])
    torch.set_num_threads(max(1, num_cores() // local_size))
    near = _cores_near(gpu)
    cores = [core for core in usable if core in near]
    return _pin(cores if len(cores) >= len(usable) // max(2, local_size) else [])


def _cores_near(gpu: torch.device) -> set[int]:
    """The cores of a GPU's NUMA node; empty if the system does not know them."""
    properties: Any = torch.cuda.get_device_properties(gpu)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return _parse_cores((_PCI_DEVICES / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def _parse_cores(text: str) -> set[int]:
    """Parse the kernel's list of cores, for example `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _pin(cores: list[int]) -> frozenset[int] | None:
    if not cores:
        return None
    os.sched_setaffinity(0, cores)
    return frozenset(cores)
