"""The weights of a rank's slots, as bytes: of any experts back end, in whatever layout its kernels want."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from model_runner.balance.exchange import ALIGNMENT
from moe import FusedExperts
from ubatch import ConfigError


class SlotStore:
    """Every slot's weights in every MoE layer. A slot's bytes are its rows of all tensors, one behind the other, each
    filled up to a multiple of `ALIGNMENT`.

    Args:
        experts: of every MoE layer.

    Attributes:
        slots: slots with weights, of each layer.
        slot_bytes: bytes of a slot, of each layer.
        layout: a hash of layouts, equal on ranks whose slots can change places.

    Raises:
        ConfigError: a back end does not tell its layout, or keeps weights that are not one row per expert.
    """

    def __init__(self, experts: Sequence[FusedExperts]) -> None:
        self._rows = [_rows_of(each) for each in experts]
        self.slots = [len(each.expert_range) for each in experts]
        self._starts = [list(accumulate((_filled(rows.shape[1]) for rows in layer), initial=0)) for layer in self._rows]
        self.slot_bytes = [starts[-1] for starts in self._starts]
        kinds = [
            (type(each).__name__, each.dtype, [(*tensor.shape[1:], tensor.dtype) for tensor in each.slot_tensors()])
            for each in experts
        ]
        self.layout = zlib.crc32(repr(kinds).encode())

    def read(self, layer: int, slot: int, start: int, into: Tensor) -> None:
        """Copy a slot's bytes from `start` on, in the order of the current stream.

        Args:
            into: `[N]` uint8 on the experts' device; the bytes between two tensors are not written.
        """
        stop = start + len(into)
        for rows, first in zip(self._rows[layer], self._starts[layer], strict=False):
            begin, end = max(start, first), min(stop, first + rows.shape[1])
            if begin < end:
                into[begin - start : end - start].copy_(rows[slot, begin - first : end - first])

    def write(self, layer: int, slot: int, source: Tensor) -> None:
        """Replace a slot's bytes, in the order of the current stream.

        Args:
            source: `[slot_bytes]` uint8 on the experts' device.
        """
        for rows, first in zip(self._rows[layer], self._starts[layer], strict=False):
            rows[slot].copy_(source[first : first + rows.shape[1]])


def _rows_of(experts: FusedExperts) -> list[Tensor]:
    """The bytes of each tensor, `[E_local, N]`: views."""
    held = len(experts.expert_range)
    rows = []
    for tensor in experts.slot_tensors():
        if tensor.dim() < 1 or tensor.shape[0] != held or not tensor.is_contiguous():
            raise ConfigError(
                f"{type(experts).__name__} keep a tensor {list(tensor.shape)} that is not one contiguous row for each "
                f"of {held} experts, so experts cannot move. Use another experts back end, or no --enable-eplb."
            )
        rows.append(tensor.detach().view(held, -1).view(torch.uint8))
    return rows


def _filled(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
