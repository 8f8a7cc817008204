"""How `fake_cuda` sees what real code does: torch's operations, collectives, Triton's kernels, the host's reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from fake_cuda import Clock, FakeCuda


# --------------------------------------------------------------------------------------------------------- operations

_ALLOCATES_ONLY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_HOST_WAITS = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"})
_WRITES_FIRST = frozenset({"alltoall_base_", "_allgather_base_", "all_gather_single", "_reduce_scatter_base_"})


class Operations(TorchDispatchMode):
    """Turns every operation of a thread into one on its current stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        cuda, name = self._cuda, func._schema.name.split("::")[1]
        inputs = list(_tensors((args, kwargs)))
        memory = [cuda.memory_of(tensor) for tensor in inputs]
        if memory and all(each.on_host for each in memory):  # the host itself does it
            for tensor in inputs:
                cuda.host_reads(tensor, name)
            return func(*args, **kwargs)
        if func._schema.name.startswith("c10d::"):
            return _collective(cuda, name, inputs, lambda: func(*args, **kwargs))
        written = [tensor for tensor, writes in _arguments(func, args, kwargs) if writes]
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        made = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in known]
        for tensor in made:
            cuda.memory_of(tensor, made_by=name)
        if name == "_local_scalar_dense":
            cuda.host_reads(inputs[0], "item")
        elif (written or made) and name not in _ALLOCATES_ONLY:
            cuda.operation(name, inputs, [*written, *made], cuda.current())
            if _host_waits(name, args):
                cuda.host_reads(inputs[0], name)
        return result


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """Every tensor argument, and whether the operation writes it."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in _tensors(value):
            yield leaf, writes


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Those with memory that anybody could write; weights that mkldnn has packed are constants."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_mkldnn)


def _host_waits(name: str, args: Any) -> bool:
    """Whether the shape of the result depends on values, so that on CUDA the host waits for them."""
    if name == "index":
        return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in args[1])
    return name in _HOST_WAITS or (name == "repeat_interleave" and len(args) == 1)


class HostReads(TorchFunctionMode):
    """Reads by the host that no operation shows."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            self._cuda.host_reads(args[0], func.__name__)
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------------ kernels


_WAITS_FOR = {"_copy_signalled_kernel": ("signals", "y")}
"""Kernels that wait on the device: which argument for, and which one is written then."""


def watched_kernels(cuda: FakeCuda, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Interpreted Triton kernels: they read all their tensors, and write those that change."""

    def watched(grid: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(mode, Operations) for mode in _get_current_dispatch_mode_stack()):
            return launch(grid, *args, **kwargs)
        with _disable_current_modes():
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            before = [_bits(tensor) for tensor in tensors]
            result = launch(grid, *args, **kwargs)
            changed = [
                tensor for tensor, bits in zip(tensors, before, strict=True) if not torch.equal(_bits(tensor), bits)
            ]
        name = getattr(grid.fn, "__name__", "kernel")
        if name in _WAITS_FOR:
            given = dict(zip(inspect.signature(grid.fn).parameters, args, strict=False))
            cuda.waiting_operation(name, tensors, changed, *(given[argument] for argument in _WAITS_FOR[name]))
        else:
            cuda.operation(name, tensors, changed, cuda.current())
        return result

    return watched


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


# -------------------------------------------------------------------------------------------------------- collectives


def _collective(cuda: FakeCuda, name: str, tensors: list[Tensor], run: Callable[[], Any]) -> Any:
    """On NCCL's own stream, after what the current one has; one that the caller waits for, on the current one."""
    if name in _WRITES_FIRST:
        written, read = tensors[:1], tensors[1:]
    else:
        written = read = tensors
    stream = cuda.nccl if cuda.launching_async else cuda.current()
    merge(stream.clock, cuda.current().clock)
    cuda.operation(name, read, written, stream)
    return run()


class FakeCollectives:
    """In place of `torch.distributed`: works order the current stream after NCCL's, and really bring the data."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        return self._launch(torch.distributed.all_to_all_single, args, kwargs)

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self._launch(torch.distributed.all_reduce, args, kwargs)

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Any:
        launch = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        return self._launch(launch, args, kwargs)

    def _launch(self, launch: Callable[..., Any], args: Any, kwargs: Any) -> _NcclWork:
        self._cuda.launching_async = True
        try:
            work = launch(*args, **kwargs)
        finally:
            self._cuda.launching_async = False
        return _NcclWork(self._cuda, work, dict(self._cuda.nccl.clock))


class _NcclWork:
    def __init__(self, cuda: FakeCuda, work: Any, ended: Clock) -> None:
        self._cuda, self._work, self._ended = cuda, work, ended

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout: Any = None) -> bool:
        merge(self._cuda.current().clock, self._ended)
        return bool(self._work.wait())


def merge(clock: Clock, other: Clock) -> None:
    """Let `clock` cover what `other` covers."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
