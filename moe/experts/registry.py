"""Which implementations of experts there are, by name, and which of them are the fastest on this machine.

That is found by timing them: on a CPU once per process and dtype, with a fixed probe; on a GPU with the model's own
sizes, before its weights are loaded, and the result is kept in the file of `ubatch.kernels.autotuner`. Other libraries'
kernels compete with this project's, which are first in the list and so are used if nothing can be timed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from moe.cpu_linear import packing_pays
from moe.experts.base import BatchedExperts, BlockwiseExperts, FusedExperts, SignallingExperts
from moe.experts.quantization import BLOCK
from moe.experts.torch_experts import ClampedSwiGLU
from ubatch import ConfigError, LazyRegistry
from ubatch.kernels import Chosen, Launches, best_times, choice, fastest, measured, why_not_c

_FP8_PRODUCTS = (8, 9)
"""The first compute capability with products in fp8."""

_BACKENDS = LazyRegistry(
    "experts back end",
    {
        "flashinfer": "moe.experts.flashinfer:FlashInferExperts",
        "grouped": "moe.experts.torch_experts:GroupedExperts",
        "grouped_mm": "moe.experts.grouped_mm:GroupedMMExperts",
        "native": "moe.experts.cpu:NativeExperts",
        "packed": "moe.experts.cpu:PackedExperts",
        "reference": "moe.experts.torch_experts:ReferenceExperts",
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


_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOP_K = 8, 512, 256, 4
_TOKENS = (16, 256)  # tokens of a decode step, and of a prefill; both have the same weight
_CANDIDATES = ("triton", "flashinfer", "grouped_mm")  # all of them can be captured
_GPU_TOKENS = (64, 4096)  # as above
_PACKAGES = ("flashinfer-python",)


@dataclass(frozen=True)
class ExpertsShape:
    """The experts of one layer.

    Attributes:
        held: experts on this rank.
        num_experts: on all ranks.
        top_k: experts that a token visits.
        hidden_size, intermediate_size: `H` and `I`.
    """

    held: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True)
class ExpertsNeeds:
    """What the transport and the schedules require of experts.

    Attributes:
        batched: they must take rows in batches by expert.
        signals: they must signal each finished block, for a signalled schedule.
        blocks: they must run block by block, for a signalled schedule on a transport that sends blocks.
        obeys_sms: they must use only the SMs that a schedule with `comm_sms` leaves; the last candidate is exempt.
        biases: they must have biases and other activations than SwiGLU, as the model wants.
    """

    batched: bool = False
    signals: bool = False
    blocks: bool = False
    obeys_sms: bool = False
    biases: bool = False

    def missing(self, experts: FusedExperts) -> str | None:
        """The first requirement that `experts` do not meet, or None.

        Raises:
            ConfigError: they can signal, but not with these weights.
        """
        if self.batched and not isinstance(experts, BatchedExperts):
            return "takes no rows in batches by expert, as the transport brings them"
        if self.blocks and not isinstance(experts, BlockwiseExperts):
            return "runs all at once, but a schedule and the transport want blocks"
        if self.signals:
            if not isinstance(experts, SignallingExperts):
                return "does not signal, as a schedule wants"
            experts.check_signalling()
        if self.obeys_sms and not experts.obeys_sms:
            return "takes all SMs, though a schedule reserves some for communication (comm_sms)"
        return None


def usable_experts(
    shape: ExpertsShape, dtype: torch.dtype, device: torch.device, needs: ExpertsNeeds = ExpertsNeeds()
) -> dict[str, str | None]:
    """The experts back ends that `auto` chooses from, the default first, each with why it is unusable, or None.

    Args:
        shape: of a layer.
        dtype: of the weights.
        device: where they are.
        needs: of the transport and the schedules.
    """
    if not measured(device):
        return {"grouped" if needs.biases else fastest_cpu_experts(dtype, device): None}
    found = {name: _why_not(name, shape, dtype, device, needs) for name in _CANDIDATES}
    if None not in found.values():
        found["grouped"] = _why_not("grouped", shape, dtype, device, replace(needs, obeys_sms=False))
    return found


def fastest_experts(names: Sequence[str], shape: ExpertsShape, dtype: torch.dtype, device: torch.device) -> Chosen:
    """The fastest of some experts back ends; the first one on a CPU, or if nothing can be timed.

    Raises:
        ConfigError: none of them works here.
    """
    if not measured(device):
        return Chosen(names[0], f"the fastest for {dtype} on this machine's {device.type}")
    inputs = cache(partial(_inputs, shape, dtype, device))  # made only if something is timed

    def make(name: str) -> Launches:
        w13, w2, batches = inputs()
        experts = make_experts(name, w13, w2, num_experts=shape.num_experts)
        return [partial(experts, *batch) for batch in batches]

    chosen = fastest(
        f"experts {shape.held} of {shape.num_experts}, top {shape.top_k}, {shape.hidden_size} x "
        f"{shape.intermediate_size} {dtype}",
        {name: partial(make, name) for name in names},
        [f"{tokens} tokens" for tokens in _GPU_TOKENS],
        device=device,
        packages=_PACKAGES,
    )
    inputs.cache_clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the weights are loaded next
    return chosen


def _why_not(
    name: str, shape: ExpertsShape, dtype: torch.dtype, device: torch.device, needs: ExpertsNeeds
) -> str | None:
    """Why a back end cannot be used, or None; found by making one expert of the right size."""
    w13 = torch.empty(1, 2 * shape.intermediate_size, shape.hidden_size, dtype=dtype, device=device)
    w2 = torch.empty(1, shape.hidden_size, shape.intermediate_size, dtype=dtype, device=device)
    try:
        if needs.biases:
            check_takes_biases(name)
        return needs.missing(make_experts(name, w13, w2, num_experts=shape.num_experts))
    except ConfigError as error:
        return str(error)


def _inputs(
    shape: ExpertsShape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """Weights of a layer, and evenly routed batches; on every rank the same."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    def batch(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.rand(tokens, shape.num_experts, device=device, generator=generator)
        weights, ids = scores.topk(shape.top_k, dim=1)
        return draw(tokens, shape.hidden_size), ids, weights / weights.sum(1, keepdim=True)

    w13 = draw(shape.held, 2 * shape.intermediate_size, shape.hidden_size).mul_(shape.hidden_size**-0.5)
    w2 = draw(shape.held, shape.hidden_size, shape.intermediate_size).mul_(shape.intermediate_size**-0.5)
    return w13, w2, [batch(tokens) for tokens in _GPU_TOKENS]


