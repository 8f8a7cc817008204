"""Small tensors between host and device, without the host waiting for what runs on the device.

A plain `.to(device)` of pageable memory, and a plain `.tolist()`, wait for everything that is queued before them. With
the overlap loop that is a whole step. So copies go through pinned memory and are fenced by an event.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HostCopy", "to_device"]

_ALIGNMENT = 128
"""Bytes. Kernels are compiled anew for pointers that are aligned otherwise."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Host tensors on the device, in order; one copy for all of one dtype. On a CPU they are returned as they are."""
    if device.type == "cpu":
        return list(tensors)
    moved: list[Tensor] = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        step = _ALIGNMENT // dtype.itemsize
        starts = [0]
        for index in members:
            starts.append(starts[-1] + -(-tensors[index].numel() // step) * step)
        staged = torch.empty(starts[-1], dtype=dtype, pin_memory=True)
        places = [
            (index, slice(start, start + tensors[index].numel())) for index, start in zip(members, starts, strict=False)
        ]
        for index, place in places:
            staged[place] = tensors[index].reshape(-1)
        arrived = staged.to(device, non_blocking=True)
        for index, place in places:
            moved[index] = arrived[place].view(tensors[index].shape)
    return moved


class HostCopy:
    """A device tensor on its way to the host. Made when the tensor is complete in stream order; read later.

    Args:
        tensor: what to copy; nobody changes it afterwards.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The tensor on the host; waits for the copy, and for nothing that was queued after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
