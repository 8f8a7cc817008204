"""Multiplies rows with the weights of their experts on the CPU, for all experts in one call.

torch would multiply expert by expert. In a decode step each expert has a few rows, so threads start and join for 50 us
of work each, and read the weights at a fraction of the memory bandwidth. Here a call is one loop over panels of all
weights (`moe/kernels/grouped_linear.c`, compiled by `ubatch.kernels.c_jit`): two cores read the weights twice as fast,
and multiply many rows at 0.93 of the cores' peak. In bfloat16 (`grouped_linear_bf16.c`) a step reads half as much, and
AMX multiplies several times as fast where the processor has it (`docs/cpu-kernels.md`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ubatch import ConfigError
from ubatch.kernels.c_jit import compile_c, kernel_of, why_not_c

__all__ = ["GroupedLinear", "NativeLinear"]

_FOLDER = Path(__file__).parent / "kernels"
_SCRATCH_BYTES = 1 << 18  # of a thread's copied rows, which stay in its second-level cache
_SCRATCH_ROWS = 32  # a tile's rows; a scratch has a multiple of them


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
                padded = F.pad(half[expert], missing)
                part.copy_(padded.view(self._panels, width, groups, kernel.group).transpose(1, 2))

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
        threads = torch.get_num_threads()  # in a new thread OpenMP's own default would apply, not torch's
        scratch = self._kernel.scratch(threads, rows, self._inputs)
        self._kernel.run(
            x.data_ptr(),
            x.stride(0),
            0 if source is None else source.data_ptr(),
            first_row.data_ptr(),
            first_row.shape[0] - 1,
            self._panels,
            self._inputs,
            self._packed.data_ptr() + first_expert * self._packed.stride(0) * self._packed.itemsize,
            out.data_ptr(),
            *(() if scratch is None else (scratch.data_ptr(), scratch.shape[1])),
            self._gated,
            threads,
        )
        return out if out.shape[1] == self.outputs else out[:, : self.outputs]


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

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[..., in]` to `[..., out]`, of the weight's dtype.

        Raises:
            ConfigError: another dtype, device or width; or the call needs a gradient, which is not supported.
        """
        if x.dtype is not self.dtype or x.device.type != "cpu" or x.shape[-1] != self._in_features:
            raise ConfigError(
                f"this repacked linear layer takes {self.dtype} [..., {self._in_features}] on the CPU, not {x.dtype} "
                f"{list(x.shape)} on {x.device}."
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError("repacked weights have no gradients. Use torch.inference_mode(), or unpacked weights.")
        rows = x.reshape(-1, self._in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return self._linear(rows, torch.tensor((0, rows.shape[0]))).reshape(*x.shape[:-1], self._linear.outputs)


@dataclass(frozen=True)
class _Kernel:
    """The compiled kernel of a dtype.

    Attributes:
        run: `grouped_linear` of the source.
        lanes: columns of half a panel, by default as many floats as a vector of the processor has.
        group: inputs that are side by side in a panel.
        depth: a panel's inputs are filled up with zeros to a multiple of it.
        copied_row_bytes: the size of a copied row by its number of inputs; None if rows are not copied.
    """

    run: Callable[..., None]
    lanes: int
    group: int = 1
    depth: int = 1
    copied_row_bytes: Callable[[int], int] | None = None

    def scratch(self, threads: int, rows: int, inputs: int) -> Tensor | None:
        """Memory for rows that the threads copy, `[threads, rows of each, bytes of a row]`; None if not needed."""
        if self.copied_row_bytes is None:
            return None
        row_bytes = self.copied_row_bytes(inputs)
        tiles = max(1, min(-(-rows // _SCRATCH_ROWS), _SCRATCH_BYTES // row_bytes // _SCRATCH_ROWS))
        return torch.empty(threads, tiles * _SCRATCH_ROWS, row_bytes, dtype=torch.uint8, device="cpu")


@cache
def _kernel(dtype: torch.dtype, **defines: int) -> _Kernel:
    """Compile the kernel of a dtype."""
    reason = why_not_c()
    if reason is not None:
        raise ConfigError(reason)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    first, last = (pointer, number, *[pointer] * 2, *[number] * 3, *[pointer] * 2), [ctypes.c_int] * 2
    if dtype is torch.float32:
        library = compile_c((_FOLDER / "grouped_linear.c").read_text(encoding="utf-8"), **defines)
        return _Kernel(kernel_of(library, "grouped_linear", *first, *last), int(library.lanes()))
    source = (_FOLDER / "grouped_linear_bf16.c").read_text(encoding="utf-8")
    library = compile_c(source, **defines)
    while not library.suitable() and "KIND" not in defines:
        library = compile_c(source, **defines, KIND=int(library.kind()) - 1)
    library.copied_row_bytes.argtypes, library.copied_row_bytes.restype = (number,), number
    run = kernel_of(library, "grouped_linear", *first, pointer, number, *last)
    return _Kernel(run, int(library.lanes()), 2, int(library.depth()), library.copied_row_bytes)
