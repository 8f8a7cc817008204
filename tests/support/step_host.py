"""What the fake streams of a step cannot see by itself: the host's side, and interpreted Triton kernels.

On a GPU each of these would wait for the device, or fail:

    from pageable memory    a tensor made on the device of the host's numbers; a copy past the pinned buffers
    reads                   `tolist`, `item`, `cpu`, ... of what the device computes
    kernels                 launched with a tensor of the host
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol
from unittest import mock

import torch
from fake_graphs import FROM_HOST, METHODS
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

_FACTORIES = frozenset(
    {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn, torch.zeros}
)
_MOVES = frozenset({Tensor.to, Tensor.cpu, Tensor.cuda})


class Place(Enum):
    """Whose a storage is."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"
    OPEN = "made from nothing, by either"


class PlacesMemory(Protocol):
    """What knows whose memory is."""

    def place_of(self, tensor: Tensor) -> Place: ...

    def put(self, tensor: Tensor, place: Place) -> None:
        """It was made there."""

    def fault(self, what: str) -> None: ...

    def launched(self, name: str, tensors: list[Tensor], changed: list[Tensor]) -> None:
        """A kernel that reads all of `tensors`, and writes the `changed` ones."""


class HostSide(TorchFunctionMode):
    """Sees what torch is asked for, before it is an operation.

    Here the device is a CPU, too. So `device="cpu"` means the host, and a `torch.device` the one that steps run on.
    """

    def __init__(self, memory: PlacesMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory = kwargs or {}, self._memory
        device = kwargs.get("device")
        from_host = _known(FROM_HOST, func)
        if from_host is not None and _is_the_devices(device):
            memory.fault(f"{from_host} copies the host's numbers to the device, from pageable memory")
        if func in _MOVES:
            self._check_move(func, args, kwargs)
        read = _known(METHODS, func)
        if read is not None and memory.place_of(args[0]) is Place.DEVICE:
            memory.fault(f"{read} makes the host wait for the device")
        result = func(*args, **kwargs)
        if from_host is not None or func in _FACTORIES:
            memory.put(result, Place.DEVICE if _is_the_devices(device) else Place.HOST)
        return result

    def _check_move(self, func: Any, args: Any, kwargs: Any) -> None:
        named = [each for each in (*args[1:], kwargs.get("device")) if isinstance(each, torch.device | str)]
        place = self._memory.place_of(args[0])
        if func is not Tensor.cpu and not named:
            return
        if place is Place.HOST and func is not Tensor.cpu and _is_the_devices(named[0]):
            self._memory.fault("a copy to the device comes from pageable memory")
        if place is Place.DEVICE and func is not Tensor.cpu and not _is_the_devices(named[0]):
            self._memory.fault("a copy to the host makes the host wait for the device")


def _is_the_devices(device: Any) -> bool:
    return device is not None and device != "cpu"


def _known(names: dict[Any, str], func: Any) -> str | None:
    try:
        return names.get(func)
    except TypeError:  # unhashable
        return None


@contextmanager
def watched_launches(of_thread: type[TorchDispatchMode]) -> Iterator[None]:
    """Interpreted launches of threads in which a mode of this type is on are that mode's; it is a `PlacesMemory`."""
    from triton.runtime.interpreter import GridExecutor

    original: Callable[..., Any] = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        watching: Any = next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, of_thread)), None)
        if watching is None:
            return original(executor, *args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            before = [_bits(tensor) for tensor in tensors]
            result = original(executor, *args, **kwargs)
            pairs = zip(tensors, before, strict=True)
            changed = [tensor for tensor, bits in pairs if not torch.equal(_bits(tensor), bits)]
            watching.launched(executor.fn.__name__, tensors, changed)
        return result

    with mock.patch.object(GridExecutor, "__call__", launch):
        yield


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
