"""Attention back ends by name. A back end is imported when it is chosen, so that a CPU never imports CUDA.

To find the fastest, each runs one layer of a decode or a prefill batch over a small cache. Making the plan is not
timed: a step makes one plan, and all of its layers share it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor

from attention.backends.layers import LayersBackend
from attention.interface import AttentionBackend, AttentionShape, BackendTraits, MLAInputs, RopeTable, Shape
from attention.kv_cache import KVCache, LayersKVCache, MLAKVCache, make_kv_cache
from attention.metadata import CommonAttentionMetadata
from ubatch import ConfigError, ForwardMode, LazyRegistry
from ubatch.kernels import Chosen, Launches, fastest, measured

_BACKENDS = LazyRegistry(
    "attention back end",
    {
        "native": "attention.backends.native.mha:NativeAttentionBackend",
        "native_mla": "attention.backends.native.mla:NativeMLABackend",
        "torch": "attention.backends.torch.sdpa:TorchAttentionBackend",
        "torch_mla": "attention.backends.torch.mla:TorchMLABackend",
        "triton": "attention.backends.triton.mha:TritonAttentionBackend",
        "triton_mla": "attention.backends.triton.mla:TritonMLABackend",
        "flashinfer": "attention.backends.flashinfer.mha:FlashInferBackend",
        "flashinfer_mla": "attention.backends.flashinfer.mla:FlashInferMLABackend",
        "trtllm_mha": "attention.backends.trtllm.mha:TRTLLMMHABackend",
        "trtllm_mla": "attention.backends.trtllm.mla:TRTLLMMLABackend",
    },
)
_MLA_NAMES = {"native": "native_mla", "torch": "torch_mla", "triton": "triton_mla", "flashinfer": "flashinfer_mla"}
"""Names that serve both kinds of attention, with their class for MLA."""
_TRTLLM_GEN = ((10, 0), (10, 3))
"""GPU architectures that TensorRT-LLM's generated kernels, the fastest, support."""
_DECODE, _PREFILL = (64, 1024), (4, 512)  # requests, and tokens of each
_PACKAGES = ("flashinfer-python",)


def register_attention_backend(name: str, target: str) -> None:
    """Register a back end.

    Args:
        target: `"package.module:Class"`; imported on first use.

    Raises:
        ConfigError: the name is taken by another class, or the target is not of that form.
    """
    _BACKENDS.register(name, target)


def attention_backends() -> tuple[str, ...]:
    """The names to choose from, sorted; `auto` picks one."""
    return ("auto", *(name for name in _BACKENDS.names() if name not in _MLA_NAMES.values()))


def usable_attention_backends(shape: Shape, kv_cache: KVCache) -> dict[str, str | None]:
    """The back ends that `auto` chooses from, the default first, each with the reason it cannot be used, or None.

    `torch` is listed only if no other back end is usable: it runs everything, but its steps cannot be captured.
    """
    found: dict[str, str | None] = {}
    for candidate in _candidates(shape, kv_cache.device):
        if candidate == "torch" and None in found.values():
            continue
        try:
            make_attention_backend(candidate, shape, kv_cache)
        except ConfigError as error:
            found[candidate] = str(error)
        else:
            found[candidate] = None
    return found


