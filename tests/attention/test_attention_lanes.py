"""Attention in lanes equals attention of the whole batch; one back end, and one workspace, per lane."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attention_batches import AnyBatch, make_batch, make_mla_batch
from attention_conformance import Bench, check_lanes, lanes_between
from flashinfer_standin import StandIns
from hypothesis import given
from hypothesis import strategies as st

from attention import (
    AttentionShape,
    BackendTraits,
    GraphLimits,
    UBatchAttention,
    register_attention_backend,
    split_attn_metadata,
)
from attention.backends import registry
from attention.backends.torch.mla import TorchMLABackend
from attention.backends.torch.sdpa import TorchAttentionBackend
from attention.lanes import EmptyPlan
from ubatch import ConfigError, ForwardMode, UBatchSlice

pytestmark = pytest.mark.long

# -- batches and cuts --------------------------------------------------------------------------------------------------

KINDS = {
    "decode": st.lists(st.tuples(st.integers(1, 12), st.just(1)), min_size=1, max_size=8),
    "prefill": st.lists(st.tuples(st.just(0), st.integers(1, 7)), min_size=1, max_size=6),
    "chunked prefill": st.lists(st.tuples(st.integers(1, 12), st.integers(2, 7)), min_size=1, max_size=5),
    "mixed": st.lists(st.tuples(st.integers(0, 12), st.integers(1, 7)), min_size=1, max_size=6),
    "verify": st.integers(1, 5).flatmap(
        lambda drafts: st.lists(st.tuples(st.integers(0, 12), st.just(drafts)), min_size=1, max_size=6)
    ),
    "idle": st.just([]),
}
OPTIONS = [
    AttentionShape(4, 2, 8),
    AttentionShape(4, 2, 8, sliding_window=4, v_head_dim=6),
    AttentionShape(4, 1, 8, scale=0.5, soft_cap=2.0, sinks=True),
]


@st.composite
def cut_batches(draw: st.DrawFn, *, mla: bool) -> tuple[AnyBatch, list[int]]:
    """A batch of any kind, and legal edges of lanes for it: cut anywhere, but drafts of a request stay together."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    requests = draw(KINDS[kind]) + [(0, 0)] * draw(st.integers(0, 2))
    drafts = draw(st.sampled_from(["chain", "tree"])) if kind == "verify" else None
    options = {
        "block_size": draw(st.sampled_from([1, 4, 16])),
        "padding": draw(st.integers(0, 2)),
        "fp8": draw(st.booleans()),
        "drafts": drafts,
        "seed": draw(st.integers(0, 99)),
    }
    if mla:
        batch: AnyBatch = make_mla_batch(requests, **options)
    else:
        batch = make_batch(requests, shape=draw(st.sampled_from(OPTIONS)), **options)
    starts = batch.metadata.query_start_loc_cpu
    places = st.sampled_from(starts) if drafts else st.integers(0, starts[-1])
    return batch, sorted(draw(st.lists(places, min_size=1, max_size=3)))


# -- the property ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TorchAttentionBackend, TorchMLABackend], ids=["mha", "mla"])
@pytest.mark.parametrize("name", ["torch", "auto"])
@given(data=st.data())
def test_lane_by_lane_equals_whole(name: str, kind: Any, data: st.DataObject) -> None:
    """The later lane sees what the earlier one wrote, in every kind of batch, wherever it is cut."""
    batch, edges = data.draw(cut_batches(mla=kind.traits.mla))
    lanes, cache = check_lanes(Bench(name, kind.traits.mla, kind, device_type="cpu"), batch, edges, StandIns())
    of_whole = batch.new_cache()
    whole = batch.forward(UBatchAttention(batch.shape, of_whole, name).plan(batch.metadata))
    torch.testing.assert_close(lanes, whole, atol=5e-6, rtol=1e-5)
    for ours, theirs in zip(cache._pools, of_whole._pools, strict=True):
        assert torch.equal(ours.blocks(0), theirs.blocks(0))


