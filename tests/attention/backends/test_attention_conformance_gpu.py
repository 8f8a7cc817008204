"""Attention back ends compiled, on a real GPU: real sizes and dtypes against the float32 reference, also in graphs.

What a GPU's architecture has no kernel for is skipped here, and refused by name there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import AnyBatch, MLABatch, make_batch, make_mla_batch
from attention_conformance import Bench, benches, check
from torch import Tensor

from attention import AttentionShape, GraphLimits, MLAShape, make_attention_backend
from attention.kernels import tuning
from ubatch import ForwardMode

# flashinfer prefers the pages of latent attention in one object since 0.7, which 0.6 does not know.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BF16 = torch.bfloat16
MLA = MLAShape(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
LIMITS = GraphLimits(max_reqs=4, max_tokens=16, max_seq_len=1024)
BENCHES = {bench.kind.name: replace(bench, real=True) for bench in benches() if "cuda" in bench.kind.traits.devices}
NAMES = ["flashinfer", "flashinfer_mla", "trtllm_mha", "trtllm_mla", "triton", "triton_mla"]
KINDS: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": ([(1000, 1), (3, 1), (64, 1)], {}),
    "prefill": ([(0, 70), (0, 5)], {}),
    "prefix": ([(129, 40), (0, 3), (700, 2)], {}),
    "mixed": ([(129, 40), (300, 1), (5, 1)], {"padding": 5}),
    "chain": ([(200, 4), (64, 4)], {"drafts": "chain"}),
    "tree": ([(200, 8), (64, 8)], {"drafts": "tree"}),
    "draft extend": ([(200, 4), (64, 2), (5, 1)], {"mode": ForwardMode.DRAFT_EXTEND}),
}


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile takes seconds to compile: the default alone, where a test does not ask for all."""
    monkeypatch.setattr(tuning, "autotune", lambda key, choices, *args, **options: choices[0])


def missing(name: str, kind: str, *, fp8: bool = False) -> str | None:
    """What this GPU has no kernel for: the back end, the kind of batch, and where it would run; None if it runs."""
    traits = BENCHES[name].traits
    if kind == "tree" and not traits.tree_mask:
        return f"{name} takes no tree mask on any GPU; flashinfer and triton do"
    if fp8 and not traits.fp8:
        return f"{name} reads no fp8 cache on any GPU; trtllm_mla does, on SM100 and SM103"
    major, minor = torch.cuda.get_device_capability()
    if name == "trtllm_mha" and kind == "decode":
        majors, where = (9, 10, 12), "SM90, SM100, SM103 or SM120"
    elif name.startswith("trtllm"):
        majors, where = (10,), "SM100 or SM103"
    else:
        return None
    return None if major in majors else f"{name} has no kernel for {kind} on SM{major}{minor}; that runs on {where}"


def bench_of(name: str, kind: str, *, fp8: bool = False) -> Bench:
    """The back end, if flashinfer is installed and this GPU has a kernel."""
    if not name.startswith("triton"):
        why = "flashinfer is not installed; `make test` installs it"
        pytest.importorskip("flashinfer", reason=why, exc_type=ImportError)
    if reason := missing(name, kind, fp8=fp8):
        pytest.skip(reason)
    return BENCHES[name]


def batch_of(bench: Bench, kind: str, *, shape: Any = None, **options: Any) -> AnyBatch:
    requests, own = KINDS[kind]
    shape = shape or (MLA if bench.mla else AttentionShape(16, 4, 128))
    return bench.batch(requests, shape=shape, **{"block_size": 64, **own, **options})


def near(dtype: torch.dtype, *, fp8: bool, name: str) -> float:
    if not name.startswith("triton"):
        return 0.15 if fp8 else 0.03
    more = 1.5 if name == "triton_mla" else 1.0
    return {torch.float32: 1e-5, torch.float16: 4e-3 * more, BF16: 3e-2 * more}[dtype]


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, BF16) for name in NAMES), *((name, torch.float16) for name in NAMES[4:]), ("triton", torch.float32)],
)
def test_eager(name: str, dtype: torch.dtype, kind: str, fp8: bool) -> None:
    bench = bench_of(name, kind, fp8=fp8)
    check(bench, batch_of(bench, kind, fp8=fp8), dtype, tolerance=near(dtype, fp8=fp8, name=name))


