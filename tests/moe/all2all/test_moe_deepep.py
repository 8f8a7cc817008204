"""The DeepEP back ends on two ranks, through a stand-in for DeepEP that checks every call and really exchanges.

Of DeepEP's asynchronous mode, as if on a GPU (its own stream, its events, memory that it marks for the allocator),
`fake_cuda` checks every operation of the real back ends, kernel and experts against every kernel of the stand-in. The
synchronous mode, and every schedule, is checked with the other transports (`test_moe_schedules_streams`).
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import deep_ep_standin
import pytest
import torch
from deep_ep_standin_events import calls
from deepep_cases import (
    BACKENDS,
    EXPERTS,
    HIDDEN,
    ROOM,
    TOP_K,
    Stack,
    check_layer,
    close,
    lanes_of,
    layer_of,
    rows_of,
    run_checks,
    tokens_of,
    transport,
)
from deepep_device import FakeCudaWithDeepEP, deepep_device
from fake_cuda import FakeCuda
from lanes import alone
from torch import Tensor, nn

from moe import BatchedDispatch, Dispatched, SoftmaxTopKRouter, quantize_blocks
from moe.all2all.deepep.base import DeepEPStreamed, Prepared, Queued
from ubatch import (
    CommGroup,
    ConfigError,
    ForwardContext,
    Recv,
    Schedule,
    SpanKind,
    get_schedule,
    set_forward_context,
    tracing,
)


def test_results() -> None:
    run_checks(_without_counts, _layouts)


def test_fp8_is_one_kernel() -> None:
    """Tokens are quantised by the Triton kernel, with the numbers of the torch reference."""
    run_checks(_quantised_by_the_kernel)


def test_inside_lanes() -> None:
    run_checks(_travels_meanwhile, _hook_order, _mark_before_the_hand_off, _one_buffer_for_all_lanes, _buffer_per_chunk)


# ---------------------------------------------------------------------------------------------- outside lanes


def _without_counts(rank: int, group: CommGroup) -> None:
    """Room for the worst case instead of counts: rows behind those that came are NaN, and change nothing."""
    layer = layer_of()
    for name in ("deepep_high_throughput", "deepep_v2"):
        all2all = transport(name, group, worst_case=True)
        assert all2all.traits.capturable
        assert not all2all.traits.blocks_host
        kernel = layer.kernel(all2all)
        for tokens in ((5, 3), (1, 9)):
            routed = tokens_of(layer, tokens[rank], seed=rank, unrouted=0.4)
            with set_forward_context(ForwardContext(tokens_across_ranks=tokens)):
                arrived = all2all.dispatch(routed.x, routed.ids, routed.weights).wait()
                assert isinstance(arrived, Dispatched)
                room = sum(tokens) if name == "deepep_high_throughput" else 2 * {5: 8, 9: 16}[max(tokens)]
                assert arrived.hidden_states.shape[0] == room
                held = arrived.hidden_states.isnan().any(1) == (
                    (arrived.topk_ids - 4 * rank).clamp(-1, 4) % 5 == 4
                ).all(1)
                assert held.all(), "rows that did not come have no expert here"
                home = all2all.combine(torch.zeros_like(arrived.hidden_states), arrived.handle).wait()
                assert home.shape == routed.x.shape
                check_layer(kernel, layer, routed, name)
        check_layer(kernel, layer, routed, f"{name}, nobody voted")


def _layouts(rank: int, group: CommGroup) -> None:
    """What arrives is what DeepEP delivers."""
    layer = layer_of()
    routed = tokens_of(layer, 3 + rank, seed=rank)
    arrived = transport("deepep_low_latency", group, use_fp8=True).dispatch(routed.x, routed.ids, routed.weights).wait()
    assert isinstance(arrived, BatchedDispatch)
    assert arrived.hidden_states.shape == (EXPERTS // 2, 2 * ROOM, HIDDEN)
    assert arrived.hidden_states.dtype is torch.float8_e4m3fn
    assert arrived.scales.shape == (EXPERTS // 2, 2 * ROOM, HIDDEN // 128)
    assert arrived.rows_per_expert.dtype is torch.int32
    check_layer(layer.kernel(transport("deepep_low_latency", group), "reference"), layer, routed, "reference")


# ----------------------------------------------------------------------------------------------- inside lanes


def _travels_meanwhile(rank: int, group: CommGroup) -> None:
    """While lane 0's first dispatch travels, lane 1 computes."""
    for name in BACKENDS:
        wrapper = lanes_of(Stack([layer_of()], transport(name, group)), group, "mlp_shared_overlap")
        with tracing() as trace:
            wrapper(rows_of(7 + 4 * rank, rank))
        transfers = [span for span in trace.spans if span.kind is SpanKind.TRANSFER]
        assert len(transfers) == 2 * 2
        first = next(span for span in transfers if (span.name, span.lane) == ("dispatch", 0))
        others = [span for span in trace.spans if span.kind is SpanKind.COMPUTE and span.lane == 1]
        assert any(first.start <= span.start and span.end <= first.end for span in others), name
        wrapper.close()


