"""Every Triton kernel of the experts compiles for a Hopper GPU, on a machine that has none."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest
import torch
from repository import ROOT, SUPPORT

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

KERNELS = ROOT / "moe" / "kernels"
HOPPER = "90"
SHARED_MEMORY, SHARED_MEMORY_OF_SM, RESERVED = 227 << 10, 228 << 10, 1 << 10
REGISTERS, THREADS = 64 << 10, 2048
SPILLED = 64  # bytes that may go to local memory: a few numbers of the fp8 tiles, which fill the registers


def launched_kernels() -> set[str]:
    """Functions named `_..._kernel` in the package's sources, but for the router's, which has its own test."""
    functions = (
        node.name
        for path in KERNELS.glob("*.py")
        if path.name != "router.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    return {name for name in functions if name.endswith("_kernel")}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The lines of `compile_moe_triton.py`, by words."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "compile_moe_triton.py"), HOPPER],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_kernel_fits_an_sm(compiled: list[list[str]]) -> None:
    """As often as it is to: shared memory and registers of all its programs there; next to nothing spilled."""
    assert {line[0] for line in compiled} == launched_kernels()
    for line in compiled:
        shared, per_sm, threads, registers, spilled = map(int, line[1:6])
        assert shared <= SHARED_MEMORY, line
        assert per_sm * (shared + RESERVED) <= SHARED_MEMORY_OF_SM, line
        assert per_sm * threads * registers <= REGISTERS, line
        assert per_sm * threads <= THREADS, line
        assert spilled <= SPILLED, line


@pytest.mark.slow
def test_shared_memory_is_what_was_expected(compiled: list[list[str]]) -> None:
    gemms = [line for line in compiled if len(line) > 6]
    assert len(gemms) == 24
    for line in gemms:
        shared, expected = int(line[1]), int(line[6])
        assert 0.9 * expected - 1024 <= shared <= expected, line


@pytest.mark.slow
def test_a_copy_on_sms_holds_them(compiled: list[list[str]]) -> None:
    """What it leaves of an SM's registers is too little for another copy, or for a GEMM's program that has an SM."""
    taken = [(line[0], int(line[3]) * int(line[4])) for line in compiled if line[2] == "1"]
    (copy,) = (registers for name, registers in taken if name == "_copy_kernel")
    gemms = [registers for name, registers in taken if name == "_grouped_gemm_kernel"]
    assert REGISTERS - copy < min(copy, *gemms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_all_that_the_autotuner_tries_fits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """By the same sum; `compile_moe_triton.py 90 --all` compiles them, in a minute or two."""
    from compile_moe_triton import shared_memory

    from moe.kernels.gemm_configs import gemm_configs

    monkeypatch.setattr("moe.kernels.gemm_configs.INTERPRETED", False)
    for rows in (16, 32, 64, 128):
        for gated in (True, False):
            for config in gemm_configs.__wrapped__(rows, dtype, gated=gated):
                shared = shared_memory(config, rows, dtype, gated=gated)
                assert shared <= SHARED_MEMORY, (rows, config)
                assert config.per_sm * (shared + RESERVED) <= SHARED_MEMORY_OF_SM, (rows, config)
