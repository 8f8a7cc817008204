"""What every attention back end promises, as checks of any of them; `test_attention_conformance` runs them.

A `Bench` is a registered name for one kind of attention, with where it runs: as it is, in Triton's interpreter, or over
stand-ins for flashinfer. A check raises `AssertionError` if the back end breaks a promise. What it lacks by its traits
it has to refuse, by its name and with what to do instead: `refused`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_batches import AnyBatch, make_batch, make_mla_batch
from flashinfer_standin import StandIns, allocations
from torch import Tensor
from triton_batches import DEVICE, numbers

from attention import (
    AttentionShape,
    BackendTraits,
    CommonAttentionMetadata,
    GraphLimits,
    MLAShape,
    UBatchAttention,
    attention_backends,
    make_attention_backend,
    split_attn_metadata,
)
from attention.backends import registry
from ubatch import ConfigError, ForwardMode, UBatchSlice, split_fixed
from ubatch.kernels.c_jit import why_not_c

Requests = list[tuple[int, int]]
"""(tokens in the cache, new tokens) of each request; (0, 0) is a padding request."""

FLASHINFER_MLA = MLAShape(num_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
"""The only latents that flashinfer's kernels take."""
OVER_FLASHINFER = ("flashinfer", "trtllm_mha", "trtllm_mla")
LIMITS = GraphLimits(max_reqs=6, max_tokens=24, max_seq_len=96)

KINDS: dict[str, tuple[Requests, dict[str, Any]]] = {
    "decode": ([(20, 1), (33, 1), (0, 1), (15, 1)], {}),
    "prompts": ([(0, 5), (0, 17), (0, 2)], {}),
    "behind a prefix": ([(37, 9), (3, 2), (16, 3)], {}),
    "mixed": ([(9, 4), (0, 7), (21, 1), (0, 0), (2, 1)], {"padding": 2}),
    "draft extend": ([(9, 2), (20, 4), (5, 1)], {"mode": ForwardMode.DRAFT_EXTEND}),
    "chain": ([(17, 3), (2, 3), (0, 0)], {"drafts": "chain", "padding": 1}),
    "tree": ([(17, 4), (2, 4), (0, 0)], {"drafts": "tree", "padding": 1}),
    "tree of one": ([(7, 1), (3, 1)], {"drafts": "tree"}),
    "idle requests between": ([(0, 0), (20, 1), (0, 0), (3, 1), (0, 0)], {"padding": 3}),
    "only padding": ([(0, 0)], {"padding": 2}),
    "nothing": ([], {}),
}
GRAPHS: dict[str, tuple[int, dict[str, Any], list[Requests]]] = {
    "decode": (1, {"mode": ForwardMode.DECODE}, [[(5, 1), (20, 1), (9, 1), (2, 1)], [(70, 1), (33, 1), (95, 1)], []]),
    "chain": (3, {"drafts": "chain"}, [[(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (93, 3)], []]),
    "tree": (3, {"drafts": "tree"}, [[(5, 3), (20, 3), (9, 3), (2, 3)], [(70, 3), (93, 3)], []]),
    "tree of one": (1, {"drafts": "tree"}, [[(5, 1), (20, 1)], [(70, 1)], []]),
    "draft extend": (
        3, {"mode": ForwardMode.DRAFT_EXTEND}, [[(5, 3), (20, 1), (9, 2), (2, 3)], [(70, 1), (93, 3), (40, 2)], []],
    ),
}  # fmt: skip
"""Queries of a request in the graph, the options, and what is captured, and then replayed; the last one is idle."""
OPTIONS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.9},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "soft cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "narrow values": {"v_head_dim": 6},
    "wide values": {"v_head_dim": 12, "sliding_window": 9, "sinks": True},
    "all": {"scale": 0.5, "sliding_window": 20, "soft_cap": 2.0, "sinks": True},
}
ADVICE = re.compile("[Cc]hoose|[Cc]apture|[Cc]all|[Rr]aise|Draft|were (not )?given|come last")
LATENTS: dict[str, dict[str, Any]] = {
    "halves": {"interleaved": False},
    "scale": {"shape": replace(FLASHINFER_MLA, scale=0.02)},
    "odd": {"shape": MLAShape(3, 20, 3, 6, 5, scale=0.8)},
    "wide values": {"shape": MLAShape(2, 16, 3, 2, 8)},
    "many heads": {"shape": MLAShape(40, 16, 4, 4, 4), "interleaved": False},
    "small latents": {"shape": MLAShape(2, 4, 8, 4, 8)},
}
"""flashinfer's kernels take the first two only."""


