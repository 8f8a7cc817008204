"""Launches of compiled Triton kernels, found by a short key.

Triton's own launch looks at every argument, writes the options as text, and prepares what profilers are told: ten times
the time of the launch itself. Here the first launch with arguments of a kind is Triton's, and what it compiled is kept,
to be launched as `direct_launch` says. A function in C (`find.c`) finds it:

    a constant      (`tl.constexpr`, or an option such as `num_warps`) counts by its value
    a tensor        by its dtype, and by whether its address is a multiple of 16; on a GPU the address is passed
    an integer      by whether it is 1, a multiple of 16, or needs more than 32 bits
    a descriptor    by its dtype, the sides of its block and its padding
    the rest        None, by being None; other numbers, by their type

That is what Triton compiles by for NVIDIA's GPUs. A constant of a kernel always has the same type, so that equal ones
mean the same. While a profiler or another hook listens, or Triton is asked to debug or to instrument, every launch is
Triton's; so is one that the driver refuses, or whose arguments are of no kind above, for Triton's error. Launches that
are found do not notice that a global constant was changed, which Triton's refuse. Where C cannot be compiled, all
launches are Triton's.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ubatch.kernels.direct_launch import MOST_PARAMETERS, Launch, direct_launch, launch_library

_OPTIONS = ("num_warps", "num_stages")
_RUNTIME = ("debug", "launch_enter_hook", "launch_exit_hook", "add_stages_inspection_hook")
_COMPILATION = ("instrumentation_mode",)
"""Settings of Triton, where it has them, with which it compiles or launches otherwise."""
_MISSING = object()


class QuickFunction(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A `triton.jit` function; see this module.

    Args:
        function: the kernel.
        unspecialized: names of arguments that Triton compiles for no particular value or address.
    """

    def __init__(self, function: Callable[..., Any], unspecialized: Collection[str]) -> None:
        super().__init__(function, do_not_specialize=list(unspecialized))
        self._kept: dict[Any, tuple[Any, Launch | None]] = {}
        self._find: Callable[..., Any] | None = None

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """See `JITFunction`."""
        if self._find is None:
            self._find = self._finder() or self._by_triton
        return partial(self._find, grid)

    def _finder(self) -> Callable[..., Any] | None:
        """`find` of `find.c`; None if C cannot be compiled here, or does not know what this kernel is compiled by."""
        if torch.version.hip is not None or len(self.params) > MOST_PARAMETERS:
            return None
        make = launch_library("find", "finder")
        if make is None:
            return None
        watching: list[Any] = [self, "pre_run_hooks"]
        for knob, names in ((knobs.runtime, _RUNTIME), (knobs.compilation, _COMPILATION)):
            watching += (each for name in names if hasattr(knob, name) for each in (knob, name))
        defaults = (*(param.default if param.has_default else _MISSING for param in self.params), None, None)
        flags = ("c" if param.is_constexpr else "u" if param.do_not_specialize else "s" for param in self.params)
        return make(
            (
                *(torch.Tensor, torch.dtype, TensorDescriptor),
                *(_device, _stream),
                *((*(param.name for param in self.params), *_OPTIONS), defaults, _MISSING),
                *(self._kept, tuple(watching)),
                *(self._by_triton_keeping, _launch_again),
                "".join(flags).encode(),
            )
        )

    def _by_triton(self, grid: Any, /, *args: Any, **options: Any) -> Any:
        return self.run(*args, grid=grid, warmup=False, **options)

    def _by_triton_keeping(self, kinds: Any, grid: Any, /, *args: Any, **options: Any) -> Any:
        """Let Triton launch, and keep what it compiled for arguments of these kinds; None is no kinds."""
        kernel = self._by_triton(grid, *args, **options)
        if kernel is not None and kinds is not None:
            self._kept[kinds] = kernel, direct_launch(kernel)
        return kernel


def _device() -> int:
    return driver.active.get_current_device()  # type: ignore[no-any-return]


def _stream(device: int) -> int:
    return driver.active.get_current_stream(device)  # type: ignore[no-any-return]


def _launch_again(kernel: Any, grid: tuple[int, ...], stream: int, values: tuple[Any, ...]) -> Any:
    """By Triton's launcher."""
    x, y, z = (*grid, 1, 1)[:3]
    kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *values)
    return kernel
