"""Weights in MXFP4, as gpt-oss stores its experts: `fp4 * 2**(scale - 127)`, one scale for 32 numbers of a row.

    blocks  [experts, rows, groups, 16] bytes, of two numbers each: the first in the lower half
    scales  [experts, rows, groups] bytes

The tensor that a model asks for has rows and columns the other way round, `[experts, 32 * groups, rows]`.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_GROUP = 32
_ROOM = 1 << 18
"""Numbers that are computed at once; more if a row has more."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, eq=False)
class MXFP4Blocks:
    """A tensor in MXFP4, or a part of one, in the mapped file: nothing is read until `read`.

    Attributes:
        blocks: see above; the groups that hold a part of the columns.
        scales: see above.
        columns: the first column, and the one behind the last, counted from the first group's.
    """

    blocks: Tensor
    scales: Tensor
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[experts, columns, rows]`, as a model asks for it."""
        return self.blocks.shape[0], self.columns[1] - self.columns[0], self.blocks.shape[1]

    @classmethod
    def whole(cls, blocks: Tensor, scales: Tensor) -> MXFP4Blocks:
        """A whole tensor."""
        return cls(blocks, scales, (0, blocks.shape[2] * _GROUP))

    def data_ptr(self) -> int:
        """Address of the first byte, by which a pass sorts."""
        return self.blocks.data_ptr()

    def __getitem__(self, index: tuple[int | slice, ...]) -> MXFP4Blocks:
        """A part, of three dimensions still: an integer is one expert, column or row."""
        given = (*index, *[slice(None)] * 3)[:3]
        of = [slice(each, each + 1) if isinstance(each, int) else each for each in given]
        expert, column, row = (each.indices(size)[:2] for each, size in zip(of, self.shape, strict=True))
        start, stop = (self.columns[0] + each for each in column)
        first = start // _GROUP
        where = slice(*expert), slice(*row), slice(first, -(-stop // _GROUP))
        return MXFP4Blocks(self.blocks[where], self.scales[where], (start - first * _GROUP, stop - first * _GROUP))

    def read(self, out: Tensor) -> None:
        """Write the values to `out`, of this shape without the dimensions that were integers, rounded to its dtype."""
        out = out.view(self.shape)
        experts, rows, groups, _ = self.blocks.shape
        at_once = max(1, _ROOM // max(1, groups * _GROUP))
        for expert in range(experts):
            for row in range(0, rows, at_once):
                here = expert, slice(row, row + at_once)
                pairs = _pairs().index_select(0, self.blocks[here].flatten().int()).view(-1, groups, _GROUP)
                pairs.mul_(self.scales[here].view(torch.float8_e8m0fnu).float().unsqueeze(-1))
                out[expert, :, row : row + at_once] = pairs.flatten(1)[:, slice(*self.columns)].t()


@cache
def _pairs() -> Tensor:
    """The two numbers of every byte, `[256, 2]`."""
    numbers = torch.tensor([*_POSITIVE, *(-each for each in _POSITIVE)], device="cpu")
    return torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], 1)
