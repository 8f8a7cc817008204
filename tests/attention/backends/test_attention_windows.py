"""Layers whose windows differ: every back end with windows gives what the reference gives for each layer's window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import Batch, make_batch
from c_kernels import needs_c

from attention import AttentionShape, make_attention_backend
from attention.backends.windows import WindowsBackend
from ubatch import ConfigError

WINDOWS = (None, 3, 3, 6)
SHAPE = AttentionShape(4, 2, 8, sinks=True, layer_windows=WINDOWS)
DECODES, MIXED = [(9, 1), (2, 1), (20, 1)], [(9, 4), (0, 7), (12, 1)]


def batch_of(requests: list[tuple[int, int]]) -> Batch:
    return make_batch(requests, shape=SHAPE, num_layers=len(WINDOWS))


def check(plan: Any, batch: Batch) -> None:
    cache = batch.new_cache()
    for layer, window in enumerate(WINDOWS):
        of_window = replace(batch, shape=SHAPE.with_window(window))
        out = plan.forward(batch.q, batch.k, batch.v, layer, batch.sinks)
        torch.testing.assert_close(out, of_window.expected(layer, cache), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_c)])
def test_every_layer_has_its_own(name: str, requests: list[tuple[int, int]]) -> None:
    batch = batch_of(requests)
    backend = make_attention_backend(name, SHAPE, batch.new_cache())
    plan = backend.plan(batch.metadata)
    assert len(plan.plans) == len(set(WINDOWS))
    check(plan, batch)
    assert backend.name == name
    assert plan.repeats == (3 if (name, requests) == ("native", DECODES) else None)


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

    kept: Any = {None: Kept(), 3: Kept()}
    backend: Any = WindowsBackend((None, 3, None), kept)
    backend.init_graph_buffers(None)
    plan = backend.plan_for_graph("first")
    backend.replan(plan, "second")
    assert (plan.plans, made, backend.nbytes) == ({None: ["second"], 3: ["second"]}, ["buffers"] * 2, 14)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="either sliding_window, or layer_windows"):
        replace(SHAPE, sliding_window=3)
    with pytest.raises(ConfigError, match="at least 1 or None, not 0"):
        replace(SHAPE, layer_windows=(None, 0))
    fewer = replace(SHAPE, layer_windows=WINDOWS[:2])
    with pytest.raises(ConfigError, match="windows of 2 layers, but the cache has 4"):
        make_attention_backend("torch", fewer, batch_of(DECODES).new_cache())
