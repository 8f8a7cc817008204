"""Launches of compiled Triton kernels, found by a short key.

Triton's own launch looks at every argument, writes the options as text, and prepares what profilers are told: ten times
the time of the launch itself. Here the first launch with arguments of a kind is Triton's, and what it compiled is kept:

    a constant      (`tl.constexpr`, or an option such as `num_warps`) counts by its value
    a tensor        by its dtype, and by whether its address is a multiple of 16; on a GPU the address is passed
    an integer      by whether it is 1, a multiple of 16, or needs more than 32 bits
    a descriptor    by its dtype, the sides of its block and its padding
    the rest        None, by being None; other numbers, by their type

That is what Triton compiles by. A constant of a kernel always has the same type, so that equal ones mean the same.
While a profiler or another hook listens, or Triton is asked to debug, every launch is Triton's. Launches that are found
do not notice that a global constant was changed, which Triton's refuse.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_WORD, _LONG = 1 << 31, 1 << 63
_ONE, _WHOLE, _ODD = "1", "multiple of 16", "other"
_PLAIN = (bool, float)


class QuickFunction(JITFunction):  # type: ignore[misc]  # Triton has no types
    """A `triton.jit` function; see this module.

    Args:
        function: the kernel.
        unspecialized: names of arguments that Triton compiles for no particular value or address.
    """

    def __init__(self, function: Callable[..., Any], unspecialized: Collection[str]) -> None:
        super().__init__(function, do_not_specialize=list(unspecialized))
        self._kept: dict[Any, tuple[Any, Callable[..., None], Any, Any]] = {}
        self._bind = _binder(self.params)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """See `JITFunction.run`."""
        runtime = knobs.runtime
        if warmup or callable(grid) or runtime.debug or self.pre_run_hooks or _listens(runtime):
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        kinds, values = self._bind(*args, **kwargs)
        device = driver.active.get_current_device()
        found = self._kept.get((device, kinds))
        if found is None:
            kernel = super().run(*args, grid=grid, warmup=False, **kwargs)
            if kernel is not None:
                self._kept[device, kinds] = kernel, kernel.run, kernel.function, kernel.packed_metadata
            return kernel
        kernel, launch, function, metadata = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        launch(x, y, z, stream, function, metadata, None, None, None, *values)
        return kernel


def _listens(runtime: Any) -> bool:
    """Whether a hook waits for launches or compilations: a chain of functions, or one function."""
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook, getattr(runtime, "add_stages_inspection_hook", None))
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _binder(params: Any) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """A function with the kernel's arguments, and options, that returns their kinds and the arguments in order.

    Its code is written for the kernel: a loop over the arguments would take as long as what it is to replace. Of a
    tensor on a GPU the address alone is launched, as Triton would ask the driver about the tensor.
    """
    heads = [param.name if not param.has_default else f"{param.name}=_defaults[{param.num}]" for param in params]
    lines, kinds, values = [], [], []
    for param in params:
        name, place = param.name, param.num
        if param.is_constexpr:
            kinds.append(name)
            values.append(name)
            continue
        kinds.append(f"kind_{place}")
        values.append(f"value_{place}")
        by_address = not param.do_not_specialize
        lines += [
            f" if isinstance({name}, _Tensor):",
            f"  kind_{place}, value_{place} = {name}.dtype, {name}.data_ptr()",
            f"  if value_{place} % 16: kind_{place} = kind_{place}, False" if by_address else "",
            f"  if not {name}.is_cuda: value_{place} = {name}",
            " else:",
            f"  kind_{place}, value_{place} = _kind({name}, {by_address}), {name}",
        ]
    each_kind, each_value = (", ".join([*of, ""]) for of in (kinds, values))
    head = f"def bind({', '.join([*heads, 'num_warps=None', 'num_stages=None', '**options'])}):"
    last = f" return ({each_kind}num_warps, num_stages, *options.items()), ({each_value})"
    scope = {"_Tensor": torch.Tensor, "_kind": _kind, "_defaults": [param.default for param in params]}
    exec("\n".join([head, *filter(None, lines), last]), scope)
    return scope["bind"]  # type: ignore[return-value]


def _kind(value: Any, specialized: bool) -> Any:
    """The kind of an argument that is no tensor; see this module."""
    if type(value) is not int:
        if value is None or isinstance(value, _PLAIN):
            return type(value)
        if isinstance(value, TensorDescriptor):
            return value.base.dtype, tuple(value.block_shape), value.padding
        if not isinstance(value, int):
            raise TypeError(
                f"a kernel's argument is a tensor, a number, a descriptor or None, not {type(value).__name__}."
            )
    if -_WORD <= value < _WORD:
        return specialized and (_ONE if value == 1 else _WHOLE if value % 16 == 0 else _ODD)
    return value < _LONG, specialized and value % 16 == 0
