"""Triton's `jit`, with a type, and what differs in its interpreter.

For the kernels of the floors above. Nothing of the runtime imports it: whoever wraps a module needs no Triton.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ubatch.errors import ConfigError

__all__ = [
    "INTERPRETED",
    "Kernel",
    "cdiv",
    "constant",
    "descriptor",
    "jit",
    "power_of_2",
    "rows_contiguous",
    "to_fp8",
    "undefined",
]


class Kernel(Protocol):
    """A function of the device: launched as `kernel[grid](...)`, or called by another one."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def warmup(self, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> Any: ...


def jit(*unspecialized: str) -> Callable[[Callable[..., Any]], Kernel]:
    """A decorator that makes a kernel.

    Args:
        unspecialized: arguments that change from step to step. Triton compiles a kernel anew when an integer becomes 1,
            or it or an address a multiple of 16; where nothing is gained, that only costs a step a second.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        return cast("Kernel", triton.jit(function, do_not_specialize=list(unspecialized)))

    return decorate


def constant(value: float) -> Any:
    """A number that kernels may read as a global."""
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
    size = smallest
    while size < at_least:
        size *= 2
    return size


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if its last dimension lies densely, else a copy: kernels take strides of all others only."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def undefined(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of which kernels may read what nobody wrote, and then not use it.

    In the interpreter it is zeros, because numpy warns of infinite numbers that happen to be there.
    """
    return (torch.zeros if INTERPRETED else torch.empty)(shape, dtype=dtype, device=device)


def descriptor(x: torch.Tensor, block: tuple[int, int]) -> TensorDescriptor | None:
    """What the tensor memory accelerator of a Hopper GPU reads tiles of `x` by; a kernel's `desc.load([row, column])`.

    Args:
        x: `[rows, columns]`. What a tile has beyond its borders is 0.
        block: the tile's sides, powers of two.

    Returns:
        None where the kernel has to take pointers: an older GPU, or rows that do not begin at multiples of 16 bytes.
    """
    if not INTERPRETED and x.is_cuda and torch.cuda.get_device_capability(x.device) < (9, 0):
        return None
    size = x.element_size()
    if not x.numel() or x.stride(1) != 1 or x.data_ptr() % 16 or x.stride(0) * size % 16 or block[1] * size < 16:
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


_FP8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn


@jit()
def to_fp8(x: tl.tensor) -> tl.tensor:
    """float32 numbers as float8e4nv, the nearest one, ties to even; larger ones than it knows become its largest."""
    x = tl.minimum(tl.maximum(x, -_FP8_MAX), _FP8_MAX)
    if _ROUND:  # the interpreter's own conversion loses carries
        nearest = (x.to(tl.int32, bitcast=True) + 0x7FFFF + ((x.to(tl.int32, bitcast=True) >> 20) & 1)) & -0x100000
        multiple = (x + 24576.0) - 24576.0  # where float32 numbers are 2 ** -9 apart
        x = tl.where(tl.abs(x) < 2.0**-6, multiple, nearest.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)
