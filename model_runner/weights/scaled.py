"""Weights stored as fp8 with scales, and their values: `fp8 * scale`, one scale per block.

    stored    a b c d|e f g      rows and columns of float8_e4m3fn; a part of them may begin and end inside a block
              h i j k|l m n
              -------+-----
              o p q r|s t u      the last blocks may be smaller than the others
    scales    x x x x|y y y

A scale per tensor is one for all rows, and one per channel (row) is a block of one row. Values are multiplied in
float32 and rounded once, to the dtype of the destination.
"""

from __future__ import annotations

from dataclasses import dataclass

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
