"""`quick_interpreter.py`: Triton's interpreter gives and refuses the same, and leaves the language as it was."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
import triton.language as tl
from triton.language import core

from ubatch.kernels.triton_jit import jit

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled on a GPU")


@jit()
def _twice(x):
    return x + x


@jit()
def _double(source, target, size: tl.constexpr):
    offsets = tl.arange(0, size)
    tl.store(target + offsets, _twice(_twice(tl.load(source + offsets))) - tl.load(source + offsets))


def test_types_are_equal_and_named_however_often_they_are_made() -> None:
    for _ in range(2):
        made = tl.block_type(tl.float32, [4, 8])
        assert (list(made.shape), made.numel, made.element_ty, made.scalar) == ([4, 8], 32, tl.float32, tl.float32)
        assert made == tl.block_type(tl.float32, [tl.constexpr(4), 8])
        assert made != tl.block_type(tl.float16, [4, 8])
        assert made != tl.block_type(tl.float32, [8, 4])
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])
        with pytest.raises(TypeError, match="0d"):
            tl.block_type(tl.float32, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int8])
def test_functions_that_a_kernel_calls_compute_and_the_language_is_as_before(dtype: torch.dtype) -> None:
    source = torch.arange(16).to(dtype)
    target = torch.zeros(16, dtype=dtype)
    before = [core.is_builtin(language.load) for language in (tl, core)]  # Triton itself may leave one of them wrapped
    _double[(1,)](source, target, size=16)
    assert torch.equal(target, source * 3)
    assert [core.is_builtin(language.load) for language in (tl, core)] == before