def _in_lanes(name: str, group: CommGroup, *, one_buffer: bool, options: Any = None, **changes: Any) -> list[str]:
    """DeepEP's calls for one layer in two lanes, the second time: 'call lane'."""
    schedule = replace(get_schedule("mlp_shared_overlap"), **changes)
    wrapper = lanes_of(Stack([layer_of()], transport(name, group, **(options or {}))), group, schedule)
    wrapper(rows_of(6, 0))
    calls.clear()
    wrapper(rows_of(6, 0))
    assert wrapper.statistics().engaged == 2, wrapper.statistics()
    wrapper.close()
    used = {(lane, buffer) for what, lane, buffer in calls if "hook" not in what and what != "capture"}
    assert len({buffer for _, buffer in used}) == (1 if one_buffer else 2)
    assert len(used) == 2
    return [f"{what.replace('low_latency_', '')} {lane}" for what, lane, _ in calls]


PEER_RECEIVES = [
    *("dispatch 0", "hook of dispatch 1", "dispatch 1"),  # lane 1 receives for lane 0
    *("hook of dispatch 0", "combine 0", "hook of combine 1", "combine 1"),
    "hook of combine 1",
]


def _hook_order(rank: int, group: CommGroup) -> None:
    """Each hook runs once: in the lane that waits, or in the peer before its own next launch."""
    assert _in_lanes("deepep_low_latency", group, one_buffer=False) == [
        *("dispatch 0", "dispatch 1"),
        *("hook of dispatch 0", "combine 0", "hook of dispatch 1", "combine 1"),
        *("hook of combine 0", "hook of combine 1"),
    ]
    assert _in_lanes("deepep_low_latency", group, one_buffer=False, recv=Recv.PEER) == PEER_RECEIVES


def _one_buffer_for_all_lanes(rank: int, group: CommGroup) -> None:
    """Where lanes share a buffer, whoever launches receives first what is still under way."""
    deep_ep_standin.Buffer.shared_by_lanes = True
    try:
        shared = _in_lanes("deepep_low_latency", group, one_buffer=True, options={"share_buffer": True})
        assert shared == PEER_RECEIVES
    finally:
        deep_ep_standin.Buffer.shared_by_lanes = False


def _buffer_per_chunk(rank: int, group: CommGroup) -> None:
    """Of low latency, made once."""
    all2all: Any = transport("deepep_low_latency", group)
    kernel, routed = layer_of().kernel(all2all), tokens_of(layer_of(), 4, seed=rank)
    for chunks in (3, 3, 1):
        alone(group, Schedule("mine", lanes=1, chunks=chunks), lambda: kernel(routed.x, routed.weights, routed.ids))
    assert len(all2all._buffers._buffers) == 3


def _mark_before_the_hand_off(rank: int, group: CommGroup) -> None:
    """What a dispatch waits for is marked before others compute; what its combine waits for, at its launch."""
    for name, layout in (("deepep_high_throughput", True), ("deepep_v2", False)):
        called = _in_lanes(name, group, one_buffer=True, points_off=frozenset())
        assert called == [
            *("capture 0", "capture 1"),
            *(["layout 0"] * layout + ["dispatch 0"] + ["layout 1"] * layout + ["dispatch 1"]),
            *("capture 0", "combine 0", "capture 1", "combine 1"),
        ]


def _quantised_by_the_kernel(rank: int, group: CommGroup) -> None:
    from moe.kernels import quantize

    x = torch.cat([rows_of(5, rank), torch.zeros(1, HIDDEN, dtype=torch.bfloat16)])
    expected, expected_scales = quantize_blocks(x)
    for name in ("deepep_high_throughput", "deepep_v2"):
        with mock.patch.object(quantize, "quantize_rows", wraps=quantize.quantize_rows) as kernel:
            layer = layer_of()
            check_layer(layer.kernel(transport(name, group, use_fp8=True)), layer, tokens_of(layer, 6), name, True)
            assert kernel.call_count == 1, f"{name}: for the dispatch, and for nothing else"
            payload, scales = transport(name, group, use_fp8=True).prepare(x, quantized=True).payload
        assert torch.equal(payload.float(), expected.float())
        torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
        with pytest.raises(ConfigError, match="fp8 needs floating rows of a multiple of 128"):
            transport(name, group, use_fp8=True).prepare(x[:, :100], quantized=True)


