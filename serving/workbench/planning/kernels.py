"""Times of single kernels on a GPU, from its datasheet and the share of its peaks that published kernels reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from serving.workbench.planning.constants import Gpu, Kernels

FP8, BF16 = 1, 2
"""Bytes per value."""


def interpolated(table: Mapping[int, float], at: float) -> float:
    """A published table's value at `at`: linear in its logarithm between rows, outside the table the nearest row's."""
    at = min(max(at, min(table)), max(table))
    below = max(row for row in table if row <= at)
    above = min(row for row in table if row >= at)
    if below == above:
        return table[below]
    part = math.log(at / below) / math.log(above / below)
    return table[below] + part * (table[above] - table[below])


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of a kernel, the gap to the next one included.

    Attributes:
        share: share of the SMs that compute has: below 1 while communication runs on the others. Compute has the same
            share of the memory bandwidth, as communication uses the rest.
        unlisted: factor on every time, for kernels that the roofline does not list.
    """

    gpu: Gpu
    kernels: Kernels
    share: float = 1.0
    unlisted: float = 1.0

    def gemm(self, rows: float, n: int, k: int, *, width: int = FP8, groups: float = 1.0) -> float:
        """`[rows, k] x [k, n]` with a bf16 output, `width` bytes per value in both inputs; with `groups` (an expected
        value, so it need not be whole), that many `[k, n]`, each for an equal share of the rows."""
        kernel, gpu = self.kernels.gemm, self.gpu
        moved = groups * n * k * width + rows * k * width + rows * n * BF16
        tiled = groups * kernel.tile_rows * -(-rows / groups // kernel.tile_rows)
        tflops = gpu.fp8_tflops * kernel.fp8_fraction if width == FP8 else gpu.bf16_tflops * kernel.bf16_fraction
        memory = moved / self._bytes_per_s(kernel.hbm_fraction)
        compute = 2 * tiled * n * k / (tflops * 1e12 * self.share)
        both = (memory**kernel.norm + compute**kernel.norm) ** (1 / kernel.norm)
        return self._with_overhead(kernel.launch_us, both)

    def elementwise(self, moved: float) -> float:
        """A kernel that reads and writes `moved` bytes in all."""
        kernel = self.kernels.elementwise
        return self._with_overhead(kernel.launch_us, moved / self._bytes_per_s(kernel.hbm_fraction))

    def decode_attention(self, flops: float, moved: float) -> float:
        """Core attention of `flops` operations that reads `moved` bytes of the cache."""
        kernel = self.kernels.attention_decode
        compute = flops / (self.gpu.bf16_tflops * 1e12 * kernel.flops_fraction * self.share)
        return self._with_overhead(kernel.fixed_us, max(compute, moved / self._bytes_per_s(kernel.hbm_fraction)))

    def prefill_attention(self, flops: float, length: int) -> float:
        """Core attention of prompts of `length` tokens; `flops` leaves out masked pairs."""
        kernel = self.kernels.attention_prefill
        reached = interpolated(kernel.tflops, length) / kernel.peak_tflops
        return self._with_overhead(0.0, flops / (self.gpu.bf16_tflops * 1e12 * reached * self.share))

    def _bytes_per_s(self, fraction: float) -> float:
        return self.gpu.hbm_gb_per_s * 1e9 * fraction * self.share

    def _with_overhead(self, fixed_us: float, seconds: float) -> float:
        return self.unlisted * ((fixed_us + self.kernels.gap_us) * 1e-6 + seconds)