@pytest.mark.parametrize("make", [make_batch, make_mla_batch], ids=["mha", "mla"])
def test_the_wrong_order_would_be_noticed(make: type) -> None:
    """The property can fail: with the later lane first, its tokens miss the earlier one's."""
    batch = make([(0, 8)])
    slices = lanes_between([4], batch.metadata)
    plans = UBatchAttention(batch.shape, batch.new_cache()).plan_lanes(split_attn_metadata(slices, batch.metadata))
    late = batch.part(slices[1].token_slice).forward(plans[1])
    assert (late - batch.expected()[4:]).abs().max() > 1e-2


# -- the composite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [partial(make_batch, shape=AttentionShape(4, 2, 8, v_head_dim=6)), make_mla_batch], ids=["mha", "mla"]
)
def test_an_empty_lane_attends_to_nothing_and_writes_nothing(make: Any) -> None:
    batch = make([(3, 2)], padding=2)
    cache = batch.new_cache()
    before = [pool.blocks(0).clone() for pool in cache._pools]
    empty, padding = UBatchSlice(slice(0, 0), slice(5, 5)), UBatchSlice(slice(0, 0), slice(2, 4))
    attention = UBatchAttention(batch.shape, cache)
    slices = [UBatchSlice(slice(0, 1), slice(0, 2)), padding]
    plans = attention.plan_lanes(split_attn_metadata(slices, batch.metadata))
    assert isinstance(plans[1], EmptyPlan)
    out = batch.part(padding.token_slice).forward(plans[1])
    assert out.shape == (2, *batch.expected().shape[1:])
    assert not out.any()
    assert len(batch.part(empty.token_slice).forward(plans[1])) == 0
    assert all(torch.equal(old, pool.blocks(0)) for old, pool in zip(before, cache._pools, strict=True))
    idle = make([])
    assert isinstance(attention.plan(idle.metadata), EmptyPlan)


@pytest.mark.parametrize(("make", "name"), [(make_batch, "torch"), (make_mla_batch, "torch_mla")], ids=["mha", "mla"])
def test_lanes_get_back_ends_on_the_first_step_that_overlaps_and_memory_counts_them(make: type, name: str) -> None:
    batch = make([(9, 1), (30, 1), (17, 1)])
    attention = UBatchAttention(batch.shape, batch.new_cache(), "torch")
    assert attention.memory() == {f"whole/{name}": 0}
    attention.plan(batch.metadata)
    whole = attention.memory()[f"whole/{name}"]
    assert whole > 0
    lanes = split_attn_metadata(lanes_between([1], batch.metadata), batch.metadata)
    attention.plan_lanes(lanes)
    held = attention.memory()
    assert list(held) == [f"whole/{name}", f"lane 0/{name}", f"lane 1/{name}"]
    assert 0 < held[f"lane 0/{name}"] < held[f"lane 1/{name}"] <= whole
    attention.plan_lanes(lanes)
    assert attention.memory() == held  # kept over steps
    objects = [attention.backend(batch.metadata, lane) for lane in (None, 0, 1)]
    assert len({id(backend) for backend in objects}) == 3
    assert len({backend._workspace.take(1).data_ptr() for backend in objects}) == 3


class Recording(TorchAttentionBackend):
    """A second back end over the same cache."""

    name = "recording"
    limits: GraphLimits | None = None

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        self.limits = limits