def fastest_attention_backend(names: Sequence[str], shape: Shape, kv_cache: KVCache, *, decode: bool) -> Chosen:
    """Choose one of some usable back ends: on a GPU the fastest, measured once; on a CPU, or if nothing can be timed,
    the first.

    Args:
        names: from `usable_attention_backends`.
        kv_cache: the model's KV cache; it is not written.
        decode: choose for batches without a prefill: time one new token per request, else whole prompts.

    Raises:
        ConfigError: none of them works here.
    """
    if not measured(kv_cache.device):
        return Chosen(names[0], f"the first that this {kv_cache.device.type} and model can use")
    timed = shape.of_layer(0) if isinstance(shape, AttentionShape) else shape  # one layer is
    spec = kv_cache.spec
    spec = timed.cache_spec(1, spec.block_size, spec.dtype, fp8=spec.fp8)
    requests, tokens = _DECODE if decode else _PREFILL
    pages = requests * spec.blocks_for(tokens)
    own_cache = cache(lambda: make_kv_cache(spec, pages, kv_cache.device))  # only if something is timed

    def launch(name: str) -> Launches:
        backend = make_attention_backend(name, timed, own_cache())
        plan = backend.plan(_metadata(requests, tokens, own_cache(), decode=decode))
        return [partial(plan.forward, *_inputs(timed, own_cache(), requests, tokens, decode=decode))]

    return fastest(
        f"attention {timed} in pages of {spec.block_size}, {spec.dtype}{' stored in fp8' if spec.fp8 else ''}",
        {name: partial(launch, name) for name in names},
        [f"{'a decode' if decode else 'prompts'} of {requests} x {tokens} tokens"],
        device=kv_cache.device,
        packages=_PACKAGES,
    )


def _metadata(requests: int, tokens: int, kv_cache: KVCache, *, decode: bool) -> CommonAttentionMetadata:
    """Metadata of requests of equal length, one after the other in the cache."""
    device, pages = kv_cache.device, kv_cache.spec.blocks_for(tokens)
    table = torch.arange(requests * pages, dtype=torch.int32, device=device).view(requests, pages)
    rows = torch.arange(requests, device=device)[:, None] * pages * kv_cache.spec.block_size
    slots = rows + torch.arange(tokens - 1 if decode else 0, tokens, device=device)
    query_lens = [1 if decode else tokens] * requests
    mode = ForwardMode.DECODE if decode else ForwardMode.PREFILL
    return CommonAttentionMetadata.build(query_lens, [tokens] * requests, table, slots.flatten(), mode)


def _inputs(shape: Shape, kv_cache: KVCache, requests: int, tokens: int, *, decode: bool) -> tuple[object, ...]:
    """Arguments of `AttentionPlan.forward` or `MLAPlan.forward`."""
    device = kv_cache.device
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, dtype=kv_cache.spec.dtype, device=device, generator=generator)

    positions = torch.arange(tokens - 1 if decode else 0, tokens, device=device).repeat(requests)
    rows = positions.shape[0]
    if isinstance(shape, AttentionShape):
        k, v = (draw(rows, shape.num_kv_heads, dim) for dim in (shape.head_dim, shape.value_dim))
        return draw(rows, shape.num_heads, shape.head_dim), k, v, 0, draw(shape.num_heads) if shape.sinks else None
    heads, rank, rope = shape.num_heads, shape.kv_lora_rank, shape.qk_rope_head_dim
    inputs = MLAInputs(
        q_nope=draw(rows, heads, shape.qk_nope_head_dim),
        q_rope=draw(rows, heads, rope),
        latent=draw(rows, rank),
        k_rope=draw(rows, rope),
        w_uk=draw(heads, shape.qk_nope_head_dim, rank) * rank**-0.5,
        w_uv=draw(heads, rank, shape.v_head_dim) * rank**-0.5,
        rope=RopeTable(torch.ones(tokens, rope, device=device), positions),
    )
    return inputs, 0


def resolve_attention_backend(name: str, shape: Shape, kv_cache: KVCache, *, decode: bool = True) -> str:
    """The back end that `auto` picks here; any other name is returned unchanged, usable or not.

    Args:
        name: a back end's name, or `auto`.
        decode: choose for batches without a prefill.

    Raises:
        ConfigError: as `fastest_attention_backend`.
    """
    if name != "auto":
        return name
    usable = [name for name, why_not in usable_attention_backends(shape, kv_cache).items() if why_not is None]
    if not usable:
        return "torch"  # making it raises the error that says why
    return fastest_attention_backend(usable, shape, kv_cache, decode=decode).name


