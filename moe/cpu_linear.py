"""A linear layer for inference, by whichever CPU library multiplies faster here.

torch multiplies fp32 matrices on a CPU with the BLAS it was built with, usually MKL, which is slow on processors of
other makers: on one AMD EPYC it reaches 98 GFLOP/s a core where oneDNN, which torch has on board too, reaches 230. So
the first call of a process multiplies with either and keeps the faster one (some 10 ms). Everything else (other devices
and dtypes, autocast, gradients) is `torch.nn.functional.linear`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ubatch import ConfigError

__all__ = ["PackedLinear", "linear", "packing_pays"]

_PROBE = (256, 512, 512)  # tokens, inputs, outputs
_ROUNDS = 5
_PACKED_FOR_ROWS = 64  # the layout depends on it; this one is good from 1 row to 1024
_MARGIN = 1.1  # a library that is hardly faster is not worth leaving torch's own choice for


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`.

    Args:
        x: `[..., in]`.
        weight: `[out, in]`.
        bias: `[out]`.

    Returns:
        `[..., out]`.
    """
    if _onednn_may_run(x, weight) and _onednn_is_faster():
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


class PackedLinear:
    """A linear layer whose weight is kept only in the blocked layout that oneDNN multiplies from.

    Few rows gain most, because then the weight is what is read: 8 rows by 512 x 512 take 0.6 of the time.

    Args:
        weight: `[out, in]` float32 on the CPU; it may be freed afterwards.

    Raises:
        ConfigError: another dtype or device.
    """

    def __init__(self, weight: Tensor) -> None:
        if weight.dtype is not torch.float32 or weight.device.type != "cpu":
            raise ConfigError(f"only float32 weights on a CPU can be packed, not {weight.dtype} on {weight.device}.")
        self._in_features = weight.shape[1]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[..., in]` float32 to `[..., out]`.

        Raises:
            ConfigError: another dtype or width, or a gradient is wanted: there is none.
        """
        if x.dtype is not torch.float32 or x.shape[-1] != self._in_features:
            raise ConfigError(
                f"a packed linear layer takes float32 [..., {self._in_features}], not {x.dtype} {list(x.shape)}."
            )
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError("packed weights have no gradients. Use torch.inference_mode(), or unpacked weights.")
        return _onednn(x, self._packed, None)


def packing_pays(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `PackedLinear` is the fastest here: float32, on a CPU where oneDNN is faster than torch's own choice."""
    return dtype is torch.float32 and device.type == "cpu" and _onednn_is_faster()


def _onednn_may_run(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype is torch.float32
        and weight.dtype is torch.float32
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # What torch.compile calls for a linear layer on a CPU; there is no public name for it.
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


@functools.cache
def _onednn_is_faster() -> bool:
    """Measured once per process."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    with torch.inference_mode():
        tokens, inputs, outputs = _PROBE
        x, weight = torch.ones(tokens, inputs, device="cpu"), torch.ones(outputs, inputs, device="cpu")
        own = _best_time(lambda: F.linear(x, weight))
        return own > _MARGIN * _best_time(lambda: _onednn(x, weight, None))


def _best_time(multiply: Callable[[], Tensor]) -> float:
    multiply()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        multiply()
        times.append(time.perf_counter() - start)
    return min(times)