@pytest.mark.parametrize("kind", ["decode", "prefix", "chain"])
@pytest.mark.parametrize("name", ["flashinfer", "trtllm_mha", "triton"])
def test_sliding_window(name: str, kind: str) -> None:
    bench = bench_of(name, kind)
    batch = batch_of(bench, kind, shape=AttentionShape(16, 4, 128, sliding_window=50))
    check(bench, batch, BF16, tolerance=near(BF16, fp8=False, name=name))


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("kind", ["prefix", "mixed", "tree"])
def test_every_option_compiled(kind: str, dtype: torch.dtype) -> None:
    shape = AttentionShape(16, 2, 64, scale=0.2, sliding_window=100, soft_cap=5.0, sinks=True)
    bench = BENCHES["triton"]
    check(bench, batch_of(bench, kind, shape=shape), dtype, tolerance=near(dtype, fp8=False, name="triton"))


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("kind", ["decode", "mixed", "tree"])
def test_other_heads_compiled(kind: str, head_dim: int, fp8: bool, dtype: torch.dtype) -> None:
    bench = BENCHES["triton"]
    batch = batch_of(bench, kind, shape=AttentionShape(16, 4, head_dim), fp8=fp8, block_size=16)
    check(bench, batch, dtype, tolerance=near(dtype, fp8=fp8, name="triton"))


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("kind", ["decode", "mixed", "tree"])
def test_all_heads_of_deepseek_compiled(kind: str, dtype: torch.dtype) -> None:
    bench = BENCHES["triton_mla"]
    batch = batch_of(bench, kind, shape=replace(MLA, num_heads=128))
    check(bench, batch, dtype, tolerance=near(dtype, fp8=False, name="triton_mla"))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize(("name", "kind"), [("triton", "decode"), ("triton", "prefill"), ("triton_mla", "chain")])
def test_every_tile_compiled(name: str, kind: str, fp8: bool) -> None:
    """Whatever tuning chooses gives the same."""
    bench = BENCHES[name]
    batch = batch_of(bench, kind, shape=replace(MLA, num_heads=64) if bench.mla else None, fp8=fp8)
    with pytest.MonkeyPatch.context() as patch:
        found = EveryChoice(patch)
        while not found.all_tried:
            before = found.num_tried
            try:
                check(bench, batch, BF16, tolerance=near(BF16, fp8=fp8, name=name))
            except AssertionError as error:
                raise AssertionError(f"{found.newest}: {error}") from error
            assert found.num_tried > before, "no tile is asked for"
    assert found.num_tried > 3


class EveryChoice:
    """Stands in for the autotuner: each time it is asked for a kernel's tile, it takes the next one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._tried: dict[str, int] = {}
        self._left: dict[str, int] = {}
        self.newest: dict[str, Any] = {}
        patch.setattr(tuning, "autotune", self.next)

    @property
    def num_tried(self) -> int:
        return sum(self._tried.values())

    @property
    def all_tried(self) -> bool:
        return bool(self._left) and not any(self._left.values())

    def next(self, key: str, choices: Sequence[Any], *args: object, **options: object) -> Any:
        tried = self._tried.get(key, 0)
        self._tried[key], self._left[key] = min(tried + 1, len(choices)), max(len(choices) - tried - 1, 0)
        self.newest[key] = choices[min(tried, len(choices) - 1)]
        return self.newest[key]


# -- graphs ------------------------------------------------------------------------------------------------------------


def inputs_of(batch: Any) -> list[Tensor]:
    """What a layer is given."""
    if not isinstance(batch, MLABatch):
        return [batch.q, batch.k, batch.v]
    names = ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
    return [batch.inputs.rope.positions, *(getattr(batch.inputs, name) for name in names)]


@pytest.mark.parametrize("kind", ["decode", "chain", "tree", "draft extend"])
@pytest.mark.parametrize(("name", "dtype"), [*((name, BF16) for name in NAMES), ("triton", torch.float32)])
def test_a_cuda_graph_replays_longer_batches(name: str, dtype: torch.dtype, kind: str) -> None:
    """Captured with short sequences, replayed with long ones, and with a request of padding."""
    bench, queries = bench_of(name, kind), 1 if kind == "decode" else 4
    options = {key: value for key, value in KINDS[kind][1].items() if key != "padding"}
    options |= {"mode": ForwardMode.DECODE} if kind == "decode" else {}
    make = make_mla_batch if bench.mla else make_batch
    shape: Any = MLA if bench.mla else AttentionShape(16, 4, 128)
    short, long = [(5, queries), (90, queries), (30, queries)], [(900, queries), (700, queries), (0, 0)]
    batches: list[Any] = [
        make(requests, shape=shape, block_size=64, padding=padding, seed=seed, **options).to(dtype)  # type: ignore[operator]
        for seed, (requests, padding) in enumerate(((short, 0), (long, queries)))
    ]
    static = batches[0].on("cuda")
    cache = static.empty_cache(max(batch.num_blocks for batch in batches))
    backend = make_attention_backend(name, shape, cache)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(static.metadata)
    static.forward(plan)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static.forward(plan)
    for batch in (*batches, batches[0]):
        there = batch.on("cuda")
        there.fill(cache)
        for target, source in zip(inputs_of(static), inputs_of(there), strict=True):
            target.copy_(source)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        backend.replan(plan, there.metadata)
        assert not name.startswith("triton") or torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph.replay()
        tolerance = near(dtype, fp8=False, name=name)
        torch.testing.assert_close(
            out.float().cpu(), batch.to(torch.float32).expected(), atol=tolerance, rtol=tolerance
        )
