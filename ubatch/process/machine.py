"""Which machine this process runs on."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["machine_name"]


def machine_name() -> str:
    """The same in all processes of a machine since it was started, containers included; another one elsewhere."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.is_file() else platform.node()