@dataclass(frozen=True)
class Bench:
    """A registered back end for one kind of attention.

    Attributes:
        kind: the class.
        real: whether flashinfer itself runs, on a GPU.
    """

    name: str
    mla: bool
    kind: type[Any]
    real: bool = False
    device_type: str | None = None

    @property
    def traits(self) -> BackendTraits:
        """Of the class."""
        traits: BackendTraits = self.kind.traits
        return traits

    @property
    def device(self) -> str:
        """Where its batches are, if it does not say so: stand-ins compute on a CPU."""
        if self.device_type is not None:
            return self.device_type
        stands_in = self.name in OVER_FLASHINFER and not self.real
        return DEVICE if DEVICE in self.traits.devices and not stands_in else "cpu"

    def why_not(self) -> str | None:
        """Why it cannot run here."""
        if self.name == "native" and why_not_c():
            return why_not_c()
        if self.name not in OVER_FLASHINFER and self.device not in self.traits.devices:
            return f"{self.name} runs on {self.traits.devices}"
        return None

    def batch(self, requests: Requests, *, option: str | None = None, **options: Any) -> AnyBatch:
        """A batch with pages that the back end takes, in the shape that it takes."""
        sizes = self.traits.block_sizes
        options = {"block_size": sizes[0] if sizes else 16, **options}
        if self.mla:
            shape = {"shape": FLASHINFER_MLA} if self.name in OVER_FLASHINFER else {}
            batch: AnyBatch = make_mla_batch(requests, **{**shape, **options})
        else:
            shape = {} if option is None else {"shape": AttentionShape(4, 2, 8, **OPTIONS[option])}
            batch = make_batch(requests, **{**shape, **options})
        exact = batch.spec.fp8 and self.name.startswith("trtllm")
        return batch.exact_in_fp8() if exact else batch

    def padded(self, requests: Requests, num_reqs: int, num_queries: int, **options: Any) -> AnyBatch:
        """A batch as a runner pads it for a graph."""
        rows = sum(new for _, new in requests)
        padding = num_reqs * num_queries - rows
        return self.batch(requests + [(0, 0)] * (num_reqs - len(requests)), padding=padding, **options)

    def make(self, batch: AnyBatch, cache: Any = None) -> Any:
        """The back end over a cache; by default that of the batch."""
        made = make_attention_backend(self.name, batch.shape, batch.new_cache() if cache is None else cache)
        assert type(made) is self.kind
        return made

    def lacks(self, option: str) -> str | None:
        """The trait that it lacks for one of `OPTIONS`."""
        known = vars(self.traits)
        return next((trait for trait in OPTIONS[option] if trait != "scale" and not known[trait]), None)

    def tolerance(self, batch: AnyBatch) -> float:
        """Where a kernel rotates what it stores in fp8, a number may round to its neighbour."""
        return 5e-3 if batch.spec.fp8 and (self.name, self.mla) == ("triton", True) else 2e-5


def benches() -> Iterator[Bench]:
    """Every registered back end, once for each kind of attention that its name serves."""
    for name in attention_backends()[1:]:
        for mla in (False, True):
            kind: Any = registry._BACKENDS.load(registry._MLA_NAMES.get(name, name) if mla else name)
            if kind.traits.mla if mla else kind.traits.mha:
                yield Bench(name, mla, kind)


@contextmanager
def refused(message: str) -> Iterator[None]:
    """What is done in the block is refused, with this message, which says what to do."""
    with pytest.raises(ConfigError, match=message) as caught:
        yield
    assert ADVICE.search(str(caught.value)), f"no advice in: {caught.value}"


# -- eager -------------------------------------------------------------------------------------------------------------


