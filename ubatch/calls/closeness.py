"""Whether two results are equal, except for rounding that depends on the batch size.

    structure, types, integers, bools      identical
    NaN                                    equal to NaN; an infinity is equal to itself
    float32, float64, complex              within 1e-4 of the largest value of its row, and of its column, or, where
                                           the column is small, within 8 rounding errors of the row's
    16 bits                                rms(difference) is at most 1e-2 of rms(row) in the median row, and at most
                                           2e-2 of rms(column) in every column, without the rows that are off

A row is what one token has, a column what all tokens have at one place of the last dimension; so neither a large row
nor a large column hides the rest. Few values can be small by chance, so the scale of a row or column of less than six
values is at least that of the lowest quarter of them.

In 16 bits a near-tie in a router sometimes sends a token to another expert, and its row is then off by more than 5e-2.
At most 5% of the rows may be, and they must be explained: another cut of the same batch must give other such rows. Rows
that are off under both cuts, or next to the cut in both, depend on other rows (`coupled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ubatch.calls.containers import PLAIN, children_of, slots_of

_FINE = 1e-4
_MEDIAN = 1e-2
_OUTLIER = 5e-2
_OUTLIERS = 0.05
_COLUMN = 2e-2
_FEW = 6
_NOISE = 8
"""Rounding errors of a row's largest value that a small column of it may be off by."""
_MARK = 1e3
_VALUES = (*PLAIN, set, frozenset)


class Unequal(Exception):
    """Two results differ; the message says where, and by how much."""


