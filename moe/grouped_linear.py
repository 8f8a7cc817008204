"""Multiplies rows with the weights of their experts on the CPU, for all experts in one call.

torch would multiply expert by expert. In a decode step each expert has a few rows, so threads start and join for 50 us
of work each, and read the weights at a fraction of the memory bandwidth. Here a call is one loop over panels of all
weights (`moe/kernels/grouped_linear.c`, compiled by `ubatch.kernels.c_jit`): two cores read the weights twice as fast,
and multiply many rows at 0.93 of the cores' peak. In bfloat16 (`grouped_linear_bf16.c`) a step reads half as much, and
AMX multiplies several times as fast where the processor has it (`docs/cpu-kernels.md`).
"""

import ctypes
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ubatch import ConfigError
from ubatch.kernels import TILES_SOURCE, compile_c, kernel_of, rows_contiguous, this_thread, why_not_c

_FOLDER = Path(__file__).parent / "kernels"
_SCRATCH_BYTES = 1 << 18  # of a thread's copied rows, which stay in its second-level cache
_SCRATCH_ROWS = 32  # a tile's rows; a scratch has a multiple of them
_KEPT_BYTES = 1 << 22  # most memory that a thread keeps between calls
_AMX = 2  # the kind of kernel that uses it
_SUMS = 2  # the kernels' form of a result that is not rounded