def check(bench: Bench, batch: AnyBatch, dtype: torch.dtype = torch.float32, tolerance: float | None = None) -> Any:
    """Output and cache equal the reference's in every layer; rows of padding are 0. Returns the plan."""
    batch = batch.to(dtype)
    there, exact = batch.on(bench.device), batch.to(torch.float32)
    fast, slow = there.new_cache(), exact.new_cache()
    plan = bench.make(there, fast).plan(there.metadata)
    near = tolerance or bench.tolerance(batch)
    for layer in range(batch.spec.num_layers):
        out = there.forward(plan, layer)
        right = exact.expected(layer, slow)
        assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, right.shape, True)
        torch.testing.assert_close(out.cpu().float(), right, atol=near, rtol=near)
        assert not out[batch.metadata.num_actual_tokens :].any(), "rows of padding are 0"
        if bench.device == "cuda" and (batch.spec.fp8 or dtype != torch.float32):
            continue  # a GPU rounds otherwise
        for written, wanted in zip(fast._pools, slow._pools, strict=True):
            stored, expected = (numbers(pool.blocks(layer)) for pool in (written, wanted))
            step = 0.13 if batch.spec.fp8 else 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(stored, expected.to(stored.dtype), atol=1e-6, rtol=step)
    return plan


def check_none_is_ignored(batch: AnyBatch) -> None:
    """The batch would notice if its options were dropped: without them the oracle says something else."""
    shape = batch.shape
    plain = AttentionShape(shape.num_heads, shape.num_kv_heads, shape.head_dim, v_head_dim=shape.v_head_dim)
    without: Any = replace(batch, shape=plain, sinks=None)  # type: ignore[call-arg]
    assert plain == shape or (batch.expected() - without.expected()).abs().max() > 1e-3


def check_steps(bench: Bench) -> None:
    """Each step finds what the steps before it wrote: three decodes equal one causal step of three tokens."""
    whole = bench.batch([(14, 3), (30, 3)]).on(bench.device)
    backend, expected = bench.make(whole), whole.on("cpu").expected()
    for step in range(3):
        rows = torch.tensor([step, 3 + step], device=bench.device)
        metadata = CommonAttentionMetadata.build(
            [1, 1], [15 + step, 31 + step], whole.metadata.block_table, whole.metadata.slot_mapping[rows],
            ForwardMode.DECODE,
        )  # fmt: skip
        own = whole.part(rows, metadata)
        out = own.forward(backend.plan(metadata))
        torch.testing.assert_close(out.cpu(), expected[rows], atol=2e-5, rtol=2e-5)


def check_shared_block(bench: Bench) -> None:
    """A request may read what another one computes in this very step, in a block that both have."""
    size = (bench.traits.block_sizes or (16,))[0]
    batch = bench.batch([(0, size + 1), (size + 1, 1)], mode=ForwardMode.MIXED)
    table, slots = batch.metadata.block_table.clone(), batch.metadata.slot_mapping.clone()
    table[1, :2] = table[0, :2]
    slots[size + 1] = table[0, 1] * size + 1
    nothing = {name: getattr(batch, name)[:0] for name in ("past_slots", *batch.PAST)}
    metadata = replace(batch.metadata, block_table=table, slot_mapping=slots)
    check(bench, replace(batch, metadata=metadata, **nothing))


def check_others_values(bench: Bench, batch: AnyBatch, *, captured: bool = False) -> None:
    """What lies in slots that are no request's reaches no result: over nan and infinity there the bits are the same."""
    worst = (0x7F, 0xFF) if batch.spec.fp8 else (float("nan"), float("inf"), float("-inf"))
    clean, same = (_over(bench, batch.on(bench.device), values, captured) for values in ((0,), worst))
    assert clean.isfinite().all()
    assert torch.equal(same, clean)


def _over(bench: Bench, batch: AnyBatch, values: Sequence[float], captured: bool) -> Tensor:
    cache = batch.new_cache()
    for pool in cache._pools:
        slots = pool.memory.view(batch.spec.num_layers, -1, pool.memory[0, 0, 0].numel())
        others = torch.ones(slots.shape[1], dtype=torch.bool)
        others[batch.past_slots.cpu()] = False
        where = others.nonzero().flatten().to(slots.device)
        worst = torch.tensor(values, dtype=slots.dtype, device=slots.device).repeat(len(where))[: len(where)]
        slots[:, where] = worst[:, None]
    backend = bench.make(batch, cache)
    if captured:
        backend.init_graph_buffers(LIMITS)
    plan = (backend.plan_for_graph if captured else backend.plan)(batch.metadata)
    return torch.stack([batch.forward(plan, layer).clone() for layer in range(batch.spec.num_layers)])


# -- lanes -------------------------------------------------------------------------------------------------------------


