"""Multiplies rows with the weights of their experts on the CPU, for all experts in one call.

torch would multiply expert by expert. In a decode step each expert has a few rows, so threads start and join for 50 us
of work each, and read the weights at a fraction of the memory bandwidth. Here a call is one loop over panels of all
weights (`moe/kernels/grouped_linear.c`, compiled by `ubatch.kernels.c_jit`): two cores read the weights twice as fast,
and multiply many rows at 0.93 of the cores' peak (`docs/cpu-kernels.md`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ubatch import ConfigError
from ubatch.kernels.c_jit import compile_c, kernel_of, why_not_c

__all__ = ["GroupedLinear", "NativeLinear"]

_SOURCE = Path(__file__).parent / "kernels" / "grouped_linear.c"


class GroupedLinear:
    """The weights of some experts, kept only in the kernel's layout.

    Args:
        weight: `[experts, out, in]` float32 on the CPU; it may be freed afterwards.
        gated: the first half of the outputs is a gate, and the result is `silu(gate) * other half`.

    Attributes:
        outputs: elements of a result row: `out`, or half of it if gated.

    Raises:
        ConfigError: another dtype or device, or C cannot be compiled here.
    """

    def __init__(self, weight: Tensor, *, gated: bool = False) -> None:
        if weight.dtype is not torch.float32 or weight.device.type != "cpu" or weight.dim() != 3:
            raise ConfigError(
                f"weights must be float32 [experts, out, in] on a CPU, not {weight.dtype} {list(weight.shape)} on "
                f"{weight.device}."
            )
        self._kernel, lanes = _library()
        self._gated = gated
        self._inputs = weight.shape[2]
        halves = weight.detach().chunk(2, dim=1) if gated else (weight.detach(),)
        self.outputs = halves[0].shape[1]
        # A panel has one vector of the gate and one of the other half; without a gate, two consecutive vectors.
        width = lanes if gated else 2 * lanes
        self._panels = -(-self.outputs // width)
        missing = self._panels * width - self.outputs
        self._packed = weight.new_empty(weight.shape[0], self._panels, self._inputs, 2 * lanes)
        for expert, packed in enumerate(self._packed):  # one by one: weights may be most of the memory
            for half, part in zip(halves, packed.split(width, dim=2), strict=True):
                part.copy_(F.pad(half[expert], (0, 0, 0, missing)).view(self._panels, width, -1).transpose(1, 2))

    def __call__(self, x: Tensor, first_row: Tensor, source: Tensor | None = None, *, first_expert: int = 0) -> Tensor:
        """Multiply the rows of every expert by its weight. The arguments are not checked.

        Args:
            x: `[N, in]` float32; its rows may be strided, each is contiguous.
            first_row: `[experts + 1]` int64, where each expert's rows begin, and where the last one's end (M).
            first_expert: the first expert to use, if not all are used.
            source: `[M]` int64, the row of `x` to use for each row; None uses the rows of `x` in order.

        Returns:
            `[M, outputs]`; rows may be strided.
        """
        rows = x.shape[0] if source is None else source.shape[0]
        out = x.new_empty(rows, self._packed.shape[3] // (2 if self._gated else 1) * self._panels)
        self._kernel(
            x.data_ptr(),
            x.stride(0),
            0 if source is None else source.data_ptr(),
            first_row.data_ptr(),
            first_row.shape[0] - 1,
            self._panels,
            self._inputs,
            self._packed[first_expert].data_ptr(),
            out.data_ptr(),
            self._gated,
            torch.get_num_threads(),  # in a new thread OpenMP's own default would apply, not torch's
        )
        return out[:, : self.outputs]


class NativeLinear:
    """A linear layer for inference, as `GroupedLinear` of one expert.

    Args:
        weight: `[out, in]` float32 on the CPU; it may be freed afterwards.

    Raises:
        ConfigError: as `GroupedLinear`.
    """

    def __init__(self, weight: Tensor) -> None:
        self._linear = GroupedLinear(weight[None])
        self._in_features = weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[..., in]` float32 to `[..., out]`.

        Raises:
            ConfigError: another dtype, device or width; or the call needs a gradient, which is not supported.
        """
        if x.dtype is not torch.float32 or x.device.type != "cpu" or x.shape[-1] != self._in_features:
            raise ConfigError(
                f"a repacked linear layer takes float32 [..., {self._in_features}] on the CPU, not {x.dtype} "
                f"{list(x.shape)} on {x.device}."
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError("repacked weights have no gradients. Use torch.inference_mode(), or unpacked weights.")
        rows = x.reshape(-1, self._in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return self._linear(rows, torch.tensor((0, rows.shape[0]))).reshape(*x.shape[:-1], self._linear.outputs)


@cache
def _library(**defines: int) -> tuple[Callable[..., None], int]:
    """Compile the kernel; also returns the floats per vector, `LANES`, by default as many as the processor has."""
    reason = why_not_c()
    if reason is not None:
        raise ConfigError(reason)
    library = compile_c(_SOURCE.read_text(encoding="utf-8"), **defines)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    types = (pointer, number, *[pointer] * 2, *[number] * 3, *[pointer] * 2, *[ctypes.c_int] * 2)
    return kernel_of(library, "grouped_linear", *types), int(library.lanes())
