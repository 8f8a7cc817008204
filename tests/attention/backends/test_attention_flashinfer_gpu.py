"""The back ends on flashinfer's kernels on a real GPU: bfloat16 against the float32 reference, eager and in graphs.

What a GPU's architecture has no kernel for is skipped here, and refused by name there.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from attention_batches import Batch, MLABatch, fp8_scales, make_batch, make_mla_batch
from torch import Tensor

from attention import (
    AttentionShape,
    CommonAttentionMetadata,
    GraphLimits,
    MLAKVCache,
    MLAShape,
    PagedKVCache,
    SpecVerifyInput,
    make_attention_backend,
)
from ubatch import ForwardMode

# flashinfer prefers the pages of latent attention in one object since 0.7, which 0.6 does not know.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DTYPE = torch.bfloat16
MLA = MLAShape(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
LIMITS = GraphLimits(max_reqs=4, max_tokens=16, max_seq_len=1024)
BATCHES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": ([(700, 1), (3, 1), (64, 1)], {}),
    "prefill": ([(0, 70), (0, 5)], {}),
    "prefix": ([(129, 40), (0, 3), (700, 2)], {}),
    "mixed": ([(129, 40), (300, 1), (5, 1)], {"padding": 3}),
    "chain": ([(200, 4), (64, 4)], {"drafts": "chain"}),
    "tree": ([(200, 4), (64, 4)], {"drafts": "tree"}),
    "draft extend": ([(200, 4), (64, 2), (5, 1)], {"mode": ForwardMode.DRAFT_EXTEND}),
}
T = TypeVar("T", CommonAttentionMetadata, SpecVerifyInput)


@pytest.fixture(autouse=True)
def _flashinfer() -> None:
    pytest.importorskip(
        "flashinfer", reason="flashinfer is not installed; `make test` installs it", exc_type=ImportError
    )


def missing(name: str, kind: str, *, fp8: bool = False) -> str | None:
    """What this GPU has no kernel for: the back end, the kind of batch, and where it would run; None if it runs."""
    if kind == "tree" and name != "flashinfer":
        return f"{name} takes no tree mask on any GPU; only flashinfer does"
    if fp8 and name == "flashinfer_mla":
        return "flashinfer_mla reads no fp8 cache on any GPU; trtllm_mla does, on SM100 and SM103"
    major, minor = torch.cuda.get_device_capability()
    if name == "trtllm_mha" and kind == "decode":
        majors, where = (9, 10, 12), "SM90, SM100, SM103 or SM120"
    elif name.startswith("trtllm"):
        majors, where = (10,), "SM100 or SM103"
    else:
        return None
    return None if major in majors else f"{name} has no kernel for {kind} on SM{major}{minor}; that runs on {where}"


def skip_if_missing(name: str, kind: str, *, fp8: bool = False) -> None:
    if reason := missing(name, kind, fp8=fp8):
        pytest.skip(reason)


def on_gpu(described: T) -> T:
    """The same with all tensors on the GPU."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(described):
        value = getattr(described, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value.cuda()
        elif isinstance(value, SpecVerifyInput):
            changes[field.name] = on_gpu(value)
    return replace(described, **changes)


def rounded(batch: Batch | MLABatch) -> Batch | MLABatch:
    """The same with numbers that bfloat16 holds."""

    def low(x: Tensor) -> Tensor:
        return x.to(DTYPE).float()

    if isinstance(batch, Batch):
        names = ("q", "k", "v", "past_k", "past_v")
        return replace(batch, **{name: low(getattr(batch, name)) for name in names})
    names = ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
    inputs = replace(batch.inputs, **{name: low(getattr(batch.inputs, name)) for name in names})
    return replace(batch, inputs=inputs, past_latent=low(batch.past_latent), past_k_rope=low(batch.past_k_rope))


def make(name: str, kind: str, *, fp8: bool = False, window: int | None = None) -> Batch | MLABatch:
    requests, options = BATCHES[kind]
    options = {"block_size": 64, "fp8": fp8, **options}
    if name.endswith("mla"):
        return rounded(make_mla_batch(requests, shape=MLA, **options))
    return rounded(make_batch(requests, shape=AttentionShape(16, 4, 128, sliding_window=window), **options))


def new_cache(batch: Batch | MLABatch, num_blocks: int) -> PagedKVCache | MLAKVCache:
    spec = replace(batch.spec, dtype=DTYPE)
    cache: PagedKVCache | MLAKVCache
    if isinstance(batch, MLABatch):
        cache = MLAKVCache(spec, num_blocks, "cuda")
    else:
        cache = PagedKVCache(spec, num_blocks, "cuda")
        if spec.fp8:
            cache.set_scales(0, *fp8_scales(0))
    return cache


def refill(cache: PagedKVCache | MLAKVCache, batch: Batch | MLABatch) -> None:
    mla = isinstance(batch, MLABatch)
    first, second = (batch.past_latent, batch.past_k_rope) if mla else (batch.past_k, batch.past_v)
    cache.write(0, first.to("cuda", DTYPE), second.to("cuda", DTYPE), batch.past_slots.cuda())


def inputs_of(batch: Batch | MLABatch) -> tuple[Any, ...]:
    """What a layer gives to `forward`, on the GPU."""
    if isinstance(batch, Batch):
        return tuple(x.to("cuda", DTYPE) for x in (batch.q, batch.k, batch.v))
    inputs = batch.inputs
    names = ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
    rope = replace(inputs.rope, cos_sin=inputs.rope.cos_sin.cuda(), positions=inputs.rope.positions.cuda())
    return (replace(inputs, **{name: getattr(inputs, name).to("cuda", DTYPE) for name in names}, rope=rope),)


def expected(batch: Batch | MLABatch) -> Tensor:
    cache = batch.new_cache()
    if isinstance(cache, MLAKVCache) and isinstance(batch, MLABatch) and cache.spec.fp8:
        cache = MLAKVCache(batch.spec, batch.num_blocks)  # scales of 1
        cache.write(0, batch.past_latent, batch.past_k_rope, batch.past_slots)
    return batch.expected(0, cache)  # type: ignore[arg-type]


def close(out: Tensor, wanted: Tensor, *, fp8: bool) -> None:
    tolerance = 0.15 if fp8 else 0.03
    torch.testing.assert_close(out.float().cpu(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mla", "trtllm_mha", "trtllm_mla"])
def test_eager(name: str, kind: str, fp8: bool) -> None:
    skip_if_missing(name, kind, fp8=fp8)
    batch = make(name, kind, fp8=fp8)
    cache = new_cache(batch, batch.num_blocks)
    refill(cache, batch)
    plan = make_attention_backend(name, batch.shape, cache).plan(on_gpu(batch.metadata))
    close(plan.forward(*inputs_of(batch), 0), expected(batch), fp8=fp8)


@pytest.mark.parametrize("kind", ["decode", "prefix", "chain"])
@pytest.mark.parametrize("name", ["flashinfer", "trtllm_mha"])
def test_sliding_window(name: str, kind: str) -> None:
    skip_if_missing(name, kind)
    batch = make(name, kind, window=50)
    cache = new_cache(batch, batch.num_blocks)
    refill(cache, batch)
    plan = make_attention_backend(name, batch.shape, cache).plan(on_gpu(batch.metadata))
    close(plan.forward(*inputs_of(batch), 0), expected(batch), fp8=False)


@pytest.mark.parametrize("kind", ["decode", "chain", "tree", "draft extend"])
@pytest.mark.parametrize("name", ["flashinfer", "flashinfer_mla", "trtllm_mha", "trtllm_mla"])
def test_a_cuda_graph_replays_a_longer_batch(name: str, kind: str) -> None:
    """Captured with short sequences, replayed with long ones, and with a request of padding."""
    skip_if_missing(name, kind)
    drafts, options = (1 if kind == "decode" else 4), {k: v for k, v in BATCHES[kind][1].items() if k != "padding"}
    builder = make_mla_batch if name.endswith("mla") else make_batch
    shape = MLA if name.endswith("mla") else AttentionShape(16, 4, 128)
    mode = {"mode": ForwardMode.DECODE} if kind == "decode" else {}
    short = [(5, drafts), (90, drafts), (30, drafts)]
    long = [(900, drafts), (700, drafts), (0, 0)]
    batches: list[Batch | MLABatch] = [
        rounded(builder(requests, shape=shape, block_size=64, padding=padding, seed=seed, **options, **mode))  # type: ignore[operator]
        for seed, (requests, padding) in enumerate(((short, 0), (long, drafts)))
    ]
    cache = new_cache(batches[0], max(batch.num_blocks for batch in batches))
    backend = make_attention_backend(name, shape, cache)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(on_gpu(batches[0].metadata))
    static = inputs_of(batches[0])
    plan.forward(*static, 0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan.forward(*static, 0)
    for batch in (*batches, batches[0]):
        refill(cache, batch)
        _copy(static, inputs_of(batch))
        backend.replan(plan, on_gpu(batch.metadata))
        graph.replay()
        close(out, expected(batch), fp8=False)


def _copy(into: Any, given: Any) -> None:
    """Every tensor of one structure into the same of another."""
    if isinstance(into, Tensor):
        into.copy_(given)
    elif isinstance(into, tuple):
        for one, other in zip(into, given, strict=True):
            _copy(one, other)
    elif dataclasses.is_dataclass(into):
        for field in dataclasses.fields(into):
            _copy(getattr(into, field.name), getattr(given, field.name))