def lanes_between(edges: Iterable[int], metadata: CommonAttentionMetadata) -> list[UBatchSlice]:
    """Lanes between token edges, each with the requests that own its tokens; the last one has all padding."""
    starts, rows = metadata.query_start_loc_cpu, len(metadata.slot_mapping)
    lanes = []
    for start, stop in pairwise([0, *edges, metadata.num_actual_tokens]):
        inside = [r for r in range(metadata.num_reqs) if starts[r] < stop and starts[r + 1] > start]
        lanes.append((inside[0], inside[-1] + 1, start, stop) if inside else (0, 0, start, stop))
    first, last, start, _ = lanes.pop()
    lanes.append((first, metadata.num_reqs if last else last, start, rows))
    return [UBatchSlice(slice(first, last), slice(start, stop)) for first, last, start, stop in lanes]


def check_lanes(bench: Bench, batch: AnyBatch, edges: Sequence[int], kernels: StandIns) -> tuple[torch.Tensor, Any]:
    """Lanes, planned before any runs, and each a layer ahead of the next, give what the whole batch gives.

    A back end object serves each lane: none touches another's memory. Returns the first layer's output, and the cache.
    """
    there = batch.on(bench.device)
    slices = lanes_between(edges, batch.metadata)
    cache, slow = there.new_cache(), batch.new_cache()
    attention = UBatchAttention(batch.shape, cache, bench.name)
    plans = attention.plan_lanes(split_attn_metadata(slices, there.metadata))
    layers, lanes = batch.spec.num_layers, range(len(slices))
    outs = {}
    for lane, layer in sorted(((lane, layer) for lane in lanes for layer in range(layers)), key=sum):
        kernels.lane = f"lane {lane}"
        outs[lane, layer] = there.part(slices[lane].token_slice).forward(plans[lane], layer).cpu()
    near = bench.tolerance(batch)
    for layer in range(layers):
        expected = batch.expected(layer, slow)
        torch.testing.assert_close(torch.cat([outs[lane, layer] for lane in lanes]), expected, atol=near, rtol=near)
        for written, wanted in zip(cache._pools, slow._pools, strict=True):
            torch.testing.assert_close(numbers(written.blocks(layer)), numbers(wanted.blocks(layer)))
    made = [attention.backend(batch.metadata, lane) for lane in (None, *lanes)]
    assert len({id(backend) for backend in made}) == len(made)
    memory = [place for backend in made for place in set(tensors_of(backend, skip=(cache,)).values())]
    assert len(memory) == len(set(memory)), "two lanes share memory"
    return torch.cat([outs[lane, 0] for lane in lanes]), cache


# -- graphs ------------------------------------------------------------------------------------------------------------


def tensors_of(thing: Any, path: str = "", skip: Sequence[Any] = (), seen: set[int] | None = None) -> dict[str, int]:
    """Where all tensors that an object of ours holds begin, by how they are reached."""
    seen = set() if seen is None else seen
    if id(thing) in seen or any(thing is each for each in skip):
        return {}
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return {path: thing.data_ptr()} if thing.numel() else {}
    parts: Mapping[str, Any] = {}
    if isinstance(thing, tuple | list):
        parts = {str(place): each for place, each in enumerate(thing)}
    elif is_dataclass(thing) and not isinstance(thing, type):
        parts = {field.name: getattr(thing, field.name) for field in fields(thing)}
    elif type(thing).__module__.partition(".")[0] in ("attention", "static_attention", "flashinfer_standin_wrappers"):
        parts = vars(thing)
    return {
        name: place
        for key, each in parts.items()
        for name, place in tensors_of(each, f"{path}.{key}", skip, seen).items()
    }


