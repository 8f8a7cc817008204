"""Choosing an attention back end: by name, by `auto`, and what is refused by name.

Of layers whose shapes differ, every back end that can gives what the reference gives for each layer's shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import STALE, Batch, make_batch
from c_kernels import needs_c

from attention import (
    AttentionShape,
    LayersCacheSpec,
    LayersKVCache,
    MLAShape,
    UBatchAttention,
    attention_backends,
    make_attention_backend,
    make_kv_cache,
    register_attention_backend,
    resolve_attention_backend,
)
from attention.backends import registry
from attention.backends.layers import LayersBackend
from attention.backends.torch.sdpa import TorchAttentionBackend
from attention.interface import BackendTraits
from ubatch import ConfigError

MHA = AttentionShape(4, 2, 16)
MLA = MLAShape(4, 8, 16, 8, 16)


def cache_of(shape: AttentionShape | MLAShape, *, fp8: bool = False, block_size: int = 16):
    return make_kv_cache(shape.cache_spec(1, block_size, torch.float32, fp8=fp8), 4)


class Plain(TorchAttentionBackend):
    """Can do nothing but plain attention over pages of 32."""

    name = "plain"
    traits = BackendTraits(devices=("cpu",), block_sizes=(32, 64))


class Elsewhere(Plain):
    name = "elsewhere"
    traits = replace(Plain.traits, devices=("cuda",))


@pytest.fixture(autouse=True, scope="module")
def known() -> None:
    register_attention_backend("test_plain", f"{__name__}:Plain")
    register_attention_backend("test_elsewhere", f"{__name__}:Elsewhere")


def test_names_are_those_of_the_flag() -> None:
    assert {"auto", "native", "torch", "triton", "flashinfer", "trtllm_mha", "trtllm_mla"} <= set(attention_backends())
    assert not {"native_mla", "torch_mla", "flashinfer_mla"} & set(attention_backends())


@pytest.mark.parametrize(("shape", "name"), [(MHA, "torch"), (MLA, "torch_mla")])
def test_one_name_serves_both_kinds_of_attention(shape: AttentionShape | MLAShape, name: str) -> None:
    cache = cache_of(shape)
    assert make_attention_backend("torch", shape, cache).name == name
    assert list(UBatchAttention(shape, cache, "torch").memory()) == [f"whole/{name}"]


@needs_c
@pytest.mark.parametrize(("shape", "made"), [(MHA, "native"), (MLA, "native_mla")])
def test_auto_on_a_cpu(shape: AttentionShape | MLAShape, made: str) -> None:
    cache = cache_of(shape)
    assert resolve_attention_backend("auto", shape, cache) == "native"
    assert make_attention_backend("auto", shape, cache).name == made
    assert make_attention_backend("native", shape, cache).name == made  # one name serves both kinds
    fp8 = cache_of(shape, fp8=True)
    assert resolve_attention_backend("auto", shape, fp8) == "torch"


@pytest.mark.usefixtures("no_c")
@pytest.mark.parametrize("shape", [MHA, MLA])
def test_without_a_compiler_auto_is_torch_and_native_says_why(shape: AttentionShape | MLAShape) -> None:
    cache = cache_of(shape)
    assert resolve_attention_backend("auto", shape, cache) == "torch"
    assert UBatchAttention(shape, cache).decode_name == "torch"
    with pytest.raises(ConfigError, match=r"'native' needs kernels in C.*switched off: UBATCH_C_KERNELS=0"):
        make_attention_backend("native", shape, cache)


def test_auto_passes_over_what_this_model_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["test_elsewhere", "test_plain", "torch"]
    monkeypatch.setattr(registry, "_candidates", lambda shape, device: names)
    assert resolve_attention_backend("auto", MHA, cache_of(MHA, block_size=32)) == "test_plain"
    assert resolve_attention_backend("auto", MHA, cache_of(MHA, block_size=16)) == "torch"
    windowed = replace(MHA, sliding_window=4)
    assert resolve_attention_backend("auto", windowed, cache_of(windowed, block_size=32)) == "torch"
    assert resolve_attention_backend("test_elsewhere", MHA, cache_of(MHA)) == "test_elsewhere"


@pytest.mark.parametrize(
    ("capability", "trtllm"), [((8, 0), False), ((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_auto_prefers_the_fastest_kernels_that_the_gpu_has(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], trtllm: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    gpu, everywhere = torch.device("cuda"), ["flashinfer", "triton", "torch"]
    assert registry._candidates(MHA, gpu) == ["trtllm_mha"] * trtllm + everywhere
    assert registry._candidates(MLA, gpu) == ["trtllm_mla"] * trtllm + everywhere
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert registry._candidates(MHA, gpu) == registry._candidates(MLA, gpu) == ["torch"]


@pytest.mark.parametrize(
    ("name", "shape", "cache", "message"),
    [
        ("torhc", MHA, {}, r"unknown attention back end 'torhc'; did you mean 'torch'\?"),
        ("test_elsewhere", MHA, {"block_size": 32}, "'test_elsewhere' runs on cuda, not on cpu"),
        ("test_plain", MHA, {"block_size": 16}, "'test_plain' takes pages of 32, 64 tokens, not 16"),
        ("test_plain", MHA, {"block_size": 32, "fp8": True}, "'test_plain' cannot read an fp8 cache"),
        ("test_plain", MLA, {"block_size": 32}, "'test_plain' has no multi-head latent attention"),
        ("torch_mla", MHA, {}, "'torch_mla' has only multi-head latent attention"),
        ("test_plain", replace(MHA, sinks=True), {"block_size": 32}, "'test_plain' has no sinks"),
        ("test_plain", replace(MHA, soft_cap=3.0), {"block_size": 32}, "'test_plain' has no soft_cap"),
        ("test_plain", replace(MHA, sliding_window=3), {"block_size": 32}, "'test_plain' has no sliding_window"),
    ],
)
def test_what_a_back_end_lacks_is_refused_by_name(
    name: str, shape: AttentionShape | MLAShape, cache: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_attention_backend(name, shape, cache_of(shape, **cache))  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "message"), [("somewhere:Else", "already"), ("somewhere.Else", "form")])
def test_registrations_that_cannot_be(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_attention_backend("torch" if message == "already" else "mine", target)
    register_attention_backend("torch", "attention.backends.torch.sdpa:TorchAttentionBackend")  # the same again


def test_shape_and_cache_must_fit() -> None:
    with pytest.raises(ConfigError, match="make both from the same model config"):
        make_attention_backend("torch", MHA, cache_of(AttentionShape(4, 4, 16)))
    with pytest.raises(ConfigError, match="needs a cache"):
        make_attention_backend("torch", MLA, cache_of(MHA))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, not 0"),
        ({"num_kv_heads": 3}, "4 query heads cannot share 3"),
        ({"sliding_window": 0}, "sliding_window must be at least 1 or None, not 0"),
        ({"soft_cap": 0.0}, "soft_cap must be positive or None, not 0.0"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(MHA, **options)
    with pytest.raises(ConfigError, match="kv_lora_rank must be at least 1"):
        replace(MLA, kv_lora_rank=0)


BASE = AttentionShape(4, 2, 8, sinks=True)
MODELS = {
    "windows": [replace(BASE, sliding_window=window) for window in (None, 3, 3, 6)],
    "heads": [
        AttentionShape(4, 1, 8, v_head_dim=6),
        AttentionShape(4, 2, 8, v_head_dim=6, sliding_window=3, sinks=True),
        AttentionShape(4, 2, 8, v_head_dim=6, sliding_window=5),
        AttentionShape(4, 1, 8, v_head_dim=6),
        AttentionShape(4, 2, 8, v_head_dim=20, sliding_window=3, sinks=True),
    ],
}
DECODES, MIXED = [(9, 1), (2, 1), (20, 1)], [(9, 4), (0, 7), (12, 1)]


def batches_of(layers: list[AttentionShape], requests: list[tuple[int, int]]) -> list[Batch]:
    """One for every layer, with the same requests in the same blocks."""
    return [make_batch(requests, shape=shape, seed=1) for shape in layers]


def filled_cache(layers: list[AttentionShape], batches: list[Batch]) -> Any:
    """With each layer's prefixes, and stale numbers elsewhere."""
    spec = AttentionShape.of_layers(layers).cache_spec(len(layers), batches[0].spec.block_size, torch.float32)
    cache = make_kv_cache(spec, batches[0].num_blocks)
    slots = torch.arange(cache.num_blocks * spec.block_size)
    for layer, batch in enumerate(batches):
        own, place = cache.of_layer(layer) if isinstance(cache, LayersKVCache) else (cache, layer)
        shapes = (batch.past_k.shape[1:], batch.past_v.shape[1:])
        own.write(place, *(torch.full((len(slots), *row), STALE) for row in shapes), slots)
        own.write(place, batch.past_k, batch.past_v, batch.past_slots)
    return cache


