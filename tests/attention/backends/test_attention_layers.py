"""Layers whose shapes differ: every back end that can gives what the reference gives for each layer's shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import STALE, Batch, make_batch
from c_kernels import needs_c

from attention import AttentionShape, LayersCacheSpec, LayersKVCache, make_attention_backend, make_kv_cache
from attention.backends.layers import LayersBackend
from ubatch import ConfigError

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
