"""Compiles the kernels of the MoE layer for a GPU that need not be there, in every way the autotuner may try them.

    python compile_moe_triton.py 90         with the default of every choice of tiles
    python compile_moe_triton.py 90 --all   with all

prints a line per kernel: its name, the bytes of shared memory it takes, how many of its programs are to share an SM,
their threads, registers of a thread, bytes it spills; and of a GEMM the shared memory that was expected at most, and
how it was tuned.

The launchers run as always; only the launch is replaced, by Triton's `warmup`, which compiles and does not run. Not in
the interpreter, so in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from compile_triton import Nobody
from torch import Tensor
from triton.runtime.jit import JITFunction

from moe.kernels.align import align_pairs, tile_batches
from moe.kernels.copy import copy_on_sms
from moe.kernels.fp8_linear import _launch, linear_tiles
from moe.kernels.gemm_configs import GemmConfig, gemm_configs
from moe.kernels.grouped_gemm import Rows, Weights, project_down, project_up
from moe.kernels.quantize import quantize_rows
from moe.kernels.reduce import sum_choices
from moe.kernels.signals import copy_signalled, make_signals, project_down_signalling
from ubatch.kernels.triton_jit import power_of_2

FP8 = torch.float8_e4m3fn
TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 8, 4, 2048, 768
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

per_sm, how = 1, ""
"""What `compile_instead` prints of a GEMM."""


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return registers, stack + local


def compile_instead(kernel: JITFunction, grid: Any) -> Any:
    """`kernel[grid]`, which does not launch."""

    def launch(*args: Any, **kwargs: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        registers, spilled = resources(compiled.asm["cubin"])
        threads = 32 * compiled.metadata.num_warps
        told = (per_sm, threads, registers, spilled, how)
        print(kernel.fn.__name__, compiled.metadata.shared, *told, flush=True)

    return launch


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def weights(dtype: torch.dtype, columns: int, depth: int) -> Weights:
    scales = numbers(EXPERTS, columns // 128, depth // 128, dtype=torch.float32) if dtype == FP8 else None
    return Weights(numbers(EXPERTS, columns, depth, dtype=dtype), scales)


def rows_of(count: int, dtype: torch.dtype, depth: int, capacity: int = 0) -> Rows:
    scales = None
    if dtype == FP8:
        scales = numbers(count, depth // 128, dtype=torch.float32)
        scales = scales.view(EXPERTS, capacity, -1) if capacity else scales
    return Rows(numbers(count, depth, dtype=dtype), scales)


def shared_memory(config: GemmConfig, rows: int, dtype: torch.dtype, *, gated: bool) -> int:
    """The most bytes that a program may take: what is loaded, and what is stored.

    The tensor cores of Hopper still read what they were given last, so that they need one buffer more than the older
    instruction for few rows.
    """
    columns = config.columns * (2 if gated else 1)
    older = rows < 64 and not config.swap and dtype != torch.float32
    buffers = config.num_stages - older
    loads = buffers * config.depth * (rows + columns) * dtype.itemsize
    tile = rows * config.columns * 2
    return max(loads, tile) + 256


def use(config: GemmConfig, *what: object) -> None:
    global how, per_sm
    how, per_sm = " ".join(map(str, (*what, config))), config.per_sm


def forget() -> None:
    global how, per_sm
    how, per_sm = "", 1


def compile_gemms(rows: int, dtype: torch.dtype, *, batched: bool, few: bool) -> None:
    """Both GEMMs with every config for tiles of `rows`, dealt and claimed, or only the first ones."""
    tokens, capacity = 16, 64
    up, down = weights(dtype, 2 * INTERMEDIATE, HIDDEN), weights(dtype, HIDDEN, INTERMEDIATE)
    result = torch.bfloat16 if dtype == FP8 else dtype
    if batched:
        work: Any = tile_batches(torch.zeros(EXPERTS, dtype=torch.int32), capacity, rows)
        x, h = (rows_of(EXPERTS * capacity, dtype, depth, capacity) for depth in (HIDDEN, INTERMEDIATE))
        h = Rows(h.x, None if h.scales is None else h.scales.flatten(0, 1))
        routed = None
    else:
        work = align_pairs(torch.zeros(tokens, TOP_K, dtype=torch.int64), 0, EXPERTS, rows)
        x, h = rows_of(tokens, dtype, HIDDEN), rows_of(tokens * TOP_K, dtype, INTERMEDIATE)
        routed = torch.zeros(tokens, TOP_K)
    for gated in (True, False):
        dealt, claimed = (gemm_configs(rows, dtype, gated=gated, claimed=claimed) for claimed in (False, True))
        for config in (dealt[0], claimed[0]) if few else (*dealt, *claimed):
            use(
                config,
                shared_memory(config, rows, dtype, gated=gated),
                "up" if gated else "down",
                "batched" if batched else "contiguous",
                dtype,
                rows,
            )
            if gated:
                project_up(x, up, work, TOP_K, config, 132)
            else:
                project_down(h, down, work, routed, result, config, 132)
            forget()


def compile_signals() -> None:
    """The projection that signals, the copy that waits, in order or to other places, and the sum of what it brought."""
    capacity, counts = 200, torch.zeros(EXPERTS, dtype=torch.int32)
    signals = make_signals(EXPERTS, capacity, HIDDEN, "cpu")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, w2 = (numbers(EXPERTS, rows, INTERMEDIATE, dtype=dtype) for rows in (capacity, HIDDEN))
        y = project_down_signalling(x, w2, counts, signals, 116)
        for places in (None, torch.zeros(EXPERTS * capacity, dtype=torch.int32)):
            copy_signalled(y, counts, signals, torch.empty_like(y), 16, places)
    rows, ids = numbers(4, TOP_K, HIDDEN, dtype=torch.bfloat16), torch.zeros(4, TOP_K, dtype=torch.int64)
    sum_choices(rows, ids, 0, EXPERTS, torch.zeros(4, TOP_K), signals.alarm.gave_up)


def compile_linear(*, few: bool) -> None:
    """The linear layer in fp8, in bfloat16 and with sums for a bias; its last block of columns is smaller."""
    weight, scales = numbers(2112, HIDDEN, dtype=FP8), numbers(17, HIDDEN // 128, dtype=torch.float32)
    for rows in (1, 32, 64, 500):
        x, x_scales = numbers(rows, HIDDEN, dtype=FP8), numbers(rows, HIDDEN // 128, dtype=torch.float32)
        for tile in linear_tiles(power_of_2(rows))[: 1 if few else None]:
            _launch(x, x_scales, weight, scales, torch.float32 if rows == 1 else torch.bfloat16, tile)


def main(capability: int, thorough: bool) -> None:
    triton.runtime.driver.set_active(Nobody(capability))
    JITFunction.__getitem__ = compile_instead
    align_pairs(torch.zeros(1000, TOP_K, dtype=torch.int32), 0, 128, 16)
    tile_batches(torch.zeros(32, dtype=torch.int32), 64, 16)
    quantize_rows(numbers(4, HIDDEN, dtype=torch.bfloat16))
    sum_choices(numbers(4, TOP_K, HIDDEN, dtype=torch.bfloat16), torch.zeros(4, TOP_K, dtype=torch.int64), 0, 4)
    compile_signals()
    compile_linear(few=not thorough)
    copy_on_sms(*torch.empty(2, 1 << 20, dtype=torch.uint8), 16)
    for dtype in (torch.bfloat16, FP8):
        for rows in (16, 128) if not thorough else (16, 32, 64, 128):
            compile_gemms(rows, dtype, batched=False, few=not thorough)
        compile_gemms(16, dtype, batched=True, few=True)
    if thorough:
        compile_gemms(16, torch.float16, batched=False, few=False)
        compile_gemms(16, torch.float32, batched=False, few=False)


if __name__ == "__main__":
    main(int(sys.argv[1]), "--all" in sys.argv)
