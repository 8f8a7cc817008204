"""Identity of the machine that this process runs on."""

from __future__ import annotations

import platform
from pathlib import Path


def machine_name() -> str:
    """A name that is equal in all processes of one machine, containers included, until it reboots; unique per
    machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.is_file() else platform.node()
