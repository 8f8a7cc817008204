"""Triton's `jit` with a type, and work-arounds for Triton's interpreter.

For the kernels of the packages above. Nothing in `ubatch` imports it, so wrapping a module needs no Triton.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, cast

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ubatch.errors import ConfigError
from ubatch.kernels.quick_launch import QuickFunction


class Kernel(Protocol):
    """A device function: launched as `kernel[grid](...)`, or called by another kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def warmup(self, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> Any: ...


def jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Kernel]:
    """A decorator that makes a kernel.

    Args:
        unspecialized: arguments that change from step to step. Triton compiles a kernel again when an integer is 1, or
            when an integer or an address is a multiple of 16. For these arguments that gains nothing and costs about a
            second.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        made = triton.jit(function, do_not_specialize=list(unspecialized))
        return cast("Kernel", QuickFunction(function, unspecialized) if isinstance(made, JITFunction) else made)

    return decorate


def constant(value: float) -> Any:
    """A number that kernels may read as a global constant."""
    return tl.constexpr(value)


@jit()
def _probe() -> None:
    pass


INTERPRETED: bool = not isinstance(_probe, JITFunction)
"""Whether kernels run in the interpreter."""

_ROUND = tl.constexpr(INTERPRETED)

if isinstance(tl.cdiv, JITFunction) == INTERPRETED:  # Triton's own functions are made when it is imported
    raise ConfigError(
        "TRITON_INTERPRET was changed after Triton had been imported, so that half of its functions are compiled and "
        "half are interpreted. Set it before anything imports Triton; some libraries do (transformers' models)."
    )


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def power_of_2(at_least: int, smallest: int = 1) -> int:
    """The smallest power of two that is at least `at_least` and `smallest`. A tile's sides must be one."""
    return max(smallest, 1 << max(at_least - 1, 0).bit_length())


def undefined(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory. Kernels may read unwritten elements as long as they do not use them.

    In the interpreter it is zeros, because numpy would warn about infinite values in it.
    """
    return (torch.zeros if INTERPRETED else torch.empty)(shape, dtype=dtype, device=device)


def descriptor(x: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor | None:
    """A descriptor with which a Hopper GPU's tensor memory accelerator reads tiles of `x`: `desc.load([row, column])`.

    Args:
        x: `[rows, columns]`. Elements of a tile outside `x` read as 0.
        block: the tile's sides, powers of two.

    Returns:
        None if the kernel must use pointers: on an older GPU, or if rows do not start at multiples of 16 bytes.
    """
    if not INTERPRETED and x.is_cuda and not _has_tma(x.device):
        return None
    size = x.element_size()
    if not x.numel() or x.stride(1) != 1 or x.data_ptr() % 16 or x.stride(0) * size % 16 or block[1] * size < 16:
        return None
    made: TensorDescriptor = object.__new__(TensorDescriptor)  # what it would check at every launch is known
    made.base, made.shape, made.strides, made.block_shape = x, list(x.shape), list(x.stride()), list(block)
    return made


@cache
def _has_tma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


_FP8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn


@jit()
def to_fp8(x: tl.tensor) -> tl.tensor:
    """Convert float32 to float8e4nv: round to nearest, ties to even; larger values saturate at the largest one."""
    x = tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX)
    if _ROUND:  # the interpreter's own conversion drops carries
        nearest = (x.to(tl.int32, bitcast=True) + 0x7FFFF + ((x.to(tl.int32, bitcast=True) >> 20) & 1)) & -0x100000
        multiple = (x + 24576.0) - 24576.0  # where float32 numbers are 2 ** -9 apart
        x = tl.where(tl.abs(x) < 2.0**-6, multiple, nearest.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)
