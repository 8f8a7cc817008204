"""`quick_interpreter.py`: Triton's interpreter gives and refuses the same, and leaves the language as it was.

`triton_numpy.py`: with a numpy that it cannot work with, tests say so.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
import torch
from triton_numpy import skip_if_numpy_is_too_new, why_no_interpreter

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


# --------------------------------------------------------------------------------------------- Triton without its numpy


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [
        ("3.6.0", "2.3.5", True),
        ("3.6.0", "2.4.0", False),
        ("3.6.0+git1234", "2.5.0rc1", False),
        ("3.5.1", "3.0", False),
        ("3.7.0", "2.5.0", True),
        ("3.10.0", "2.10.0", True),
    ],
)
def test_old_interpreters_need_an_old_numpy(triton: str, numpy: str, works: bool) -> None:
    why = why_no_interpreter({"triton": triton, "numpy": numpy}.__getitem__)
    assert (why is None) == works
    if why is not None:
        assert f"Triton {triton} needs a numpy below 2.4, and {numpy} is installed" in why


def test_without_triton_nothing_is_said_of_it() -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    assert why_no_interpreter(missing) is None


@pytest.mark.parametrize(
    ("error", "why", "outcome"),
    [
        (
            "InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')",
            "old",
            "skipped",
        ),
        ("InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')", None, "failed"),
        ("InterpreterError: TypeError('another one')", "old", "failed"),
    ],
)
def test_only_what_fails_of_that_is_skipped(error: str, why: str | None, outcome: str) -> None:
    place = ("test_it.py", 3, "test_it")
    report = pytest.TestReport("test_it.py::test_it", place, {}, "failed", error, "call")
    skip_if_numpy_is_too_new(report, why)
    assert report.outcome == outcome
    assert report.longrepr == (("test_it.py", 3, f"Skipped: {why}") if outcome == "skipped" else error)