@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_c)])
def test_every_layer_has_its_own(name: str, model: str, requests: list[tuple[int, int]]) -> None:
    layers = MODELS[model]
    batches = batches_of(layers, requests)
    backend = make_attention_backend(name, AttentionShape.of_layers(layers), filled_cache(layers, batches))
    plan = backend.plan(batches[0].metadata)
    assert len(plan.plans) == len(set(layers))
    for layer, batch in enumerate(batches):
        out = plan.forward(batch.q, batch.k, batch.v, layer, batch.sinks)
        torch.testing.assert_close(out, batch.expected(), atol=1e-5, rtol=1e-5)
    assert backend.name == name
    assert plan.repeats == (3 if (name, requests) == ("native", DECODES) else None)


def test_a_cache_holds_each_layers_heads_and_no_more() -> None:
    layers = MODELS["heads"]
    spec = AttentionShape.of_layers(layers).cache_spec(len(layers), 4, torch.float32)
    assert isinstance(spec, LayersCacheSpec)
    assert spec.places == ((0, 0), (1, 0), (1, 1), (0, 1), (2, 0))
    assert spec.bytes_per_block == sum(layer.cache_spec(1, 4, torch.float32).bytes_per_block for layer in layers)
    cache = make_kv_cache(spec, 5)
    assert cache.nbytes == 6 * spec.bytes_per_block, "with the hidden block"
    k, v = torch.randn(1, 2, 8), torch.randn(1, 2, 20)
    last: Any = cache.parts[2]
    last.write(0, k, v, torch.tensor([6]))
    cache.move(torch.tensor([6]), torch.tensor([17]))
    assert torch.equal(last.keys(0).flatten(0, 1)[17], k[0])
    assert torch.equal(last.values(0).flatten(0, 1)[17], v[0])
    fp8 = make_kv_cache(AttentionShape.of_layers(layers).cache_spec(len(layers), 4, torch.float32, fp8=True), 5)
    assert isinstance(fp8, LayersKVCache)
    fp8.set_scales(3, 0.5, 0.25)
    assert [part.scales(0) for part in fp8.parts] == [(1.0, 1.0)] * 3
    assert fp8.parts[0].scales(1) == (0.5, 0.25)