# --------------------------------------------------------------------------------------------- without a rank


def test_signatures_are_deepeps() -> None:
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("DeepEP is not installed, so nothing to compare the stand-in's signatures with")
    from deep_ep_standin_buffers import ElasticBuffer

    real = importlib.import_module("deep_ep")
    for standin in (deep_ep_standin.Buffer, ElasticBuffer):
        theirs = getattr(real, standin.__name__, None)
        if theirs is None:
            continue  # a DeepEP before 2 has no ElasticBuffer
        for name in vars(standin):
            if (name.startswith("_") and name != "__init__") or not callable(getattr(standin, name)):
                continue
            expected = inspect.signature(getattr(theirs, name)).parameters
            ours = inspect.signature(getattr(standin, name)).parameters
            defaults = {key: parameter.default for key, parameter in expected.items()}
            assert {key: ours[key].default for key in ours} == defaults, f"{standin.__name__}.{name}"


OVERLAP = get_schedule("mlp_shared_overlap")
EVERY_POINT = replace(OVERLAP, name="every point", points_off=frozenset())


@pytest.mark.slow
def test_what_a_dispatch_would_convert_is_behind_its_mark() -> None:
    run_checks(_converted)


@pytest.mark.slow
def test_what_is_left_out_is_found() -> None:
    run_checks(_planted)


def _run(
    name: str,
    group: CommGroup,
    schedule: Schedule,
    rank: int,
    patch: Any = None,
    router: nn.Module | None = None,
    **options: Any,
) -> FakeCuda:
    """Two steps in lanes, checked; their result must be that of the plain call."""
    model = Stack([layer_of(seed) for seed in (0, 1)], transport(name, group, **options))
    if router is not None:
        model.router = router
    x = rows_of(7 + 2 * rank, rank)
    expected = model(x)
    with patch or nullcontext(), deepep_device() as cuda:
        wrapper = lanes_of(model, group, schedule)
        for _ in range(2):
            result = wrapper(x) * 1
        assert wrapper.statistics().engaged == 2, wrapper.statistics()
        wrapper.close()
    close(result, expected, f"{name}, {schedule.name}")
    assert cuda.deep_ep.clock["deep_ep"] > 0
    return cuda


class _Strided(nn.Module):
    """A router whose ids and weights are strided."""

    def __init__(self) -> None:
        super().__init__()
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, logits: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.t().contiguous().t() for each in self.router(logits))


def _converted(rank: int, group: CommGroup) -> None:
    """Ids where DeepEP was built for 32 bits, and ids and weights that are not contiguous."""
    for name in ("deepep_high_throughput", "deepep_v2"):
        for schedule in (EVERY_POINT, replace(EVERY_POINT, chunks=2)):
            with mock.patch.object(deep_ep_standin, "topk_idx_t", torch.int32):
                _run(name, group, schedule, rank).check(f"{name}, ids of 32 bits, {schedule.chunks} chunks")
            strided = _run(name, group, schedule, rank, router=_Strided())
            strided.check(f"{name}, strided, {schedule.chunks} chunks")


def _planted(rank: int, group: CommGroup) -> None:
    """Each left out in turn, in the real code; and what DeepEP's own marks are for."""

    def planted(target: Any, what: str, instead: Callable[..., Any], schedule: Schedule = OVERLAP) -> FakeCuda:
        patch = mock.patch.object(target, what, instead)
        return _run("deepep_high_throughput", group, schedule, rank, patch=patch, use_fp8=True)

    never_waits = planted(DeepEPStreamed, "after", lambda self, event, order: Queued()).races
    for kernel in ("dispatch", "combine"):
        assert any("on compute reads" in race and f"deep_ep.{kernel}" in race for race in never_waits), never_waits[:3]

    prepare = DeepEPStreamed.prepare

    def marks_too_early(self: DeepEPStreamed, x: Tensor, *, quantized: bool) -> Prepared:
        mark = self.capture()
        return replace(prepare(self, x, quantized=quantized), computed=mark)

    too_early = planted(DeepEPStreamed, "prepare", marks_too_early).races
    assert any("deep_ep.dispatch on deep_ep reads" in race for race in too_early), too_early[:3]

    unmarked = planted(FakeCudaWithDeepEP, "_free", FakeCuda._free, EVERY_POINT)
    assert not unmarked.races
    assert any("freed too early" in each for each in unmarked.lifetimes), unmarked.lifetimes[:3]
