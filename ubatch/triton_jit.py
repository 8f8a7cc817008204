"""Triton's `jit`, with a type, and what differs in its interpreter.

For the kernels of the floors above. Nothing of the runtime imports it: whoever wraps a module needs no Triton.
"""

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ubatch.errors import ConfigError

__all__ = ["INTERPRETED", "Kernel", "cdiv", "constant", "jit", "power_of_2", "rows_contiguous"]


class Kernel(Protocol):
    """A function of the device: launched as `kernel[grid](...)`, or called by another one."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


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
