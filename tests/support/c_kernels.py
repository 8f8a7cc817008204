"""Tests of kernels in C: skipped, with the reason, where there is no compiler; on another number of threads."""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ubatch.kernels import TILES_SOURCE, c_jit, compile_c, why_not_c

_REASON = why_not_c()

KINDS: dict[str, dict[str, int]] = {
    "best": {},
    "8 lanes": {"LANES": 8, "TILES": 0},
    "16 lanes": {"LANES": 16, "TILES": 0},
    "emulated tiles": {"LANES": 16, "TILES": 1, "EMULATED_TILES": 1},
}
"""Defines that choose the instructions of kernels of attention; tiles are of bfloat16."""


def use_instructions(patch: pytest.MonkeyPatch, native: ModuleType, defines: Mapping[str, int]) -> None:
    """Have a module of `attention.backends.native` compile its kernels with these defines.

    The processor's own instructions are compiled as users have them; others with -O1, which takes a third of the time.
    """
    load = native._kernel

    def kernel(dtype: torch.dtype) -> Any:
        others = _unlike_the_processors(defines, dtype)
        with pytest.MonkeyPatch.context() as flags:
            if others:
                quick = tuple("-O1" if flag == "-O3" else flag for flag in c_jit._FLAGS)
                flags.setattr(c_jit, "_FLAGS", quick)
            return load(dtype, **others)

    patch.setattr(native, "_kernel", kernel)


def _unlike_the_processors(defines: Mapping[str, int], dtype: torch.dtype) -> dict[str, int]:
    """The defines, alike for all that choose the same instructions, which are then compiled once."""
    own_lanes, own_tiles = _lanes_and_tiles()
    has_tiles = dtype is torch.bfloat16
    lanes = defines.get("LANES", own_lanes)
    tiles = defines.get("TILES", own_tiles if lanes == 16 else 0) if has_tiles else 0
    emulated = {"EMULATED_TILES": 1} if tiles and "EMULATED_TILES" in defines else {}
    if not emulated and (lanes, tiles) == (own_lanes, own_tiles if has_tiles else 0):
        return {}
    return {"LANES": lanes, "TILES": tiles, **emulated}


@functools.cache
def _lanes_and_tiles() -> tuple[int, int]:
    """What a kernel of this processor has by default."""
    source = TILES_SOURCE.read_text(encoding="utf-8")
    library = compile_c(source + "int lanes(void) { return LANES; }\nint tiles(void) { return TILES; }\n")
    return library.lanes(), library.tiles() and library.grants_tiles()


needs_c = pytest.mark.skipif(_REASON is not None, reason=_REASON or "C can be compiled")


def on_threads(count: int, compute: Callable[[], Tensor]) -> Tensor:
    """Computed with so many threads, which end with it: this process is forked by other tests."""
    before = torch.get_num_threads()

    def body() -> Tensor:
        torch.set_num_threads(count)
        return compute()

    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(body).result()
    finally:
        torch.set_num_threads(before)