class LongFill(TorchAttentionBackend):
    """Wants padding requests of another length."""

    name = "long_fill"
    traits = BackendTraits(devices=("cpu",), seq_len_fill=7)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are known by name, for one test."""
    monkeypatch.setattr(registry._BACKENDS, "_targets", dict(registry._BACKENDS._targets))
    for kind in (Recording, LongFill):
        register_attention_backend(kind.name, f"{kind.__module__}:{kind.__name__}")


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("requests", "drafts", "mode", "name"),
    [
        ([(3, 1), (4, 1)], None, ForwardMode.DECODE, "recording"),
        ([(3, 2), (4, 2)], "chain", ForwardMode.TARGET_VERIFY, "recording"),
        ([(3, 2), (4, 1)], None, ForwardMode.DRAFT_EXTEND, "recording"),
        ([(0, 2), (4, 3)], None, ForwardMode.PREFILL, "torch"),
        ([(0, 2), (4, 1)], None, ForwardMode.MIXED, "torch"),
    ],
)
def test_prefill_and_decode_may_run_on_different_back_ends(
    requests: list[tuple[int, int]], drafts: str | None, mode: ForwardMode, name: str
) -> None:
    batch = make_batch(requests, drafts=drafts, mode=mode)
    attention = UBatchAttention(batch.shape, batch.new_cache(), prefill="torch", decode="recording")
    assert attention.backend(batch.metadata).name == name
    assert attention.backend(batch.metadata, lane=1).name == name
    out = batch.forward(attention.plan(batch.metadata))
    torch.testing.assert_close(out, batch.expected(), atol=5e-6, rtol=1e-5)
    held = attention.memory()
    places = ("whole", "lane 0", "lane 1")
    assert set(held) == {f"{place}/{kind}" for place in places for kind in ("torch", "recording")}
    assert {key for key, number in held.items() if number} == {f"whole/{name}"}


@pytest.mark.usefixtures("fakes")
def test_back_ends_that_disagree_about_padding_requests_are_refused() -> None:
    batch = make_batch([(3, 1)])
    cache = batch.new_cache()
    with pytest.raises(ConfigError, match=r"disagree.*'torch': 1.*'long_fill': 7"):
        UBatchAttention(batch.shape, cache, prefill="torch", decode="long_fill")
    UBatchAttention(batch.shape, cache, prefill="long_fill")


@pytest.mark.usefixtures("fakes")
def test_lanes_get_graph_buffers_of_a_lanes_size() -> None:
    batch = make_batch([(3, 1)])
    attention = UBatchAttention(batch.shape, batch.new_cache(), "recording")
    for max_tokens, of_a_lane in ((9, 5), (36, 20), (11, 10)):  # 5 requests: decode, 4 drafts each, 2 at most
        limits = GraphLimits(max_reqs=9, max_tokens=max_tokens, max_seq_len=40)
        attention.init_graph_buffers(limits, num_lanes=2)
        found = [attention.backend(batch.metadata, lane).limits for lane in (None, 0, 1)]  # type: ignore[attr-defined]
        assert found == [limits, *[GraphLimits(5, of_a_lane, 40)] * 2]
    eager = UBatchAttention(batch.shape, batch.new_cache(), "torch")
    with pytest.raises(ConfigError, match="cannot run in a CUDA graph"):
        eager.init_graph_buffers(GraphLimits(9, 11, 40))


@pytest.mark.usefixtures("fakes")
def test_only_the_decode_back_end_is_captured_and_replays_idle_batches() -> None:
    """A back end for prefill alone need not know graphs; an idle rank replays what the others decode."""
    batch = make_batch([(3, 1)])
    attention = UBatchAttention(batch.shape, batch.new_cache(), prefill="torch", decode="recording")
    attention.init_graph_buffers(GraphLimits(4, 4, 40), num_lanes=2)
    idle = make_batch([]).metadata
    for lane in (None, 0, 1):
        assert attention.backend(idle, lane) is attention.backend(batch.metadata, lane)
        assert attention.backend(idle, lane).limits is not None  # type: ignore[attr-defined]


def test_batches_without_a_fixed_shape_are_not_captured() -> None:
    batch = make_batch([(0, 3), (4, 1)], block_size=16)
    attention = UBatchAttention(batch.shape, batch.new_cache(), "triton")
    assert attention.capturable
    assert not UBatchAttention(batch.shape, batch.new_cache(), "torch").capturable
    attention.init_graph_buffers(GraphLimits(4, 8, 40), num_lanes=2)
    for plan in (attention.plan_for_graph, lambda metadata: attention.plan_lanes_for_graph([metadata] * 2)):
        with pytest.raises(ConfigError, match="batches are not captured: their shapes"):
            plan(batch.metadata)
