"""Which implementations of experts there are, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from moe.experts.base import FusedExperts
from moe.experts.quantization import BLOCK
from moe.experts.torch_experts import ClampedSwiGLU
from ubatch import ConfigError, LazyRegistry

_FP8_PRODUCTS = (8, 9)
"""The first compute capability with products in fp8."""

_BACKENDS = LazyRegistry(
    "experts back end",
    {
        "flashinfer": "moe.experts.flashinfer:FlashInferExperts",
        "grouped": "moe.experts.grouped:GroupedExperts",
        "grouped_mm": "moe.experts.grouped_mm:GroupedMMExperts",
        "native": "moe.experts.cpu.native:NativeExperts",
        "packed": "moe.experts.cpu.packed:PackedExperts",
        "reference": "moe.experts.reference:ReferenceExperts",
        "triton": "moe.experts.triton:TritonExperts",
        "triton_batched": "moe.experts.triton_batched:TritonBatchedExperts",
    },
)


def register_experts_backend(name: str, target: str) -> None:
    """Register an implementation.

    Args:
        name: its name for `make_experts`.
        target: `"package.module:Class"`, a `FusedExperts`; imported on first use.

    Raises:
        ConfigError: the name is taken by another class, or the target is not of that form.
    """
    _BACKENDS.register(name, target)


def experts_backends() -> tuple[str, ...]:
    """The known names, sorted."""
    return _BACKENDS.names()


def experts_class(name: str) -> type[FusedExperts]:
    """The class that `make_experts` makes for that name.

    Raises:
        ConfigError: the name is unknown, or the class cannot be imported.
    """
    return cast("type[FusedExperts]", _BACKENDS.load(name))


def check_takes_biases(name: str) -> None:
    """Check that a back end has biases and other activations than SwiGLU.

    Raises:
        ConfigError: it has not, or the name is unknown.
    """
    if "b13" not in inspect.signature(experts_class(name)).parameters:
        raise ConfigError(
            f"experts back end {name!r} has no biases and no clamped activation, which this model's experts have. "
            "Choose 'grouped', or let 'auto' choose."
        )


def fp8_block(name: str, device: torch.device) -> tuple[int, int] | None:
    """Rows and columns that share a scale of weights in fp8, for a back end that multiplies them; None for others.

    Args:
        device: of the weights; a GPU needs products in fp8 (compute capability 8.9).

    Raises:
        ConfigError: see `experts_class`.
    """
    if "w13_scale" not in inspect.signature(experts_class(name)).parameters:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_PRODUCTS:
        return None
    return BLOCK, BLOCK


def make_experts(
    name: str,
    w13: Tensor,
    w2: Tensor,
    first_expert: int = 0,
    *,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    quantize: str | None = None,
    num_experts: int | None = None,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: ClampedSwiGLU | None = None,
) -> FusedExperts:
    """Make experts with weights `w13`, `w2` on the back end `name`; see `FusedExperts` for the arguments.

    Args:
        w13_scale: of w13 in fp8, as w2_scale, dtype and quantize for back ends that compute in fp8; see
            `moe.experts.triton_batched`.
        num_experts: of all ranks, if known; a hint for back ends that choose their tiles by it.
        b13: biases, as b2, and activation for back ends that have them; see `moe.experts.torch_experts`.

    Raises:
        ConfigError: an unknown name, weights that do not fit together, or an argument that this back end does not take.
    """
    make = cast("Callable[..., FusedExperts]", _BACKENDS.load(name))
    known = inspect.signature(make).parameters
    if b13 is not None or b2 is not None or activation is not None:
        check_takes_biases(name)
    given: dict[str, Any] = {"w13_scale": w13_scale, "w2_scale": w2_scale, "dtype": dtype, "quantize": quantize}
    given |= {"b13": b13, "b2": b2, "activation": activation}
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    refused = sorted(set(options) - set(known))
    if refused:
        raise ConfigError(f"experts back end {name!r} does not compute in fp8 and takes no {', '.join(refused)}.")
    if "num_experts" in known:
        options["num_experts"] = num_experts
    return make(w13, w2, first_expert, **options)