@dataclass
class Comparison:
    """Compares what the whole call returned and wrote with what its lanes returned and wrote.

    Attributes:
        coarse: whether the call computes in 16 bits, whatever its results are stored in.
        order: for each row of the call in lanes, its row number in the whole call.
        cut: the first row of the second lane.
        off: by path, the rows that are off; numbered as in the whole call.
        beside: paths of leaves whose row just before or just after the cut is off.
    """

    coarse: bool
    order: Sequence[int]
    cut: int
    off: dict[str, set[int]] = field(default_factory=dict)
    beside: set[str] = field(default_factory=set)

    def coupled(self, other: Comparison) -> str | None:
        """The path of a leaf whose rows depend on each other, as this comparison and `other`, of another cut, show."""
        both = [path for path, rows in self.off.items() if rows & other.off.get(path, set())]
        return next(iter([*both, *sorted(self.beside & other.beside)]), None)

    def tensors(self, path: str, expected: Tensor, got: Tensor, dim: int | None = None) -> None:
        """Compare two tensors; their rows are along `dim`, the first dimension if None.

        Raises:
            Unequal: they differ by more than rounding.
        """
        if expected.shape != got.shape or expected.dtype != got.dtype or expected.device != got.device:
            raise Unequal(f"{path} is {_kind(expected)} in the whole call, but {_kind(got)} in lanes")
        one, other = expected.detach(), got.detach()
        if one.is_complex():
            one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
        if not one.is_floating_point():
            if not torch.equal(one, other):
                raise Unequal(f"{path}: {int((one != other).sum())} of {one.numel()} integers differ")
            return
        coarse = self.coarse or one.element_size() < 4
        wide = torch.promote_types(one.dtype, torch.float32) if one.element_size() >= 2 else torch.float32
        one, other = one.to(wide), other.to(wide)
        same = (one == other) | (one.isnan() & other.isnan())
        if one.numel() and bool(one.isnan().all()):
            raise Unequal(f"{path} is NaN everywhere, which tells nothing")
        if bool(same.all()):
            return
        difference = torch.where(same, 0.0, one - other).abs()
        if not bool(difference.isfinite().all()):
            raise Unequal(f"{path}: a value is not finite in the whole call or in lanes, but not in both")
        size = _without_marks(torch.where(one.isfinite(), one, 0.0).abs(), difference)
        if size.dim() < 2:
            size, difference = size.reshape(-1, 1), difference.reshape(-1, 1)
        if coarse:
            self._coarse(path, size, difference, dim or 0)
        else:
            self._fine(path, size, difference)

    def _fine(self, path: str, size: Tensor, difference: Tensor) -> None:
        columns = tuple(range(size.dim() - 1))
        rows = _at_least(size.amax(-1, keepdim=True), size)
        noise = _NOISE * torch.finfo(size.dtype).eps * rows
        in_column = (_FINE * _at_least(size.amax(columns, keepdim=True), size)).maximum(noise)
        for what, allowed in (("row", _FINE * rows), ("column", in_column)):
            excess = difference / allowed
            worst = int(excess.argmax())
            if float(excess.flatten()[worst]) > 1:
                scale = float(allowed.expand_as(size).flatten()[worst]) / _FINE
                found = float(difference.flatten()[worst])
                where = f"where the largest value of its {what} is {scale:.2g}"
                raise Unequal(f"{path} differs by up to {found:.2g}, {where}")

    def _coarse(self, path: str, size: Tensor, difference: Tensor, dim: int) -> None:
        relative = _rms(difference, (-1,)) / _at_least(_rms(size, (-1,)), size)
        off = relative > _OUTLIER
        outliers, median = float(off.float().mean()), float(relative.flatten().median())
        if median > _MEDIAN or outliers > _OUTLIERS:
            how = (
                f"{median:.2g} of a row (median over rows), and {outliers:.0%} of its rows by more than {_OUTLIER:.0%}"
            )
            raise Unequal(f"{path} differs by {how}")
        columns, rest = tuple(range(size.dim() - 1)), difference.masked_fill(off.unsqueeze(-1), 0.0)
        worst = float((_rms(rest, columns) / _at_least(_rms(size, columns), size)).max())
        if worst > _COLUMN:
            raise Unequal(f"{path} differs by {worst:.2g} of a column")
        if not outliers:
            return
        if dim >= off.dim():  # the rows are columns
            off, dim = (relative > _OUTLIER).reshape(1, -1).expand(size.shape[dim], -1), 0
        each = off.shape[dim] // len(self.order)
        rows = off.movedim(dim, 0).reshape(off.shape[dim], -1)
        edge = self.cut * each
        if bool(rows[max(0, edge - 1) : edge + 1].any()):
            self.beside.add(path)
        inside = rows.shape[1]
        self.off.setdefault(path, set()).update(
            (self.order[row // each] * each + row % each) * inside + at for row, at in rows.nonzero().tolist()
        )

    def trees(self, path: str, expected: Any, got: Any, seen: set[int]) -> None:
        """Compare two values of any kind: containers item by item, objects by their attributes. `seen`: objects that
        are compared already, by identity.

        Raises:
            Unequal: they differ by more than rounding.
        """
        if expected is got or id(expected) in seen:
            return
        if type(expected) is not type(got):
            raise Unequal(f"{path} is a {type(expected).__name__} in the whole call, a {type(got).__name__} in lanes")
        if isinstance(expected, Tensor):
            self.tensors(path, expected, got)
            return
        seen.add(id(expected))
        if isinstance(expected, _VALUES):
            if not identical(expected, got):
                raise Unequal(f"{path} is {expected!r:.40} in the whole call, {got!r:.40} in lanes")
            return
        children, others = children_of(expected), children_of(got)
        if children is None or others is None:
            children, others = _attributes(expected), _attributes(got)
        if [key for key, _ in children] != [key for key, _ in others]:
            raise Unequal(f"{path} has other keys, or another length, in lanes")
        for (key, child), (_, other) in zip(children, others, strict=True):
            self.trees(f"{path}.{key}", child, other, seen)


def _without_marks(size: Tensor, difference: Tensor) -> Tensor:
    """Absolute values, without mask values such as -1e9. A value is taken for a mask if it is the same in both runs,
    equal to the other masks, and a thousand times larger than the rest. Relative to masks, any difference would look
    small."""
    for _ in range(3):
        largest = size.max()
        marks = size == largest
        rest = size.masked_fill(marks, 0.0)
        if bool((difference[marks] != 0).any()) or not 0 < float(rest.max()) * _MARK < float(largest):
            break
        size = rest
    return size


def _rms(value: Tensor, over: Sequence[int]) -> Tensor:
    return value.square().mean(tuple(over)).sqrt()


def _at_least(scales: Tensor, values: Tensor) -> Tensor:
    """Scales of the rows or columns of `values`; of few values each, none below that of the lowest quarter."""
    count, floor = scales.numel(), torch.finfo(scales.dtype).tiny
    if values.numel() < _FEW * count:
        floor = max(floor, float(scales.flatten().kthvalue(max(count // 4, min(2, count - 1)) + 1).values))
    return scales.clamp_min(floor)


def identical(one: Any, other: Any) -> bool:
    """Whether two tensors, or two plain values, are equal bit for bit; NaN counts as equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
            return True
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if type(one) is not type(other) or not isinstance(one, _VALUES):
        return False
    return bool(one == other or (one != one and other != other))


def _attributes(value: object) -> list[tuple[str, Any]]:
    own = [(name, getattr(value, name)) for name in slots_of(value) if hasattr(value, name)]
    return [*own, *getattr(value, "__dict__", {}).items()]


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
