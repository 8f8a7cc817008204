"""Whatever lies in pages that are not the request's, or behind its end, reaches no result: not even nan and infinity.

Each step runs twice, over zeros there and over the worst there is, and must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import Batch, MLABatch, make_batch, make_mla_batch
from torch import Tensor
from triton_batches import DEVICE, moved

from attention import AttentionShape, GraphLimits, MLAKVCache, PagedKVCache, make_attention_backend
from attention.backends.torch import mla as torch_mla
from attention.kernels import decode as decode_kernels
from ubatch import ForwardMode
from ubatch.kernels.c_jit import why_not_c

pytestmark = pytest.mark.long

STEPS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": ([(5, 1), (33, 1), (0, 1), (18, 1)], {}),
    "prompts": ([(0, 5), (0, 17), (0, 2)], {}),
    "behind a prefix": ([(37, 9), (3, 2)], {}),
    "mixed": ([(9, 4), (0, 7), (21, 1), (0, 0), (2, 1)], {"padding": 2}),
    "a chain of drafts": ([(17, 3), (2, 3), (0, 0)], {"drafts": "chain", "padding": 1}),
    "a tree of drafts": ([(17, 4), (2, 4)], {"drafts": "tree"}),
}
GRAPHS: dict[str, dict[str, Any]] = {
    "decode": {"requests": [(9, 1), (40, 1), (0, 0)], "padding": 1, "mode": ForwardMode.DECODE},
    "a chain of drafts": {"requests": [(20, 3), (0, 0)], "padding": 3, "drafts": "chain"},
    "a tree of drafts": {"requests": [(20, 3), (0, 0)], "padding": 3, "drafts": "tree"},
    "draft extend": {"requests": [(20, 1), (4, 3), (0, 0)], "padding": 5, "mode": ForwardMode.DRAFT_EXTEND},
}
SHAPES = {
    "plain": AttentionShape(4, 2, 8),
    "window": AttentionShape(4, 2, 8, sliding_window=7),
    "cap and sinks": AttentionShape(4, 2, 8, soft_cap=20.0, sinks=True),
}
_NAN_BYTES = 0x7F, 0xFF


@pytest.fixture(autouse=True, scope="module")
def _short_pieces() -> Iterator[None]:
    """Requests are short, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_kernels, "MIN_KEYS_PER_SPLIT", 16)
        patch.setattr(torch_mla, "_CHUNK_TOKENS", 32)
        yield


def fill_others(batch: Batch | MLABatch, cache: PagedKVCache | MLAKVCache, values: tuple[float, ...]) -> None:
    """Write `values` in turn to every slot that holds no token of a request, the hidden block's too."""
    spec = cache.spec
    pools = (cache.pool,) if isinstance(cache, MLAKVCache) else (cache.key_pool, cache.value_pool)
    for pool in pools:
        slots = pool.memory.view(spec.num_layers, -1, pool.memory[0, 0, 0].numel())
        others = torch.ones(slots.shape[1], dtype=torch.bool)
        others[batch.past_slots] = False
        where = others.nonzero().flatten().to(slots.device)
        worst = torch.tensor(values, dtype=slots.dtype, device=slots.device).repeat(len(where))[: len(where)]
        slots[:, where] = worst[:, None]


def new_cache(batch: Batch | MLABatch) -> PagedKVCache | MLAKVCache:
    """`batch.new_cache()` on the device."""
    here = batch.new_cache()
    there = type(here)(batch.spec, batch.num_blocks, DEVICE)
    for source, target in zip(here._pools, there._pools, strict=True):
        target.memory.copy_(source.memory)
        target.scales[:] = source.scales
    return there


def results(batch: Batch | MLABatch, name: str, values: tuple[float, ...], *, captured: bool = False) -> Tensor:
    """What every layer gives where `values` are all that others left."""
    cache = new_cache(batch)
    fill_others(batch, cache, values)
    backend = make_attention_backend(name, batch.shape, cache)
    metadata = moved(batch.metadata)
    if captured:
        backend.init_graph_buffers(GraphLimits(max_reqs=4, max_tokens=16, max_seq_len=80))
        plan = backend.plan_for_graph(metadata)
    else:
        plan = backend.plan(metadata)
    return torch.stack([_forward(plan, batch, layer) for layer in range(batch.spec.num_layers)])


def _forward(plan: Any, batch: Batch | MLABatch, layer: int) -> Tensor:
    if isinstance(batch, MLABatch):
        return plan.forward(replace(moved(batch.inputs), rope=moved(batch.inputs.rope)), layer)
    sinks = None if batch.sinks is None else batch.sinks.to(DEVICE)
    return plan.forward(batch.q.to(DEVICE), batch.k.to(DEVICE), batch.v.to(DEVICE), layer, sinks)


def check(batch: Batch | MLABatch, name: str, *, captured: bool = False) -> None:
    worst = _NAN_BYTES if batch.spec.fp8 else (float("nan"), float("inf"), float("-inf"))
    clean = results(batch, name, (0,), captured=captured)
    assert clean.isfinite().all()
    assert torch.equal(results(batch, name, worst, captured=captured), clean)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "fp8"), [("torch", False), ("torch", True), ("native", False)])
def test_of_keys_and_values(name: str, fp8: bool, shape: str, step: str) -> None:
    if name == "native" and (why_not_c() or DEVICE != "cpu"):
        pytest.skip("needs a CPU and a C compiler")
    requests, options = STEPS[step]
    check(make_batch(requests, shape=SHAPES[shape], fp8=fp8, num_layers=2, **options), name)


@pytest.mark.sample(6)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("shape", "fp8"), [("plain", True), ("window", False)], ids=["fp8", "window"])
def test_of_keys_and_values_by_triton(shape: str, fp8: bool, step: str) -> None:
    requests, options = STEPS[step]
    check(make_batch(requests, shape=SHAPES[shape], fp8=fp8, **options), "triton")


@pytest.mark.sample(9)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("name", "fp8"), [("torch", False), ("torch", True), ("triton", False), ("triton", True), ("native", False)]
)
def test_of_latents(name: str, fp8: bool, step: str) -> None:
    if name == "native" and (why_not_c() or DEVICE != "cpu"):
        pytest.skip("needs a CPU and a C compiler")
    requests, options = STEPS[step]
    check(make_mla_batch(requests, fp8=fp8, **options), name)


@pytest.mark.sample(4)
@pytest.mark.parametrize("step", GRAPHS)
@pytest.mark.parametrize("make", [make_batch, make_mla_batch], ids=["mha", "mla"])
def test_of_captured_steps_with_padding(make: Callable[..., Batch | MLABatch], step: str) -> None:
    check(make(block_size=16, **GRAPHS[step]), "triton", captured=True)
