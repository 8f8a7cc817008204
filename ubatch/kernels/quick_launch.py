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

Triton's launcher takes longer than the driver. So what Triton compiled is kept in a function in C (`launch.c`), which
reads the arguments and calls the driver. A tensor map is encoded once per address, sizes and strides: encoding takes
microseconds, and memory that a step frees is the next step's. Only what this project's kernels need is known there. For
the rest (clusters, cooperative launches, scratch memory, floats that are not of 32 bits), and where C cannot be
compiled, `direct_launch` returns None, and Triton launches. So it does where an argument is pinned memory, as only the
driver knows its address on the device.
"""

import ctypes
import inspect
import logging
import re
import sysconfig
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ubatch.errors import ConfigError
from ubatch.kernels.c_jit import compile_c

_logger = logging.getLogger(__name__)

Launch = Callable[..., int]
"""`(x, y, z, stream, *arguments)` -> 0; anything else says that nothing was launched."""

_KINDS = {"p": r"\*.*", "i": r"[iu]\d+", "f": "fp32|f32", "x": "constexpr", "m": "tensordesc.*"}
"""How `launch.c` passes an argument, by Triton's name of its type: pointer, integer, float, not at all, tensor map."""
_MOST_MAPS, _MOST_SHARED = 4096, 227 * 1024
MOST_PARAMETERS = 128
"""Of a kernel."""
_OF_MAP, _SCRATCH = 11, 2
"""Parameters of a tensor map, with its sizes and strides; those that Triton adds."""


def direct_launch(kernel: Any) -> Launch | None:
    """A function that launches a kernel which Triton has compiled and loaded; None if only Triton can.

    Args:
        kernel: what `JITFunction.run` returned.
    """
    launcher = kernel.run
    kinds = _kinds(kernel.src.signature.values())
    warps, ctas, shared = kernel.packed_metadata
    beyond = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size", "gsan_enabled")
    if kinds is None or ctas != 1 or shared > _MOST_SHARED or any(getattr(launcher, each, 0) for each in beyond):
        return None
    if len(kinds) + _OF_MAP * kinds.count("m") + _SCRATCH > MOST_PARAMETERS:
        return None
    make = launch_library("launch", "launcher")
    if make is None:
        return None
    places = (place for place, kind in enumerate(kinds) if kind == "m")
    described = getattr(kernel.metadata, "tensordesc_meta", None) or ()
    if kinds.count("m") != len(described) or None in described:
        return None
    of_place = dict(zip(places, described, strict=True))

    def encode(place: int, descriptor: Any) -> tuple[Any, ...]:
        """The tensor map in Triton's object for it, and what Triton passes beside it."""
        function, more = _encoder()
        return tuple(function(descriptor, of_place[place], *more))

    return make((_driver_function(), kernel.function, warps, shared, kinds.encode(), encode))


def _kinds(types: Any) -> str | None:
    """The kinds of arguments, one letter each; None if one of them is not known here."""
    found = ""
    for each in types:
        kind = next((kind for kind, name in _KINDS.items() if isinstance(each, str) and re.fullmatch(name, each)), None)
        if kind is None:
            return None
        found += kind
    return found


@cache
def launch_library(name: str, function: str) -> Callable[[tuple[Any, ...]], Callable[..., Any]] | None:
    """A function of one of the libraries in C, which makes another one; None if it cannot be compiled here.

    Args:
        name: the library's source, without `.c`.
    """
    source = Path(__file__).with_name(f"{name}.c").read_text(encoding="utf-8")
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's Python has its headers there
    try:
        include = Path(sysconfig.get_path("include", scheme))
        library = compile_c(source, include, MOST=MOST_PARAMETERS, MOST_MAPS=_MOST_MAPS)
    except ConfigError as error:
        _logger.warning("Triton launches all kernels, which takes the host longer: %s", error)
        return None
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)  # keeps the GIL
    return prototype((function, library))


@cache
def _driver_function() -> int:
    """The address of `cuLaunchKernel`."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def _encoder() -> tuple[Callable[..., list[Any]], tuple[None, ...]]:
    """Triton's function that encodes a tensor map, and what it wants after the descriptor and what is known of it."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg, (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)


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
