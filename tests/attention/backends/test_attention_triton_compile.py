"""Every Triton kernel of attention, routing, models and steps compiles for a Hopper GPU, on a machine that has none."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, SUPPORT

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

SOURCES = [
    *(ROOT / "attention" / "kernels").glob("*.py"),
    *(ROOT / "attention" / "linear" / "kernels").glob("*.py"),
    *(ROOT / "model_runner" / "kernels").glob("*.py"),
    ROOT / "moe" / "kernels" / "router.py",
]
HOPPER, SHARED_MEMORY = "90", 227 << 10
READS_KEYS = {"_attention_kernel", "_latent_split_kernel"}


def launched_kernels() -> set[str]:
    """Functions named `_..._kernel` in the sources."""
    functions = (
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    return {name for name in functions if name.endswith("_kernel")}


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_every_kernel_compiles_for_a_gpu_and_fits_its_shared_memory(tmp_path: Path) -> None:
    """And those that read keys have further tiles on the way while they wait for one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "compile_triton.py"), HOPPER],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in compiled} == launched_kernels()
    for name, shared, in_flight, _ in compiled:
        assert int(shared) <= SHARED_MEMORY
        assert int(in_flight) >= 2 or name not in READS_KEYS, name
