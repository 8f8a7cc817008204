"""Expert parallelism on two gloo ranks: every rank's tokens against the plain loop over all experts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_layers import Layer, Routed, make_layer, make_tokens
from torch import Tensor, nn

from moe import EmulatedLink, SoftmaxTopKRouter, local_experts, make_all2all, mask_padding
from ranks import run_ranks
from ubatch import (
    CommGroup,
    ConfigError,
    ForwardContext,
    ForwardMode,
    GradientError,
    SpanKind,
    Trace,
    UBatchConfig,
    UBatchWrapper,
    get_schedule,
    interleave,
    set_forward_context,
    tracing,
)

pytestmark = pytest.mark.ranks

BACKENDS = ["torch_dist", "allgather_reducescatter"]
EXPERTS, HIDDEN, TOP_K = 8, 12, 2


def test_results_and_traffic() -> None:
    run_ranks(_check_all, 2, ["results", "nan", "traffic", "known_sizes", "sent_to_all", "dtypes", "refusals"])


def test_inside_lanes() -> None:
    run_ranks(_check_all, 2, ["lanes", "idle_rank", "emulated_link"])


def _check_all(rank: int, ranks: int, names: list[str]) -> None:
    group = CommGroup.from_process_group(timeout_s=20.0)
    with torch.inference_mode():
        for name in names:
            CHECKS[name](rank, group)


# ---------------------------------------------------------------------------------------------- outside lanes


def _results(rank: int, group: CommGroup) -> None:
    """Uneven and empty ranks, experts and ranks without tokens, tokens without experts."""
    layer = make_layer(EXPERTS, HIDDEN)
    kernels = {name: layer.kernel(make_all2all(name, group=group, num_experts=EXPERTS)) for name in BACKENDS}
    loads = [(5, 3), (0, 4), (4, 0), (0, 0), (1, 6)]
    visited = [range(EXPERTS), local_experts(EXPERTS, 0, 2), local_experts(EXPERTS, 1, 2), range(3, 5)]
    for tokens in loads:
        for only in visited:
            for unrouted in (0.0, 0.5, 1.0):
                routed = make_tokens(layer, tokens[rank], TOP_K, seed=10 + rank, only=only, unrouted=unrouted)
                expected = layer.expected(routed)
                for name, kernel in kernels.items():
                    actual = kernel(routed.x, routed.weights, routed.ids)
                    where = f"{name}, {tokens} tokens on {only}, {unrouted} unrouted"
                    torch.testing.assert_close(actual, expected, msg=lambda text, where=where: f"{where}: {text}")


def _nan(rank: int, group: CommGroup) -> None:
    """A token without numbers on one rank, and padding that holds none, change no bit of any other token."""
    layer = make_layer(EXPERTS, HIDDEN)
    routed = make_tokens(layer, 6, TOP_K, seed=10 + rank)
    ids = routed.ids.clone()
    ids[5] = -1
    x = routed.x.clone()
    x[[0, 5] if rank else [5]] = float("nan")
    for name in BACKENDS:
        kernel = layer.kernel(make_all2all(name, group=group, num_experts=EXPERTS))
        clean = kernel(routed.x, routed.weights, ids)
        assert torch.equal(kernel(x, routed.weights, ids)[1:], clean[1:]), name
        assert torch.equal(clean[5], torch.zeros(HIDDEN)), name


def _traffic(rank: int, group: CommGroup) -> None:
    """What crosses the link: each token once per rank, nothing for padding; one row per visit comes back."""
    layer = make_layer(EXPERTS, HIDDEN)
    other = local_experts(EXPERTS, 1 - rank, 2)
    own = local_experts(EXPERTS, rank, 2)
    ids = torch.tensor([[other[0], other[1]], [own[0], other[3]], [own[1], own[2]], [other[0], other[2]]])
    ids = mask_padding(ids, 3)
    routed = Routed(torch.randn(4, HIDDEN), ids, torch.full((4, TOP_K), 0.5))
    row, result = HIDDEN * 4 + TOP_K * 8, HIDDEN * 4
    assert _sent(layer, "torch_dist", group, routed) == {
        "dispatch": 4 * row,
        "combine": 4 * result,
    }
    nowhere = Routed(routed.x, mask_padding(ids, 0), routed.weights)
    assert _sent(layer, "torch_dist", group, nowhere) == {"dispatch": 0, "combine": 0}
    everywhere = {"dispatch": 8 * row, "combine": 8 * result}
    assert _sent(layer, "allgather_reducescatter", group, routed) == everywhere


def _sent(layer: Layer, name: str, group: CommGroup, routed: Routed) -> dict[str, int]:
    """Bytes sent and received by every payload of one layer; both ranks have equal loads."""
    kernel = layer.kernel(make_all2all(name, group=group, num_experts=EXPERTS))
    with tracing() as trace:
        kernel(routed.x, routed.weights, routed.ids)
    return {span.name: span.bytes for span in trace.spans if span.kind is SpanKind.TRANSFER}


def _exchanged_counts(trace: Trace) -> bool:
    """Whether the host waited for token counts."""
    return any(span.name == "dispatch_counts" for span in trace.spans)


def _known_sizes(rank: int, group: CommGroup) -> None:
    """Token counts from the vote spare the exchange; what does not fit them is refused, padding is left at home."""
    layer = make_layer(EXPERTS, HIDDEN)
    kernel = layer.kernel(make_all2all("allgather_reducescatter", group=group, num_experts=EXPERTS))
    routed = make_tokens(layer, 3 + rank, TOP_K, seed=rank)
    with tracing() as trace, set_forward_context(ForwardContext(tokens_across_ranks=(3, 4))):
        actual = kernel(routed.x, routed.weights, routed.ids)
    torch.testing.assert_close(actual, layer.expected(routed))
    assert not _exchanged_counts(trace)

    padded = Routed(routed.x, mask_padding(routed.ids, 2 + rank), routed.weights)
    with set_forward_context(ForwardContext(tokens_across_ranks=(2, 3))):
        torch.testing.assert_close(kernel(padded.x, padded.weights, padded.ids), layer.expected(padded))
        with pytest.raises(ConfigError, match=f"voted on {2 + rank} tokens for rank {rank}, .* got {3 + rank}"):
            kernel(routed.x, routed.weights, routed.ids)
    larger_group, cannot_tell = (3, 4, 5), (0, 4)  # neither says how many tokens each rank of this group has
    for counts in (larger_group, cannot_tell):
        with set_forward_context(ForwardContext(tokens_across_ranks=counts)), tracing() as trace:
            torch.testing.assert_close(kernel(routed.x, routed.weights, routed.ids), layer.expected(routed))
        assert _exchanged_counts(trace)


def _sent_to_all(rank: int, group: CommGroup) -> None:
    """In decode steps a few tokens travel without counts, with the same results; more of them only where needed."""
    layer = make_layer(EXPERTS, HIDDEN)
    kernel = layer.kernel(make_all2all("torch_dist", group=group, num_experts=EXPERTS))
    modes = {ForwardMode.DECODE: False, ForwardMode.TARGET_VERIFY: False, ForwardMode.PREFILL: True, None: True}
    for tokens in ((3, 4), (4, 4)):
        routed = make_tokens(layer, tokens[rank], TOP_K, seed=rank, unrouted=0.3)
        expected = kernel(routed.x, routed.weights, routed.ids)
        for mode, counts in modes.items():
            context = ForwardContext(tokens_across_ranks=tokens, global_mode=mode)
            with tracing() as trace, set_forward_context(context):
                assert torch.equal(kernel(routed.x, routed.weights, routed.ids), expected), mode
            assert _exchanged_counts(trace) is counts, mode

    decode = ForwardContext(tokens_across_ranks=(2, 3), global_mode=ForwardMode.DECODE)
    padded = make_tokens(layer, 3 + rank, TOP_K, seed=rank)
    ids = mask_padding(padded.ids, 2 + rank)
    with set_forward_context(decode):
        actual = kernel(padded.x, padded.weights, ids)
        torch.testing.assert_close(actual, layer.expected(Routed(padded.x, ids, padded.weights)))
        with pytest.raises(ConfigError, match=f"voted on {2 + rank} tokens for rank {rank}, .* got {3 + rank}"):
            kernel(padded.x, padded.weights, padded.ids)

    many = make_tokens(layer, 1200, TOP_K, seed=rank)
    context = ForwardContext(tokens_across_ranks=(1200, 1200), global_mode=ForwardMode.DECODE)
    with tracing() as trace, set_forward_context(context):
        torch.testing.assert_close(kernel(many.x, many.weights, many.ids), layer.expected(many))
    assert _exchanged_counts(trace)


def _dtypes(rank: int, group: CommGroup) -> None:
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.bfloat16, 5e-2)):
        layer = make_layer(4, 7, dtype=dtype)  # an odd width: rows are not aligned
        routed = make_tokens(layer, 3 + rank, 3, seed=rank)
        for name in BACKENDS:
            kernel = layer.kernel(make_all2all(name, group=group, num_experts=4))
            actual = kernel(routed.x, routed.weights, routed.ids)
            torch.testing.assert_close(actual, layer.expected(routed), atol=tolerance, rtol=tolerance)


def _refusals(rank: int, group: CommGroup) -> None:
    """Before anything is launched, so both ranks can go on."""
    layer = make_layer(EXPERTS, HIDDEN)
    routed = make_tokens(layer, 2, TOP_K)
    for name in BACKENDS:
        with pytest.raises(ConfigError, match="7 experts do not divide by 2 ranks"):
            make_all2all(name, group=group, num_experts=7)
        all2all = make_all2all(name, group=group, num_experts=EXPERTS)
        assert all2all.traits.is_async
        with torch.inference_mode(False), torch.enable_grad():
            x = torch.randn(2, HIDDEN, requires_grad=True)
            with pytest.raises(GradientError, match=f"'{name}' got a tensor that requires grad"):
                layer.kernel(all2all)(x, torch.ones(2, TOP_K), torch.zeros(2, TOP_K, dtype=torch.int64))
        with pytest.raises(ConfigError, match=r"int64 ids, not torch\.float32, torch\.float32 and torch\.int32"):
            all2all.dispatch(routed.x, routed.ids.int(), routed.weights)
    with pytest.raises(ConfigError, match="'local' holds all experts on one rank"):
        make_all2all("local", group=group, num_experts=EXPERTS)


# ----------------------------------------------------------------------------------------------- inside lanes


class Stack(nn.Module):
    """Residual MoE layers with routers of their own, and the same from the plain loop."""

    def __init__(self, layers: list[Layer], all2all: Any, shared: bool = False) -> None:
        super().__init__()
        self.layers = layers
        self.shared = nn.Linear(HIDDEN, HIDDEN) if shared else None
        self.kernels = nn.ModuleList(layer.kernel(all2all, shared_experts=self.shared) for layer in layers)
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            weights, ids = self.router(x[:, :EXPERTS])
            x = x + kernel(x, weights, ids)
        return x

    def expected(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weights, ids = self.router(x[:, :EXPERTS])
            y = layer.expected(Routed(x, ids, weights))
            x = x + (y if self.shared is None else y + self.shared(x))
        return x


def _wrap(model: nn.Module, group: CommGroup, schedule: str, lanes: int) -> UBatchWrapper:
    return UBatchWrapper(
        model,
        UBatchConfig(
            verify="off",
            group=group,
            schedule=schedule,
            num_ubatches=lanes,
            dbo_prefill_token_threshold=lanes,
            timeout_s=20.0,
        ),
    )


def _lanes(rank: int, group: CommGroup) -> None:
    """Different token counts on each rank, every schedule, two and three lanes; overlap engages."""
    torch.manual_seed(0)  # the shared expert is the same on both ranks
    layers = [make_layer(EXPERTS, HIDDEN, seed=seed) for seed in (0, 1)]
    for name in BACKENDS:
        model = Stack(layers, make_all2all(name, group=group, num_experts=EXPERTS), shared=True)
        x = torch.randn(7 + 4 * rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
        for schedule, lanes in (("mlp_shared_overlap", 2), ("two_batch_prefill", 3), ("two_batch_decode", 2)):
            wrapper = _wrap(model, group, schedule, lanes)
            with tracing() as trace:
                actual = wrapper(x)
            torch.testing.assert_close(actual, model.expected(x))
            assert wrapper.statistics().engaged == 1, wrapper.statistics()
            chosen = get_schedule(schedule)
            points = [p for _ in layers for p in ("select", "dispatch", "combine", "output") if chosen.active(p)]
            assert trace.order == interleave([points] * lanes, lead=chosen.lead)
            assert _exchanged_counts(trace) is (name == "torch_dist"), "the others know the sizes from the vote"
            wrapper.close()


def _idle_rank(rank: int, group: CommGroup) -> None:
    """A rank without tokens passes every collective of every lane."""
    layers = [make_layer(EXPERTS, HIDDEN, seed=seed) for seed in (0, 1)]
    for name in BACKENDS:
        model = Stack(layers, make_all2all(name, group=group, num_experts=EXPERTS))
        wrapper = _wrap(model, group, "mlp_shared_overlap", 2)
        x = torch.randn(6 * rank, HIDDEN)
        torch.testing.assert_close(wrapper(x), model.expected(x))
        assert wrapper.statistics().engaged == 1, wrapper.statistics()
        wrapper.close()


def _emulated_link(rank: int, group: CommGroup) -> None:
    """The answer is the inner back end's, the link carries every payload, and nothing arrives early."""
    layers = [make_layer(EXPERTS, HIDDEN, seed=seed) for seed in (0, 1)]
    for inner in BACKENDS:
        link = EmulatedLink(2e-3, 1e6)
        all2all = make_all2all("emulated_link", group=group, num_experts=EXPERTS, link=link, inner=inner)
        model = Stack(layers, all2all)
        wrapper = _wrap(model, group, "mlp_shared_overlap", 2)
        x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(rank))
        with tracing() as trace:
            torch.testing.assert_close(wrapper(x), model.expected(x))
        assert wrapper.statistics().engaged == 1, wrapper.statistics()
        counts = [s.end - s.start for s in trace.spans if s.name == "dispatch_counts" and s.kind is SpanKind.WAIT]
        assert len(counts) == (2 * len(layers) if inner == "torch_dist" else 0)
        payloads = [s for s in trace.spans if s.kind is SpanKind.TRANSFER and s.name in ("dispatch", "combine")]
        carried = link.statistics()
        assert carried.transfers == len(payloads) == 2 * 2 * len(layers)
        assert carried.bytes_sent + carried.bytes_received == sum(span.bytes for span in payloads)
        waits = [s for s in trace.spans if s.kind is SpanKind.WAIT]
        for span in payloads:
            assert span.end - span.start >= 2e-3
            assert any(s.end >= span.end and s.lane == span.lane and s.name == span.name for s in waits)
        wrapper.close()
        slow = EmulatedLink(0.1, float("inf"))  # no vote here: either back end's host waits for counts
        all2all = make_all2all("emulated_link", group=group, num_experts=EXPERTS, link=slow, inner=inner)
        routed = make_tokens(layers[0], 2, TOP_K, seed=rank)
        launched = time.monotonic()
        dispatch = all2all.dispatch(routed.x, routed.ids, routed.weights)
        assert time.monotonic() - launched >= 0.1, "counts take the latency"
        dispatched = dispatch.wait()
        assert time.monotonic() - launched >= 0.2, "and so does the payload, after them"
        all2all.combine(dispatched.hidden_states.contiguous(), dispatched.handle).wait()


CHECKS: dict[str, Callable[[int, CommGroup], None]] = {
    "results": _results,
    "nan": _nan,
    "traffic": _traffic,
    "known_sizes": _known_sizes,
    "sent_to_all": _sent_to_all,
    "dtypes": _dtypes,
    "refusals": _refusals,
    "lanes": _lanes,
    "idle_rank": _idle_rank,
    "emulated_link": _emulated_link,
}
