"""Whether two results are equal, except for rounding that depends on the batch size.

    structure, types, integers, bools      identical
    NaN                                    equal to NaN; an infinity is equal to itself
    float32, float64, complex              within 1e-4 of the leaf's largest value, everywhere
    a call in 16 bits                      by rows: the median of rms(difference) / rms(row) is at most 1e-2, and at
                                           most 5% of the rows are above 5e-2

In 16 bits a near-tie in a router sometimes sends a token to another expert, and its row then differs a lot. A module
whose rows depend on each other shows differences in most rows, or in the rows next to the cut between the lanes; so the
latter are checked separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ubatch.calls.containers import PLAIN, children_of

__all__ = ["Comparison", "Unequal", "identical"]

_FINE = 1e-4
_MEDIAN = 1e-2
_OUTLIER = 5e-2
_OUTLIERS = 0.05
_MARK = 1e3
_VALUES = (*PLAIN, set, frozenset)


class Unequal(Exception):
    """Two results differ; the message says where, and by how much."""


@dataclass
class Comparison:
    """Compares what the whole call returned and wrote with what its lanes returned and wrote.

    Attributes:
        coarse: whether the call computes in 16 bits.
        rows: number of rows of the call in lanes.
        cut: the first row of the second lane.
        beside: paths of leaves whose row just before or just after the cut differs.
    """

    coarse: bool
    rows: int
    cut: int
    beside: set[str] = field(default_factory=set)

    def tensors(self, path: str, expected: Tensor, got: Tensor, dim: int | None = None) -> None:
        """Compare two tensors; their rows are along `dim`, None if unknown.

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
        if self.coarse:
            self._by_rows(path, size, difference, dim)
            return
        largest = float(size.max())
        worst = float(difference.max())
        if worst > _FINE * largest:
            raise Unequal(f"{path} differs by up to {worst:.2g}, where its largest value is {largest:.2g}")

    def _by_rows(self, path: str, expected: Tensor, difference: Tensor, dim: int | None) -> None:
        off = _relative(expected, difference, (-1,) if expected.dim() > 1 else ())
        outliers = float((off > _OUTLIER).float().mean())
        median = float(off.flatten().median())
        if median > _MEDIAN or outliers > _OUTLIERS:
            raise Unequal(
                f"{path} differs by {median:.2g} of a row (median over rows), and {outliers:.0%} of its rows by more "
                f"than {_OUTLIER:.0%}"
            )
        if dim is None or not outliers:
            return
        off = _relative(expected, difference, tuple(each for each in range(expected.dim()) if each != dim))
        edge = self.cut * expected.shape[dim] // self.rows
        if bool((off[max(0, edge - 1) : edge + 1] > _OUTLIER).any()):
            self.beside.add(path)

    def trees(self, path: str, expected: Any, got: Any) -> None:
        """Compare two values of any kind: containers item by item, objects by their attributes.

        Raises:
            Unequal: they differ by more than rounding.
        """
        self._trees(path, expected, got, set())

    def _trees(self, path: str, expected: Any, got: Any, seen: set[int]) -> None:
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
            self._trees(f"{path}.{key}", child, other, seen)


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


def _relative(expected: Tensor, difference: Tensor, over: Sequence[int]) -> Tensor:
    """rms(difference) / rms(expected), over the dimensions `over`; 0 where both are zero."""
    top, bottom = difference.square(), expected.square()
    if over:
        top, bottom = top.mean(tuple(over)), bottom.mean(tuple(over))
    return (top / bottom.clamp_min(torch.finfo(bottom.dtype).tiny)).sqrt()


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
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    own = [(name, getattr(value, name)) for name in slots if hasattr(value, name) and not name.startswith("__")]
    return [*own, *getattr(value, "__dict__", {}).items()]


def _kind(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
