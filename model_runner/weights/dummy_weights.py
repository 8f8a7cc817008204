"""Random weights instead of a checkpoint's: only the config is read; the model asks for tensors by name and shape.

For measuring, and to test whether a model fits, without a download. A number depends on the seed, the name of its
tensor and its index in the whole tensor, so ranks that share a tensor agree on it, however it is divided among them.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_runner.weights.weights import Checkpoint, Size, part_index, whole_shape
from ubatch import ConfigError, nearest

LOAD_FORMATS = ("auto", "safetensors", "dummy")
_POOL = 2**20 + 7
"""Number of random values that tensors are cut from; a prime, so that rows of a tensor do not repeat."""


class DummyCheckpoint(Checkpoint):
    """A checkpoint of which only `config.json` is read: all tensors are random.

    Matrices keep the scale of their input, norms are 1 and biases 0, so that activations stay of order 1 and logits
    finite.
    """

    def __init__(self, path: str | Path, *, seed: int = 0, **options: Any) -> None:
        super().__init__(path, **options)
        self._seed = seed

    @cached_property
    def _file_of(self) -> dict[str, str]:
        return {}  # no tensor is stored

    @cached_property
    def _pool(self) -> Tensor:
        """Uniform numbers with a standard deviation of 1."""
        generator = torch.Generator().manual_seed(self._seed)
        return torch.empty(_POOL).uniform_(-math.sqrt(3), math.sqrt(3), generator=generator)

    @torch.no_grad()
    def _copy(self, name: str, shape: Sequence[Size], out: Tensor) -> None:
        out.copy_(self._whole(name, whole_shape(shape))[part_index(shape)])

    def has_blocks(self, names: Iterable[str], block: tuple[int, int]) -> bool:
        """See `Checkpoint`: nothing is stored, so the config says it."""
        known = self.quantization
        return known is not None and known.block == block and not any(map(known.ignores, names))

    @torch.no_grad()
    def load_blocks_into(self, name: str, out: Tensor, scales: Tensor, *shape: Size) -> None:
        """See `Checkpoint`: random numbers in fp8, all of one scale."""
        shape = shape or tuple(out.shape)
        scale = whole_shape(shape)[-1] ** -0.5
        scales.fill_(scale)
        out.copy_(self._whole(name, whole_shape(shape))[part_index(shape)] / scale)

    def _whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.ones(1).expand(shape)
        if name.endswith("bias"):
            return torch.zeros(1).expand(shape)
        count, start = math.prod(shape), zlib.crc32(name.encode()) % _POOL
        if start + count <= _POOL:
            numbers = self._pool[start : start + count]
        else:
            numbers = self._pool.roll(-start).repeat(-(-count // _POOL))[:count]
        return numbers.view(shape) * (1.0 if "embed" in name else shape[-1] ** -0.5)


def open_checkpoint(path: str | Path, load_format: str = "auto", **options: Any) -> Checkpoint:
    """Open a checkpoint in the given `load_format`.

    Args:
        load_format: `dummy` for random weights; `safetensors` or `auto` for those in the folder.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"unknown load_format {load_format!r}{nearest(load_format, LOAD_FORMATS)}")
    return (DummyCheckpoint if load_format == "dummy" else Checkpoint)(path, **options)