class GroupedLinear:
    """The weights of some experts, kept only in the kernel's layout.

    Args:
        weight: `[experts, out, in]` float32 or bfloat16 on the CPU; it may be freed afterwards.
        gated: the first half of the outputs is a gate, and the result is `silu(gate) * other half`.

    Attributes:
        dtype: of the weight, the rows and the result. Sums are in float32 and are rounded once.
        outputs: elements of a result row: `out`, or half of it if gated.

    Raises:
        ConfigError: another dtype or device, or C cannot be compiled here.
    """

    def __init__(self, weight: Tensor, *, gated: bool = False) -> None:
        known = weight.dtype in (torch.float32, torch.bfloat16)
        if not known or weight.device.type != "cpu" or weight.dim() != 3:
            raise ConfigError(
                f"weights must be float32 or bfloat16 [experts, out, in] on a CPU, not {weight.dtype} "
                f"{list(weight.shape)} on {weight.device}."
            )
        self.dtype = weight.dtype
        self._kernel = kernel = _kernel(weight.dtype)
        self._gated = gated
        self._inputs = weight.shape[2]
        self._row_bytes = 0 if kernel.copied_row_bytes is None else kernel.copied_row_bytes(self._inputs)
        halves = weight.detach().chunk(2, dim=1) if gated else (weight.detach(),)
        self.outputs = halves[0].shape[1]
        # A panel has one vector of the gate and one of the other half; without a gate, two consecutive vectors.
        width = kernel.lanes if gated else 2 * kernel.lanes
        self._panels = -(-self.outputs // width)
        missing = (0, -self._inputs % kernel.depth, 0, self._panels * width - self.outputs)
        groups = (self._inputs + missing[1]) // kernel.group
        self._packed = weight.new_empty(weight.shape[0], self._panels, groups, 2 * kernel.lanes, kernel.group)
        for expert, packed in enumerate(self._packed):  # one by one: weights may be most of the memory
            for half, part in zip(halves, packed.split(width, dim=2), strict=True):
                padded = F.pad(half[expert], missing) if any(missing) else half[expert]
                part.copy_(padded.view(self._panels, width, groups, kernel.group).transpose(1, 2))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the compiled kernel is loaded anew."""
        return {**vars(self), "_kernel": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _kernel=_kernel(state["dtype"]))

    @property
    def packed(self) -> Tensor:
        """`[experts, ...]`: all there is of the weights, in the kernel's layout."""
        return self._packed

    def __call__(self, x: Tensor, first_row: Tensor, source: Tensor | None = None, *, first_expert: int = 0) -> Tensor:
        """Multiply the rows of every expert by its weight. The arguments are not checked.

        Args:
            x: `[N, in]` of the weight's dtype; its rows may be strided, each is contiguous.
            first_row: `[experts + 1]` int64, where each expert's rows begin, and where the last one's end (M).
            first_expert: the first expert to use, if not all are used.
            source: `[M]` int64, the row of `x` to use for each row; None uses the rows of `x` in order.

        Returns:
            `[M, outputs]`; rows may be strided.
        """
        rows = x.shape[0] if source is None else source.shape[0]
        out = x.new_empty(rows, self._packed.shape[3] // (2 if self._gated else 1) * self._panels)
        if this_thread.recording is not None:
            this_thread.recording.keep(first_row, source)
        experts = first_row.data_ptr(), first_row.shape[0] - 1, first_expert
        return self._multiply(x, None if source is None else source.data_ptr(), *experts, out, int(self._gated))

    def all_rows(self, x: Tensor, *, sums: bool = False) -> Tensor:
        """Multiply all rows by the weight of the first expert; see `__call__`.

        Args:
            x: `[N, in]`.
            sums: the result is the sums in float32, not rounded; not if gated.
        """
        rows = array("q", (0, x.shape[0]))
        if this_thread.recording is not None:
            this_thread.recording.keep(rows)
        columns = self._packed.shape[3] // (2 if self._gated else 1) * self._panels
        out = torch.empty(x.shape[0], columns, dtype=torch.float32 if sums else x.dtype, device="cpu")
        return self._multiply(x, None, rows.buffer_info()[0], 1, 0, out, _SUMS if sums else int(self._gated))

    def weight_rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` `[N]` of the first expert's weight, `[N, in]`; not if gated.

        Raises:
            IndexError: an index is out of range.
        """
        indices = indices.long().contiguous()
        if indices.shape[0] and not 0 <= int(indices.min()) <= int(indices.max()) < self.outputs:
            raise IndexError(f"{int(indices.min())} to {int(indices.max())}: the weight has {self.outputs} rows.")
        _, units, width, group = self._packed.shape[1:]
        out = self._packed.new_empty(indices.shape[0], units * group)
        addresses = indices.data_ptr(), indices.shape[0], out.data_ptr()
        _take_rows()(self._packed.data_ptr(), units, width, *addresses, torch.get_num_threads())
        return out[:, : self._inputs]

    def _multiply(
        self, x: Tensor, source: int | None, first_row: int, experts: int, first_expert: int, out: Tensor, form: int
    ) -> Tensor:
        threads = torch.get_num_threads()  # in a new thread OpenMP's own default would apply, not torch's
        own_rows: tuple[int, ...] = ()
        if self._row_bytes:
            copied_rows, row_bytes = _copied(out.shape[0], self._row_bytes)
            scratch = _scratch(threads * copied_rows * row_bytes)  # held until the kernel has run
            own_rows = scratch.data_ptr(), copied_rows
        self._kernel.run(
            *(x.data_ptr(), x.stride(0), source, first_row),
            *(experts, self._panels, self._inputs),
            self._packed.data_ptr() + first_expert * self._packed.stride(0) * self._packed.itemsize,
            *(out.data_ptr(), *own_rows),
            *(form, threads),
        )
        return out if out.shape[1] == self.outputs else out[:, : self.outputs]


def run_layer(
    up: GroupedLinear, down: GroupedLinear, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, first_expert: int
) -> Tensor:
    """All experts of a layer in one call: sorting, both products, and the sum over a token's choices.

    The arguments are not checked further.

    Args:
        up: gated; `down` takes its results, and gives rows like those of `x`.
        x: `[N, in]` of the weights' dtype; its rows may be strided, each is contiguous.
        topk_ids: `[N, k]`, the experts of each row; those that are not held are ignored.
        topk_weights: `[N, k]` float32.
        first_expert: the id of the first held expert.

    Returns:
        `[N, in]`, contiguous.
    """
    kernel, (tokens, top_k), experts = up._kernel, topk_ids.shape, up._packed.shape[0]
    pairs, threads = tokens * top_k, torch.get_num_threads()
    ids, weights = topk_ids.long().contiguous(), topk_weights.float().contiguous()
    up_rows = down_rows = scratch_bytes = 0
    if up._row_bytes:
        up_rows, up_bytes = _copied(pairs, up._row_bytes)
        down_rows, down_bytes = _copied(pairs, down._row_bytes)
        scratch_bytes = max(up_rows * up_bytes, down_rows * down_bytes)
    of_numbers, of_inner, of_rows, end = _places(
        threads * scratch_bytes,
        8 * (experts + 1 + 2 * pairs),  # numbers
        pairs * up._panels * kernel.lanes * x.itemsize,  # inner
        pairs * down._panels * 2 * kernel.lanes * x.itemsize,  # rows
    )
    scratch = _scratch(end)  # held until the kernel has run
    own = scratch.data_ptr()
    out = x.new_empty(x.shape)
    kernel.run_layer(
        *(x.data_ptr(), x.stride(0), ids.data_ptr(), weights.data_ptr()),
        *(tokens, top_k, first_expert, experts),
        *(up._inputs, up._panels, up._packed.data_ptr()),
        *(down._inputs, down._panels, down._packed.data_ptr()),
        *(own + of_numbers, own + of_inner, own + of_rows, out.data_ptr()),
        *(own, scratch_bytes, up_rows, down_rows),
        threads,
    )
    return out


@lru_cache(1024)
def _places(*sizes: int) -> tuple[int, ...]:
    """Where each of several arrays ends, and the next begins, in one memory; in bytes, aligned."""
    return tuple(accumulate(-(-size // 64) * 64 for size in sizes))


def add_rows(rows: Tensor, row_of_pair: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """As `moe.segments.segment_sum`, for rows in float32 or bfloat16 and `weights` in float32: the bits of `run_layer`.

    Raises:
        ConfigError: C cannot be compiled here.
    """
    tokens, columns = offsets.shape[0] - 1, rows.shape[1]
    out = rows.new_empty(tokens, columns)
    addresses = (row_of_pair.data_ptr(), offsets.data_ptr(), weights.data_ptr())
    _kernel(rows.dtype).add_rows(
        rows.data_ptr(), rows.stride(0), *addresses, tokens, columns, out.data_ptr(), torch.get_num_threads()
    )
    return out


class NativeLinear:
    """A linear layer for inference, as `GroupedLinear` of one expert.

    Args:
        weight: `[out, in]` float32 or bfloat16 on the CPU; it may be freed afterwards.

    Raises:
        ConfigError: as `GroupedLinear`.
    """

    def __init__(self, weight: Tensor) -> None:
        self._linear = GroupedLinear(weight[None])
        self.dtype = weight.dtype
        self._in_features = weight.shape[1]

    def __call__(self, x: Tensor, *, sums: bool = False) -> Tensor:
        """`x` `[..., in]` to `[..., out]`, of the weight's dtype; see also `sums`.

        Raises:
            ConfigError: another dtype, device or width; or the call needs a gradient, which is not supported.
        """
        if x.dtype is not self.dtype or not x.is_cpu or x.shape[-1] != self._in_features:
            raise ConfigError(
                f"this repacked linear layer takes {self.dtype} [..., {self._in_features}] on the CPU, not {x.dtype} "
                f"{list(x.shape)} on {x.device}."
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError("repacked weights have no gradients. Use torch.inference_mode(), or unpacked weights.")
        rows = x if x.dim() == 2 else x.reshape(-1, self._in_features)
        out = self._linear.all_rows(rows if rows.stride(1) == 1 else rows_contiguous(rows), sums=sums)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], self._linear.outputs)

    def sums(self, x: Tensor) -> Tensor:
        """The same in float32, not rounded to the weight's dtype; errors as `__call__`."""
        return self(x, sums=True)

    def weight_rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` `[N]` int64 of the weight, `[N, in]`.

        Raises:
            IndexError: an index is out of range.
        """
        return self._linear.weight_rows(indices)


_of_thread = threading.local()


def _scratch(num_bytes: int) -> Tensor:
    """Memory for one call. Up to `_KEPT_BYTES` it is the calling thread's own, which its next call overwrites."""
    if num_bytes > _KEPT_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    scratch: Tensor | None = getattr(_of_thread, "scratch", None)
    if scratch is None or scratch.shape[0] < num_bytes:
        scratch = _of_thread.scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    if this_thread.recording is not None:
        this_thread.recording.keep(scratch)
    return scratch


@dataclass(frozen=True)
class _Kernel:
    """The compiled kernel of a dtype.

    Attributes:
        run: `grouped_linear` of the source.
        run_layer, add_rows: `experts_layer` and `add_rows`.
        lanes: columns of half a panel, by default as many floats as a vector of the processor has.
        group: inputs that are side by side in a panel.
        depth: a panel's inputs are filled up with zeros to a multiple of it.
        copied_row_bytes: the size of a copied row by its number of inputs; None if rows are not copied.
    """

    run: Callable[..., None]
    run_layer: Callable[..., None]
    add_rows: Callable[..., None]
    lanes: int
    group: int = 1
    depth: int = 1
    copied_row_bytes: Callable[[int], int] | None = None


@lru_cache(1024)
def _copied(rows: int, row_bytes: int) -> tuple[int, int]:
    """How many of the rows a thread copies at once, and the bytes of each."""
    tiles = max(1, min(-(-rows // _SCRATCH_ROWS), _SCRATCH_BYTES // row_bytes // _SCRATCH_ROWS))
    return tiles * _SCRATCH_ROWS, row_bytes


@cache
def _take_rows() -> Callable[..., None]:
    library = compile_c((_FOLDER / "packed_rows.c").read_text(encoding="utf-8"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return kernel_of(library, "take_rows", pointer, number, number, pointer, number, pointer, ctypes.c_int)


@cache
def _kernel(dtype: torch.dtype, **defines: int) -> _Kernel:
    """Compile the kernel of a dtype."""
    reason = why_not_c()
    if reason is not None:
        raise ConfigError(reason)
    bf16 = dtype is torch.bfloat16
    names = ("bf16_tiles", "grouped_linear_bf16") if bf16 else ("grouped_linear",)
    files = [*([TILES_SOURCE] if bf16 else []), *(_FOLDER / f"{name}.c" for name in (*names, "experts_layer"))]
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    if "KIND" in defines:
        defines["TILES"] = int(defines["KIND"] == _AMX)
    library = compile_c(source, BFLOAT16=int(bf16), **defines)
    while bf16 and not library.suitable() and "KIND" not in defines:
        library = compile_c(source, BFLOAT16=1, TILES=0, **defines, KIND=int(library.kind()) - 1)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    sizes = (*[number] * 6, pointer, *[number] * 2, *[pointer] * 6, *[number] * 3, ctypes.c_int)
    layer = kernel_of(library, "experts_layer", pointer, number, *[pointer] * 2, *sizes)
    add = kernel_of(library, "add_rows", pointer, number, *[pointer] * 3, number, number, pointer, ctypes.c_int)
    first, last = (pointer, number, *[pointer] * 2, *[number] * 3, *[pointer] * 2), [ctypes.c_int] * 2
    if not bf16:
        return _Kernel(kernel_of(library, "grouped_linear", *first, *last), layer, add, int(library.lanes()))
    library.copied_row_bytes.argtypes, library.copied_row_bytes.restype = (number,), number
    run = kernel_of(library, "grouped_linear", *first, pointer, number, *last)
    return _Kernel(run, layer, add, int(library.lanes()), 2, int(library.depth()), library.copied_row_bytes)