def fastest_cpu_experts(dtype: torch.dtype, device: torch.device) -> str:
    """The experts back end for a model of `dtype` on `device`: `native` if C can be compiled and is faster, else
    `packed` if oneDNN's layout is faster, else `grouped`."""
    if dtype not in (torch.float32, torch.bfloat16) or device.type != "cpu":
        return "grouped"
    otherwise = "packed" if packing_pays(dtype, device) else "grouped"
    return "native" if why_not_c() is None and _native_is_faster(otherwise, dtype) else otherwise


@cache
def _native_is_faster(than: str, dtype: torch.dtype) -> bool:
    return choice(f"C is faster than {than}: {dtype}", lambda: _measure_native(than, dtype))


def _measure_native(than: str, dtype: torch.dtype) -> bool:
    with torch.inference_mode():
        w13 = torch.ones(_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN, dtype=dtype, device="cpu")
        w2 = torch.ones(_EXPERTS, _HIDDEN, _INTERMEDIATE, dtype=dtype, device="cpu")
        try:
            both = [make_experts(name, w13, w2) for name in ("native", than)]
        except ConfigError:  # this kernel cannot be compiled, though others can
            return False
        relative = 1.0
        for tokens in _TOKENS:
            x = torch.ones(tokens, _HIDDEN, dtype=dtype, device="cpu")
            weights = torch.ones(tokens, _TOP_K, device="cpu")
            ids = (torch.arange(tokens, device="cpu")[:, None] + torch.arange(_TOP_K, device="cpu")) % _EXPERTS
            native, other = best_times([partial(experts, x, ids, weights) for experts in both])
            relative *= native / other
        return relative < 1
