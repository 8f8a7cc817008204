"""Tests of kernels in C: skipped, with the reason, where there is no compiler."""

from __future__ import annotations

import pytest
import torch

from ubatch.kernels.c_jit import why_not_c

_REASON = why_not_c()

KINDS = {
    "best": {},
    "8 lanes": {"LANES": 8, "TILES": 0},
    "16 lanes": {"LANES": 16, "TILES": 0},
    "emulated tiles": {"LANES": 16, "TILES": 1, "EMULATED_TILES": 1},
}
"""Defines that choose the instructions of kernels of attention; tiles are of bfloat16."""


def defines_of(kind: str, dtype: torch.dtype) -> dict[str, int]:
    """The defines of one of `KINDS`, for a cache of `dtype`."""
    return {**KINDS[kind], **({"TILES": 0} if dtype is torch.float32 else {})}


needs_c = pytest.mark.skipif(_REASON is not None, reason=_REASON or "C can be compiled")
