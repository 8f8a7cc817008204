"""The machine that this process runs on: its identity, and the cores by which every thread pool is sized."""

import os
import platform
from pathlib import Path


def machine_name() -> str:
    """A name that is equal in all processes of one machine, containers included, until it reboots; unique per
    machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.is_file() else platform.node()


def num_cores() -> int:
    """Cores that the calling thread may run on: fewer than the machine has if it is pinned or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
