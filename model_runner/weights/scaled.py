"""Weights stored as fp8 with scales, and their values: `fp8 * scale`, one scale per block.

    stored    a b c d|e f g      rows and columns of float8_e4m3fn; a part of them may begin and end inside a block
              h i j k|l m n
              -------+-----
              o p q r|s t u      the last blocks may be smaller than the others
    scales    x x x x|y y y

A scale per tensor is one for all rows, and one per channel (row) is a block of one row. Values are multiplied in
float32 and rounded once, to the dtype of the destination.

Weights in MXFP4, as gpt-oss stores its experts (`MXFP4Blocks`): `fp4 * 2**(scale - 127)`, a scale for 32 of a row.

    blocks  [experts, rows, groups, 16] bytes, of two numbers each: the first in the lower half
    scales  [experts, rows, groups] bytes

The tensor that a model asks for has rows and columns the other way round, `[experts, 32 * groups, rows]`.

Source of MXFP4: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn

_ROOM = 1 << 18
"""Numbers that are multiplied at once; more if a row of blocks has more."""
_HALVES, _NAN = 256.0, 0x7F
"""Ratio of the numbers with the same exponent bits in fp8 and in float16 (biases 7 and 15), and the only NaN in fp8."""


@dataclass(frozen=True, eq=False)
class ScaledBlocks:
    """A matrix in fp8, or a part of one, in the mapped file: nothing is read until `read`.

    Attributes:
        stored: `[rows, columns]` float8_e4m3fn.
        scales: scale of every block that holds a part of `stored`, `[row blocks, column blocks]`, any floating dtype.
        block: rows and columns of a block.
        first: the place of `stored`'s first number in its block.
    """

    stored: Tensor
    scales: Tensor
    block: tuple[int, int]
    first: tuple[int, int] = (0, 0)

    def data_ptr(self) -> int:
        """Address of the first number, by which a pass sorts."""
        return self.stored.data_ptr()

    def __getitem__(self, index: tuple[int | slice, ...]) -> ScaledBlocks:
        """A part, still a matrix: an integer is one row or column."""
        rows, columns = (*index, slice(None), slice(None))[:2]
        row, row_blocks, first_row = _cut(rows, self.stored.shape[0], self.block[0], self.first[0])
        column, column_blocks, first_column = _cut(columns, self.stored.shape[1], self.block[1], self.first[1])
        scales = self.scales[row_blocks, column_blocks]
        return ScaledBlocks(self.stored[row, column], scales, self.block, (first_row, first_column))

    def read(self, out: Tensor) -> None:
        """Write the values to `out`, of `stored`'s shape (or a row or column of it), rounded to its dtype.

        Takes room for `_ROOM` numbers, or for one row of blocks, besides: 10 bytes for each.
        """
        out = out.view(self.stored.shape) if out.dim() < 2 else out
        (rows, columns), (block_rows, block_columns) = self.stored.shape, self.block
        (first_row, first_column), (num_row_blocks, num_column_blocks) = self.first, self.scales.shape
        width = num_column_blocks * block_columns
        at_once = max(1, _ROOM // (block_rows * width))
        room = torch.empty(min(at_once, num_row_blocks) * block_rows, width, device="cpu")
        for block in range(0, num_row_blocks, at_once):
            scales = self.scales[block : block + at_once].float() * _HALVES
            start, stop = block * block_rows - first_row, (block + scales.shape[0]) * block_rows - first_row
            begin, end = max(start, 0), min(stop, rows)
            numbers = room[: stop - start]
            place = numbers[begin - start : end - start, first_column : first_column + columns]
            place.copy_(_as_halves(self.stored[begin:end]))
            numbers.view(-1, block_rows, num_column_blocks, block_columns).mul_(scales[:, None, :, None])
            out[begin:end].copy_(place)


def _cut(index: int | slice, size: int, block: int, first: int) -> tuple[slice, slice, int]:
    """The numbers of an index, their blocks, and the place of the first number in its block."""
    start, stop, _ = (slice(index, index + 1) if isinstance(index, int) else index).indices(size)
    stop = max(start, stop)
    return slice(start, stop), slice((first + start) // block, -(-(first + stop) // block)), (first + start) % block


def _as_halves(stored: Tensor) -> Tensor:
    """fp8 as float16, divided by `_HALVES`: exponent and mantissa move to their places there.

    On a CPU that is ten times as fast as torch's conversion.
    """
    bits = stored.view(torch.int8).to(torch.int16)
    sign, rest = bits & -0x8000, bits & 0x7F
    if rest.numel() and rest.amax() == _NAN:
        return (stored.float() / _HALVES).half()
    return rest.bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16)


_GROUP = 32
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
