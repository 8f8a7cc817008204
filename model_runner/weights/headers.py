"""A checkpoint's headers: what a model reads of it, found out without reading it.

A model is built from `Headers` as from the checkpoint, on the device `meta`: every name and shape that it asks for is
compared with what is stored, no weight is read, and no memory is taken. So a config with made-up sizes is refused
before anything is allocated, and what the model does not ask for is known, whichever part of it a rank reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from model_runner.weights.mxfp4 import MXFP4Blocks
from model_runner.weights.scaled import ScaledBlocks
from model_runner.weights.weights import Checkpoint
from ubatch.streams import NullStreams

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
"""Names in a file; tensors of other dtypes are mapped, and refused."""


class Headers(Checkpoint):
    """The headers of an open checkpoint. Nothing is filled, so actions of `once_read` do not run.

    Raises:
        CheckpointFileMissing, CheckpointError: see `Checkpoint.check_weights`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path, dtype=checkpoint.dtype, device="meta", streams=NullStreams())
        self._files = checkpoint._files  # opened once
        self._file_of = checkpoint._file_of
        self._asked: set[str] = set()

    @cached_property
    def stored(self) -> frozenset[str]:
        """Names of all tensors in its files, also of those that an index does not name."""
        files = sorted(set(self._file_of.values()))
        return self.names.union(*(self._open(file).keys() for file in files))

    @property
    def unread(self) -> frozenset[str]:
        """Names of the tensors that nothing has asked for."""
        return self.stored - self._asked

    @contextmanager
    def once_read(self, action: Callable[[], object]) -> Iterator[None]:
        """See `Checkpoint`: nothing is ever read."""
        yield

    def has_other(self, name: str, than: str) -> bool:
        """See `Checkpoint`: values are not compared, so two tensors of one shape count as equal."""
        if not self.names.issuperset((name, than)):
            return False
        own, other = self._mapped(name), self._mapped(than)
        return own.dtype != other.dtype or own.shape != other.shape

    def _mapped(self, name: str) -> Tensor:
        handle = self._handle(name)
        with self._reading(name):
            stored = handle.get_slice(name)  # a map of the bytes takes longer, for each of a hundred thousand tensors
            dtype = _DTYPES.get(stored.get_dtype())
            if dtype is not None:
                return torch.empty(stored.get_shape(), dtype=dtype, device="meta")
        return super()._mapped(name)

    def _want(self, name: str, source: Tensor | ScaledBlocks | MXFP4Blocks, out: Tensor) -> None:
        pass

    def _handle(self, name: str) -> Any:
        handle = super()._handle(name)
        self._asked.add(name)
        return handle