def _candidates(shape: Shape, device: torch.device) -> list[str]:
    """Back ends for a device whose packages are installed, the likeliest first; `torch` runs everything."""
    names = []
    is_mha = isinstance(shape, AttentionShape)
    if device.type == "cpu":
        names.append("native")
    if device.type == "cuda":
        if importlib.util.find_spec("flashinfer") is not None:
            if torch.cuda.get_device_capability(device) in _TRTLLM_GEN:
                names.append("trtllm_mha" if is_mha else "trtllm_mla")
            names.append("flashinfer")
        if importlib.util.find_spec("triton") is not None:
            names.append("triton")
    return [*names, "torch"]


def make_attention_backend(name: str, shape: Shape, kv_cache: KVCache) -> AttentionBackend:
    """Make the named back end for one lane of one model over one cache.

    Raises:
        ConfigError: the name is unknown, shape and cache do not fit, or the back end lacks something the model needs.
    """
    name = resolve_attention_backend(name, shape, kv_cache)
    if not isinstance(shape, AttentionShape):
        name = _MLA_NAMES.get(name, name)
    backend = cast("type[AttentionBackend]", _BACKENDS.load(name))
    _check_cache(shape, kv_cache)
    if not isinstance(shape, AttentionShape) or shape.layers is None:
        _check_traits(name, backend.traits, shape, kv_cache)
        return backend(shape, kv_cache)
    by_shape: dict[AttentionShape, AttentionBackend] = {}
    layers = []
    for layer, of_layer in enumerate(shape.layers[: kv_cache.spec.num_layers]):
        part, place = kv_cache.of_layer(layer) if isinstance(kv_cache, LayersKVCache) else (kv_cache, layer)
        if of_layer not in by_shape:
            _check_traits(name, backend.traits, of_layer, part)
            by_shape[of_layer] = backend(of_layer, part)
        layers.append((list(by_shape).index(of_layer), place))
    return cast("AttentionBackend", LayersBackend(list(by_shape.values()), layers))


def _check_cache(shape: Shape, kv_cache: KVCache) -> None:
    spec = kv_cache.spec
    wanted = shape.cache_spec(spec.num_layers, spec.block_size, spec.dtype, fp8=spec.fp8)
    if wanted != spec:
        raise ConfigError(f"{shape} needs a cache of {wanted}, not of {spec}; make both from the same model config.")


def _check_traits(name: str, traits: BackendTraits, shape: Shape, kv_cache: KVCache) -> None:
    lacks = None
    device, block_size = kv_cache.device.type, kv_cache.spec.block_size
    if device not in traits.devices:
        lacks = f"runs on {' and '.join(traits.devices)}, not on {device}"
    elif isinstance(kv_cache, MLAKVCache) and not traits.mla:
        lacks = "has no multi-head latent attention"
    elif isinstance(shape, AttentionShape) and not traits.mha:
        lacks = "has only multi-head latent attention"
    elif kv_cache.spec.fp8 and not traits.fp8:
        lacks = "cannot read an fp8 cache"
    elif traits.block_sizes is not None and block_size not in traits.block_sizes:
        lacks = f"takes pages of {', '.join(map(str, traits.block_sizes))} tokens, not {block_size}"
    elif isinstance(shape, AttentionShape):
        for option, wanted in (
            ("sliding_window", shape.sliding_window is not None),
            ("soft_cap", shape.soft_cap is not None),
            ("sinks", shape.sinks),
            ("v_head_dim", shape.value_dim != shape.head_dim),
        ):
            if wanted and not getattr(traits, option):
                lacks = f"has no {option}"
    if lacks is not None:
        others = "" if name.startswith("torch") else ", such as 'torch', which serves every model"
        raise ConfigError(f"attention back end {name!r} {lacks}. Choose another one with --attention-backend{others}.")
