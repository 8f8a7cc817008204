"""Inputs and outputs of a graph: static inputs, frozen arguments, copied outputs.

    tensor argument     its contents are copied into a static input before every replay
    anything else       frozen: every call must pass the same object, or an equal plain value
    output tensor       stays where the graph writes it, and is copied for the caller

Static inputs are views of one flat buffer per argument (name or path) and dtype, sized for the largest capture. Graphs
of all sizes share it, so many graphs need no more memory than one.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ubatch.calls.call_plan import CallLeaves, children_unless_leaf
from ubatch.calls.containers import PLAIN, rebuild
from ubatch.calls.merging import named_dim
from ubatch.errors import ConfigError

RowDims = Mapping[str, tuple[int, int]]
"""Path of an output tensor -> (dimension of its rows, number of its rows per row of the call)."""


class StaticBuffers:
    """Memory of the static inputs of all graphs of one wrapper.

    Args:
        device: of the memory; tensors on another device are refused.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def clear(self) -> None:
        """Drop the buffers; graphs that still use them keep them alive."""
        self._flat.clear()

    @torch.inference_mode(False)
    def static(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Static copies of a call's tensors, with the same shapes, strides (if dense) and contents.

        Raises:
            ConfigError: a tensor is on another device, or requires grad while gradients are recorded.
        """
        twins = {}
        for path, value in tensors.items():
            if value.device != self._device:
                raise ConfigError(
                    f"argument {path!r} is on {value.device}, but the graph runs on {self._device}: what it holds "
                    "would be frozen in the graph. Move it there, or pass a number instead of a tensor."
                )
            twins[path] = self._twin(path, value)
            twins[path].copy_(value.detach())
        return twins

    def _twin(self, path: str, value: Tensor) -> Tensor:
        count = math.prod(value.shape)
        flat = self._flat.get((path, value.dtype))
        if flat is None or flat.shape[0] < count:
            flat = torch.empty(max(count, 1), dtype=value.dtype, device=self._device)
            self._flat[path, value.dtype] = flat
        dense = torch.empty_like(value, device="meta")  # keeps dense strides, else contiguous
        return flat.as_strided(value.shape, dense.stride())


@dataclass(frozen=True)
class GraphInputs:
    """The inputs that one graph was captured with.

    Attributes:
        tensors: path -> static input.
        others: path -> frozen argument.
        row_dims: path -> dimension of the rows, if the graph also takes fewer rows; else empty.
        rows: number of rows at capture; 0 if the graph takes no fewer.
    """

    tensors: Mapping[str, Tensor]
    others: Mapping[str, Any]
    row_dims: Mapping[str, int]
    rows: int

    def mismatch(self, call: CallLeaves, rows: int | None = None) -> str | None:
        """Why a call of `rows` rows (None: as many as captured) cannot be replayed; None if it can."""
        for what, own, captured in (("tensor ", call.tensors, self.tensors), ("", call.others, self.others)):
            if own.keys() != captured.keys():
                path = min(own.keys() ^ captured.keys())
                return f"{what}argument {path!r} is {'missing' if path in captured else 'new'}"
        for path, value in call.tensors.items():
            static, dim = self.tensors[path], self.row_dims.get(path)
            shape = tuple(static.shape)
            if rows is not None and dim is not None:
                shape = (*shape[:dim], rows, *shape[dim + 1 :])
            if value.dtype != static.dtype or value.shape != shape:
                was = f"{static.dtype} {list(static.shape)}"
                return f"argument {path!r} is {value.dtype} {list(value.shape)}, was captured as {was}"
        for path, value in call.others.items():
            if not _same(value, self.others[path]):
                return f"argument {path!r} is {value!r:.80}, was captured as {self.others[path]!r:.80}"
        return None

    def fill(self, call: CallLeaves, rows: int | None = None) -> None:
        """Copy a call's tensors into the static inputs. If `rows` is given, the call has that many; the rest become
        zero."""
        for path, value in call.tensors.items():
            static, dim = self.tensors[path], self.row_dims.get(path)
            if rows is None or dim is None or rows == self.rows:
                static.copy_(value)
            else:
                static.narrow(dim, 0, rows).copy_(value)
                static.narrow(dim, rows, self.rows - rows).zero_()


def _same(own: Any, captured: Any) -> bool:
    """Whether two arguments match: equal plain values, containers of equal type and length, else the same object."""
    if own is captured:
        return True
    plain = type(own) is type(captured) and isinstance(own, (*PLAIN, tuple))
    return plain and bool(own == captured)


class GraphOutput:
    """A graph's output, and how to copy it.

    Args:
        value: the captured call's output: tensors, plain values, and containers of them.

    Attributes:
        described: path -> shape of a tensor in it, or a plain value; a replay returns the values of the capture.

    Raises:
        ConfigError: it holds another kind of object, which cannot be copied.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._dims: RowDims = {}
        self.described = {
            path: leaf.shape if isinstance(leaf, Tensor) else leaf for path, leaf in self._leaves("output", value)
        }

    def cut_along(self, row_dims: RowDims, rows: int) -> None:
        """Allow copies of fewer rows.

        Args:
            row_dims: path -> dimension of the rows; see `find_row_dims`.
            rows: number of rows of the captured call.

        Raises:
            ConfigError: a tensor has another size along its dimension of rows.
        """
        for path, (dim, times) in row_dims.items():
            shape = self.described.get(path)
            if isinstance(shape, torch.Size) and shape[dim] != rows * times:
                raise ConfigError(f"{path} has shape {list(shape)} for {rows} rows, unlike in a call of other rows.")
        self._dims = row_dims

    def copy(self, rows: int | None = None) -> Any:
        """A copy; only the first `rows` rows if given."""
        return self._copy("output", self._value, rows)

    def _copy(self, path: str, value: Any, rows: int | None) -> Any:
        if isinstance(value, Tensor):
            where = self._dims.get(path)
            if where is not None and rows is not None:
                value = value.narrow(where[0], 0, rows * where[1])
            return value.clone()
        children = children_unless_leaf(value)
        if not children:
            return value
        return rebuild(value, [self._copy(f"{path}.{key}", child, rows) for key, child in children])

    def _leaves(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, (Tensor, *PLAIN)):
            yield path, value
            return
        children = children_unless_leaf(value)
        if children is None:
            raise ConfigError(
                f"{path} is a {type(value).__name__}, which cannot be copied out of a graph. Return tensors, or "
                "containers of them (use_cache=False in Hugging Face models)."
            )
        for key, child in children:
            yield from self._leaves(f"{path}.{key}", child)


def find_row_dims(
    more: Mapping[str, Any], fewer: Mapping[str, Any], rows: tuple[int, int], output_dims: Mapping[str, int | None]
) -> RowDims:
    """Which dimension of each output has the rows, found from the shapes of two calls with different numbers of rows.

    Args:
        more, fewer: `GraphOutput.described` of the call with more and the one with fewer rows.
        rows: numbers of rows of the two calls.
        output_dims: see `UBatchConfig`; None means that the output does not depend on the rows.

    Raises:
        ConfigError: an output's size does not follow the number of rows, so it may mix rows; or a plain value does.
    """
    found: dict[str, tuple[int, int]] = {}
    for path, shape in more.items():
        other = fewer.get(path)
        if not isinstance(shape, torch.Size):
            if shape != other:
                raise ConfigError(
                    f"{path} is {shape!r} for {rows[0]} rows and {other!r} for {rows[1]}, which a graph cannot give "
                    "back. Return a tensor."
                )
            continue
        dim, named = named_dim(path, output_dims)
        if named and dim is None:
            continue
        other = other if isinstance(other, torch.Size) else torch.Size()
        differ = [at for at, sizes in enumerate(zip(shape, other, strict=False)) if sizes[0] != sizes[1]]
        follows = (
            len(shape) == len(other) and len(differ) == 1 and shape[differ[0]] * rows[1] == other[differ[0]] * rows[0]
        )
        if not follows or (dim is not None and dim % len(shape) != differ[0]):
            raise ConfigError(
                f"{path} has shape {list(shape)} for {rows[0]} rows and {list(other)} for {rows[1]}, so it cannot be "
                "cut to the rows of a smaller call. Name it in output_dims: None if it does not depend on the rows."
            )
        found[path] = differ[0], shape[differ[0]] // rows[0]
    return found