def test_a_captured_plan_becomes_the_next_batchs() -> None:
    """The buffers are `trtllm_mha`'s or Triton's; here they are counted."""
    made: list[str] = []

    class Kept:
        name, traits, nbytes = "kept", None, 7

        def init_graph_buffers(self, limits: Any) -> None:
            made.append("buffers")

        def plan_for_graph(self, metadata: Any) -> Any:
            return [metadata]

        def replan(self, plan: Any, metadata: Any) -> None:
            plan[0] = metadata

    kept: Any = [Kept(), Kept()]
    backend: Any = LayersBackend(kept, [(0, 0), (1, 0), (0, 1)])
    backend.init_graph_buffers(None)
    plan = backend.plan_for_graph("first")
    backend.replan(plan, "second")
    assert (plan.plans, made, backend.nbytes) == ([["second"], ["second"]], ["buffers"] * 2, 14)


def test_what_does_not_fit_is_refused() -> None:
    layers = MODELS["windows"]
    shape = AttentionShape.of_layers(layers)
    assert AttentionShape.of_layers(layers[1:3]) == layers[1]
    with pytest.raises(ConfigError, match="either sliding_window, or the shapes of all layers"):
        replace(shape, sliding_window=3)
    with pytest.raises(ConfigError, match="v_head_dim must be at least 1, not 0"):
        replace(shape, v_head_dim=0)
    cache = filled_cache(layers, batches_of(layers, DECODES))
    with pytest.raises(ConfigError, match="shapes of 2 layers, but the cache has 4"):
        make_attention_backend("torch", AttentionShape.of_layers(layers[:2]), cache)
    heads = MODELS["heads"]
    with pytest.raises(ConfigError, match="needs a cache of LayersCacheSpec"):
        make_attention_backend("torch", AttentionShape.of_layers(heads), cache)
