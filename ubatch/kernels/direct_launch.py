"""Launches of compiled Triton kernels without Triton's launcher, which takes longer than the driver.

What Triton compiled is kept in a function in C (`launch.c`), which reads the arguments and calls the driver. A tensor
map is encoded once per address, sizes and strides: encoding takes microseconds, and memory that a step frees is the
next step's. Only what this project's kernels need is known here. For the rest (clusters, cooperative launches, scratch
memory, floats that are not of 32 bits), and where C cannot be compiled, `direct_launch` returns None, and Triton
launches. So it does where an argument is pinned memory, as only the driver knows its address on the device.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import re
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

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
