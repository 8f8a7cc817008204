"""Copies of small tensors between host and device, without the host waiting for queued device work.

A plain `.to(device)` of pageable memory, and a plain `.tolist()`, wait for all work queued before them; in the overlap
loop that is a whole step. So copies use pinned memory, and an event marks their end.

Inside a step its `Carrier` (`model_runner.StepStreams`) copies on separate streams; elsewhere the current stream is
used. All plans that a step makes on the host, including attention's, are copied this way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ubatch.process.interrupts import changing
from ubatch.streams.streams import Event, mark_now

_ALIGNMENT = 128
"""Bytes. With another alignment Triton would compile kernels again."""


class Carrier(Protocol):
    """Copies tensors between host and device."""

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy host tensors to the device; complete for later work of the current stream."""

    def download(self, tensor: Tensor) -> HostCopy:
        """Start the copy of a tensor, made on the current stream, to the host."""

    def stage(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy host tensors to pinned memory, which is not reused until the step's queued work is done."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to the device in one copy; returned in order. On a CPU they are returned as they are.

    On the device `meta` nothing is copied.
    """
    carrier = _carrier.get()
    if carrier is not None:
        return carrier.upload(tensors)
    if device.type == "cpu":
        return list(tensors)
    if device.type == "meta":
        return [tensor.to(device) for tensor in tensors]
    packing = Packing.of(tensors)
    staged = torch.empty(packing.nbytes, dtype=torch.uint8, pin_memory=True)  # torch keeps it until the copy is done
    packing.write(staged, tensors)
    return packing.read(staged.to(device, non_blocking=True))


def staged(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to pinned memory, for a library that reads them on the host and copies them to `device` itself.

    From pinned memory the library's copies do not block. The results are read-only and valid for the step. On a CPU the
    tensors are returned as they are.
    """
    carrier = _carrier.get()
    if carrier is not None:
        return carrier.stage(tensors)
    if device.type == "cpu":
        return list(tensors)
    return [tensor.pin_memory() for tensor in tensors]  # torch keeps them until its copies are done


def to_host(tensor: Tensor) -> HostCopy:
    """Start the copy of a tensor to the host, in the current stream's order. The tensor must not change afterwards."""
    carrier = _carrier.get()
    if carrier is not None:
        return carrier.download(tensor)
    if tensor.device.type == "cpu":
        return HostCopy(tensor)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return HostCopy(host, mark_now(tensor.device))


@dataclass(eq=False)
class HostCopy:
    """A copy of a device tensor to the host, in progress.

    Attributes:
        host: destination of the copy.
        arrived: event after the copy; None if the copy is complete.
        source: tensor that is copied, kept alive until the copy is done.
        wait_for: how the host waits for `arrived`.
        over: called once the host has read `host`, which can then be reused.
    """

    host: Tensor
    arrived: Event | None = None
    source: Tensor | None = None
    wait_for: Callable[[Event], None] = lambda event: event.synchronize()
    over: Callable[[Tensor, Event], None] | None = None

    def wait(self) -> Tensor:
        """The tensor on the host; waits for the copy, but not for work queued after it.

        Raises:
            PeerFailed, GroupBroken, TransferTimeout: if the copy waits for other ranks; see `Transfer.wait`.
        """
        arrived, over = self.arrived, self.over
        if arrived is not None:
            self.wait_for(arrived)
            if over is not None:
                buffer, self.host = self.host, self.host.clone()
                over(buffer, arrived)
            self.arrived = self.source = self.over = None
        return self.host

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.arrived is None or self.arrived.query()


@dataclass(frozen=True)
class Packing:
    """Layout of tensors in one byte buffer, each contiguous at an aligned offset.

    Attributes:
        places: dtype, shape, strides and offset of each tensor; strides and offset in elements.
        nbytes: minimum size of the buffer in bytes.
    """

    places: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Packing:
        """The layout for these tensors."""
        places, start = [], 0
        for tensor in tensors:
            dtype, shape = tensor.dtype, tensor.shape
            strides = (1,) if len(shape) == 1 else tuple(math.prod(shape[dim:]) for dim in range(1, len(shape) + 1))
            places.append((dtype, shape, strides, start // dtype.itemsize))
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(places), start)

    def write(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors into the buffer (`[nbytes]` uint8)."""
        for place, tensor in zip(self.read(buffer), tensors, strict=True):
            place.copy_(tensor)

    def read(self, buffer: Tensor) -> list[Tensor]:
        """Views of the buffer, with the tensors' shapes and dtypes."""
        whole = {dtype: buffer[: self.nbytes].view(dtype) for dtype in {place[0] for place in self.places}}
        return [whole[dtype].as_strided(shape, strides, first) for dtype, shape, strides, first in self.places]


def carried_by(carrier: Carrier) -> AbstractContextManager[object]:
    """Make `to_device` and `to_host` use `carrier` in the `with` block."""
    return changing(_carrier, carrier)


_carrier: ContextVar[Carrier | None] = ContextVar("ubatch_carrier", default=None)
