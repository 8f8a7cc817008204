"""Network namespaces: hosts of one machine."""

import os
import shutil
import subprocess
import sys


def why_not() -> str | None:
    """Why no namespaces can be made here, or None."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and iproute2 (`ip`)"
    name = f"ubatch-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return f"may not make network namespaces: {made.stderr.strip()}" if made.returncode else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
