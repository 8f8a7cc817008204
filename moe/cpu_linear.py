"""A linear layer for inference, on the CPU library that multiplies faster on this machine.

torch multiplies fp32 matrices on a CPU with the BLAS it was built with, usually MKL, which is slow on processors of
other makers: on one AMD EPYC it reaches 98 GFLOP/s a core, and oneDNN, which torch also contains, reaches 230. So the
first call of a process times both and keeps the faster one (some 30 ms). Few rows and many rows are timed separately,
because with few rows the time goes into reading the weight. Everything else (other devices and dtypes,
autocast, gradients) is `torch.nn.functional.linear`.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ubatch import ConfigError
from ubatch.kernels import best_times, choice

_FEW_ROWS = 64  # up to here reading the weight takes the time, beyond it the arithmetic
_PROBES = {True: (32, 512, 1024), False: (256, 512, 1024)}  # few rows or not: tokens, inputs, outputs
_EXPERT_PROBE = (8, 512, 512)  # rows, inputs, outputs of an expert in a decode step
_PACKED_FOR_ROWS = 64  # rows that the packed layout is made for; it is good from 1 row to 1024
_MARGIN = 1.05  # another library must be this much faster than torch's own choice


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.

    Returns:
        `[..., out]`.
    """
    if _onednn_may_run(x, weight) and _onednn_is_faster(x.numel() <= _FEW_ROWS * x.shape[-1]):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


class PackedLinear:
    """A linear layer whose weight is kept only in oneDNN's blocked layout.

    Few rows gain most, because then the time goes into reading the weight: 8 rows by 512 x 512 take 0.6 of the time.

    Args:
        weight: `[out, in]` float32 or bfloat16 on the CPU; it may be freed afterwards.

    Raises:
        ConfigError: another dtype or device, or bfloat16 on a processor for which oneDNN has no kernels of it.
    """

    def __init__(self, weight: Tensor) -> None:
        if not _may_pack(weight.dtype, weight.device):
            raise ConfigError(
                "only float32 weights on a CPU can be packed, and bfloat16 ones where oneDNN has kernels for them, "
                f"not {weight.dtype} on {weight.device}. Choose experts 'grouped'."
            )
        self._dtype = weight.dtype
        self._in_features = weight.shape[1]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[..., in]` to `[..., out]`, of the weight's dtype.

        Raises:
            ConfigError: another dtype or width; or the call needs a gradient, which is not supported.
        """
        if x.dtype is not self._dtype or x.shape[-1] != self._in_features:
            raise ConfigError(
                f"this packed linear layer takes {self._dtype} [..., {self._in_features}], not {x.dtype} "
                f"{list(x.shape)}."
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError("packed weights have no gradients. Use torch.inference_mode(), or unpacked weights.")
        return self.unchecked(x)

    def unchecked(self, x: Tensor) -> Tensor:
        """As `__call__` without its checks: experts make hundreds of calls in a step."""
        return _onednn(x, self._packed, None)


def kernel_rows(rows: int) -> int:
    """`rows` rounded up for oneDNN, so that only few different numbers of rows occur.

    oneDNN builds and keeps a separate kernel for every number of rows, which costs some 0.7 ms and 1.2 MB. Numbers up
    to 16, which decoding uses and where padding costs most, are not rounded; larger ones grow by a quarter at most.
    From 256 rows on, as in a prefill, they grow by a sixteenth at most, because padding costs time (with steps of 64
    the experts took 8% longer).
    """
    for limit, step in ((16, 1), (64, 4), (512, 16), (1024, 32)):
        if rows <= limit:
            return -(-rows // step) * step
    return -(-rows // 64) * 64


def packing_pays(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `PackedLinear` is faster here than `linear` for the few rows that an expert has in a decode step.

    This does not follow from oneDNN's speed on large matrices: with few rows the layout of the weights matters more.
    False for what `PackedLinear` refuses.
    """
    return _may_pack(dtype, device) and _packed_is_faster(dtype)


def _may_pack(dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cpu":
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and _onednn_takes_bfloat16())


def _onednn_takes_bfloat16() -> bool:
    """Only on processors with AVX-512 or newer."""
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn_may_run(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dim() != 2:
        return _onednn(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)
    rows = x.shape[0]
    padded = kernel_rows(rows)
    if padded != rows:
        x = F.pad(x, (0, 0, 0, padded - rows))
    # What torch.compile calls for a linear layer on a CPU; there is no public name for it.
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out if padded == rows else out[:rows]


@functools.cache
def _onednn_is_faster(few_rows: bool) -> bool:
    """Measured once per process, for few rows and for many."""
    return _has_onednn() and choice(f"oneDNN is faster, few rows: {few_rows}", lambda: _measure_onednn(few_rows))


def _measure_onednn(few_rows: bool) -> bool:
    with torch.inference_mode():
        tokens, inputs, outputs = _PROBES[few_rows]
        x, weight = torch.ones(tokens, inputs, device="cpu"), torch.ones(outputs, inputs, device="cpu")
        own, onednn = best_times((lambda: F.linear(x, weight), lambda: _onednn(x, weight, None)))
        return own > _MARGIN * onednn


@functools.cache
def _packed_is_faster(dtype: torch.dtype) -> bool:
    """Measured once per process and dtype."""
    return _has_onednn() and choice(f"packing pays: {dtype}", lambda: _measure_packed(dtype))


def _measure_packed(dtype: torch.dtype) -> bool:
    with torch.inference_mode():
        tokens, inputs, outputs = _EXPERT_PROBE
        x = torch.ones(tokens, inputs, dtype=dtype, device="cpu")
        weight = torch.ones(outputs, inputs, dtype=dtype, device="cpu")
        packed = PackedLinear(weight)
        own, onednn = best_times((lambda: linear(x, weight), lambda: packed(x)))
        return own > _MARGIN * onednn


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
