"""Runs an example as a user would."""

import os
import subprocess
import sys

from repository import ROOT


def run_example(name: str, *arguments: str, timeout: float = 100.0) -> str:
    """What an example prints; its standard error where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::ResourceWarning"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