def check_replays(bench: Bench, kind: str, **options: Any) -> None:
    """A plan that was captured short serves longer, other and idle batches, over the same addresses."""
    num_queries, how, steps = GRAPHS[kind]
    batches = [
        bench.padded(step, 4, num_queries, seed=seed, **(how | options if step else options))
        for seed, step in enumerate(steps)
    ]
    cache = batches[0].on(bench.device).empty_cache(max(batch.num_blocks for batch in batches))
    backend = bench.make(batches[0], cache)
    with torch.inference_mode():  # as a runner captures; what it made must serve everybody
        backend.init_graph_buffers(LIMITS)
        plan = backend.plan_for_graph(batches[0].on(bench.device).metadata)
    where, size = tensors_of(plan, skip=(backend, cache)), backend.nbytes
    for number, batch in enumerate([*batches, batches[0]]):
        there = batch.on(bench.device)
        there.fill(cache)
        if number < len(batches):
            with allocations() as count:
                backend.replan(plan, there.metadata)
            masked = bench.name == "flashinfer" and "tree" in kind  # flashinfer's mask is packed, in new memory
            assert masked or not count(), "replanning allocates"
        else:
            backend.replan(plan, there.metadata)
        assert tensors_of(plan, skip=(backend, cache)) == where, "a pointer moved"
        near = bench.tolerance(batch)
        torch.testing.assert_close(there.forward(plan).cpu(), batch.expected(), atol=near, rtol=near)
    made_late = 4 * 256  # the stand-ins' workspace, made with the first plan that runs
    assert backend.nbytes in (size, size + made_late)


def check_graph_lanes(bench: Bench, kernels: StandIns) -> None:
    """Nine requests of three drafts in two captured lanes: the second has five requests, and more than half of all."""
    short = bench.batch([(5, 3)] * 9, drafts="chain", seed=1).on(bench.device)
    batch = bench.batch([(90, 3)] * 9, drafts="chain").on(bench.device)
    cache, slices = batch.empty_cache(), split_fixed(9, 3)
    lanes = split_attn_metadata(slices, batch.metadata)
    attention = UBatchAttention(batch.shape, cache, bench.name)
    attention.init_graph_buffers(GraphLimits(max_reqs=9, max_tokens=27, max_seq_len=96), num_lanes=2)
    plans = attention.plan_lanes_for_graph(split_attn_metadata(slices, short.metadata))
    batch.fill(cache)
    attention.replan_lanes(plans, lanes)
    outs = []
    for number, (plan, piece) in enumerate(zip(plans, slices, strict=True)):
        kernels.lane = f"lane {number}"
        outs.append(batch.part(piece.token_slice).forward(plan).cpu())
    torch.testing.assert_close(torch.cat(outs), batch.on("cpu").expected(), atol=2e-5, rtol=2e-5)


def check_graph_refusals(bench: Bench) -> None:
    """A graph refuses what it was not captured for, and a back end what it cannot capture."""
    batch = bench.padded([(5, 1), (2, 1)], 4, 1, mode=ForwardMode.DECODE).on(bench.device)
    backend = bench.make(batch, batch.empty_cache(32))
    if not bench.traits.graphs:
        for call in (lambda: backend.init_graph_buffers(LIMITS), lambda: backend.plan_for_graph(batch.metadata)):
            with refused(f"'{bench.kind.name}' cannot run in a CUDA graph"):
                call()
        with refused("cannot run in a CUDA graph"):
            backend.replan(None, batch.metadata)
        return
    with refused("init_graph_buffers"):
        backend.plan_for_graph(batch.metadata)
    backend.init_graph_buffers(LIMITS)
    plan = backend.plan_for_graph(batch.metadata)
    for other, message in (
        (bench.padded([(5, 1)] * 5, 5, 1, mode=ForwardMode.DECODE), "requests"),
        (bench.padded([(5, 2)], 2, 2, mode=ForwardMode.DRAFT_EXTEND), "queries per request|tokens per request"),
        (bench.padded([(100, 1)], 4, 1, mode=ForwardMode.DECODE), "101 tokens"),
        (bench.padded([(5, 1)], 4, 1, drafts="tree"), "tree mask"),
        (bench.batch([(0, 0), (5, 1)], padding=3, mode=ForwardMode.DECODE), "come last"),
    ):
        there = other.on(bench.device)
        said = _refusal(backend, plan, there)
        if said is None:  # then it has to serve it
            there.fill(backend.kv_cache)
            torch.testing.assert_close(there.forward(plan).cpu()[: len(other.expected())], other.expected())
        else:
            assert re.search(message, said)
            assert ADVICE.search(said)
    with refused("7 requests"):
        backend.plan_for_graph(bench.padded([(5, 1)] * 7, 7, 1, mode=ForwardMode.DECODE).on(bench.device).metadata)


def _refusal(backend: Any, plan: Any, batch: AnyBatch) -> str | None:
    try:
        backend.replan(plan, batch.metadata)
    except ConfigError as error:
        return str(error)
    return None
