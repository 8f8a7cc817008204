"""Layers in chunks of experts on two gloo ranks: every transport, its bytes, and overlap inside one batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import deepep_cases
import pytest
import torch
from moe_layers import Layer, Routed, make_layer, make_tokens
from only_lane import alone
from torch import Tensor, nn

from moe import EmulatedLink, SoftmaxTopKRouter, make_all2all
from moe.all2all.chunks import blocks_of, only_block
from ranks import run_ranks
from ubatch import (
    CommGroup,
    ConfigError,
    Schedule,
    SharedExpert,
    SpanKind,
    UBatchConfig,
    UBatchWrapper,
)

pytestmark = pytest.mark.ranks

EXPERTS, HIDDEN, TOP_K = 8, 12, 3
BACKENDS: dict[str, dict[str, Any]] = {"torch_dist": {}, "allgather_reducescatter": {}}


def test_results_and_traffic() -> None:
    run_ranks(_check_all, 2, ["results", "traffic", "lanes"])


def test_overlap_inside_one_batch() -> None:
    run_ranks(_check_all, 2, ["one_round_trip_of_counts", "overlap"])


def test_deepep() -> None:
    """Its adapters, over the stand-in."""
    deepep_cases.run_checks(_deepep, _deepep_low_latency)


def _check_all(rank: int, ranks: int, names: list[str]) -> None:
    group = CommGroup.from_process_group(timeout_s=20.0)
    with torch.inference_mode():
        for name in names:
            CHECKS[name](rank, group)


def chunked(chunks: int, own: bool, lanes: int = 1, place: SharedExpert = SharedExpert.COMBINE) -> Schedule:
    name = f"{lanes} lanes x {chunks} chunks, {'own' if own else 'one'} dispatch"
    return Schedule(name, lanes=lanes, chunks=chunks, chunk_dispatch=own, shared_expert=place)


def schedules(lanes: int = 1) -> Iterator[Schedule]:
    for chunks, own in itertools.product((1, 2, 3, 4), (True, False)):
        yield chunked(chunks, own, lanes)


# --------------------------------------------------------------------------------------------- torch's collectives


def _results(rank: int, group: CommGroup) -> None:
    """Uneven and empty ranks, chunks and ranks without tokens, tokens without experts."""
    layer = make_layer(EXPERTS, HIDDEN)
    kernels = {name: layer.kernel(make_all2all(name, group=group, num_experts=EXPERTS)) for name in BACKENDS}
    for tokens in ((5, 3), (0, 4), (0, 0)):
        for only, unrouted in ((range(EXPERTS), 0.0), (range(EXPERTS), 0.5), (range(4, 7), 0.2)):
            routed = make_tokens(layer, tokens[rank], TOP_K, seed=10 + rank, only=only, unrouted=unrouted)
            expected = layer.expected(routed)
            for (name, kernel), schedule in itertools.product(kernels.items(), schedules()):
                actual, _ = alone(
                    group, schedule, lambda kernel=kernel, routed=routed: kernel(routed.x, routed.weights, routed.ids)
                )
                where = f"{name}, {schedule.name}, {tokens} tokens on {only}, {unrouted} unrouted"
                torch.testing.assert_close(actual, expected, msg=lambda text, where=where: f"{where}: {text}")


def _traffic(rank: int, group: CommGroup) -> None:
    """A token travels once, with the first chunk that it visits there, and its result with the last one."""
    layer = make_layer(EXPERTS, HIDDEN)
    all2all = make_all2all("torch_dist", group=group, num_experts=EXPERTS)
    kernel, held, other = layer.kernel(all2all), EXPERTS // 2, 1 - rank
    ids = torch.rand(6, EXPERTS, generator=torch.Generator().manual_seed(3)).topk(TOP_K, dim=1).indices
    ids = (ids + held * rank) % EXPERTS  # what one rank sends is then what it gets
    routed = Routed(torch.randn(6, HIDDEN), ids, torch.full((6, TOP_K), 0.5))
    row, result = HIDDEN * 4 + TOP_K * 8, HIDDEN * 4
    there = ids // held == other
    for chunks in (1, 2, 4):
        blocks = [only_block(ids, block, held) >= 0 for block in blocks_of(held, chunks)]
        visits = torch.stack([(there & block).any(1) for block in blocks])  # [chunks, tokens]
        numbers = range(chunks)
        first = [next((chunk for chunk in numbers if each[chunk]), None) for each in visits.t()]
        last = [next((chunk for chunk in numbers[::-1] if each[chunk]), None) for each in visits.t()]
        goes, comes = ([2 * each.count(chunk) for chunk in numbers] for each in (first, last))  # sent and received
        for own in (True, False):
            _, trace = alone(
                group, chunked(chunks, own), lambda routed=routed: kernel(routed.x, routed.weights, routed.ids)
            )
            sent = [(span.name, span.bytes) for span in trace.spans if span.kind is SpanKind.TRANSFER]
            dispatched = [rows * row for rows in (goes if own else [sum(goes)])]
            assert sorted(size for name, size in sent if name == "dispatch") == sorted(dispatched), (chunks, own)
            assert sorted(size for name, size in sent if name == "combine") == sorted(rows * result for rows in comes)


class Stack(nn.Module):
    def __init__(self, layers: list[Layer], all2all: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(HIDDEN, HIDDEN)
        self.kernels = nn.ModuleList(layer.kernel(all2all, shared_experts=shared) for layer in layers)
        self.router = SoftmaxTopKRouter(TOP_K)

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            weights, ids = self.router(x[:, :EXPERTS])
            x = x + kernel(x, weights, ids)
        return x


def _lanes(rank: int, group: CommGroup) -> None:
    """Lanes and chunks at once, with an idle rank too; in every combination what the plain call gives."""
    layers = [make_layer(EXPERTS, HIDDEN, seed=seed) for seed in (0, 1)]
    for name, options in {**BACKENDS, "emulated_link": {"link": EmulatedLink(1e-5, 1e9)}}.items():
        model = Stack(layers, make_all2all(name, group=group, num_experts=EXPERTS, **options))
        for tokens in ((6, 9), (0, 7)):
            x = torch.randn(tokens[rank], HIDDEN)
            expected = model(x)
            for lanes, place in ((2, SharedExpert.DISPATCH), (3, SharedExpert.COMBINE_RETURN)):
                for chunks, own in ((2, True), (3, False)):
                    schedule = chunked(chunks, own, lanes, place)
                    config = UBatchConfig(
                        verify="off",
                        group=group,
                        schedule=schedule,
                        num_ubatches=lanes,
                        dbo_prefill_token_threshold=lanes,
                        timeout_s=20.0,
                    )
                    wrapper = UBatchWrapper(model, config)
                    actual = wrapper(x)
                    assert wrapper.statistics().engaged == 1, wrapper.statistics()
                    torch.testing.assert_close(actual, expected, msg=lambda text, s=schedule: f"{s.name}: {text}")
                    wrapper.close()


def _one_round_trip_of_counts(rank: int, group: CommGroup) -> None:
    """However many chunks, the host waits for counts once a layer."""
    layer = make_layer(EXPERTS, HIDDEN)
    kernel = layer.kernel(make_all2all("torch_dist", group=group, num_experts=EXPERTS))
    routed = make_tokens(layer, 6, TOP_K, seed=rank)
    for schedule in schedules():
        _, trace = alone(group, schedule, lambda: kernel(routed.x, routed.weights, routed.ids))
        waits = [event.name for event in trace.events if event.kind == "wait" and "counts" in event.name]
        assert len(waits) == 1, f"{schedule.name}: {waits}"


class _Sleeping(nn.Module):
    """Experts and shared expert that take their time, but no CPU."""

    def __init__(self, module: nn.Module, seconds: float) -> None:
        super().__init__()
        self.module, self.seconds = module, seconds
        self.expert_range = getattr(module, "expert_range", None)

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        time.sleep(self.seconds)
        output: Tensor = self.module(x, *args)
        return output


def _overlap(rank: int, group: CommGroup) -> None:
    """One lane: every chunk's transfer but the first dispatch and the last combine travels while something computes."""
    layer = make_layer(EXPERTS, HIDDEN)
    link = EmulatedLink(0.05, 1e9)
    kernel = layer.kernel(make_all2all("emulated_link", group=group, num_experts=EXPERTS, link=link))
    kernel.experts, kernel.shared_experts = _Sleeping(kernel.experts, 0.06), _Sleeping(nn.Identity(), 0.06)
    routed = make_tokens(layer, 6, TOP_K, seed=rank)

    def exposed(schedule: Schedule) -> float:
        """Seconds waited for the link, of the best of some tries: the machine may be busy."""
        tries = []
        for _ in range(3):
            _, trace = alone(group, schedule, lambda: kernel(routed.x, routed.weights, routed.ids))
            waits = [span for span in trace.spans if span.kind is SpanKind.WAIT and "counts" not in span.name]
            tries.append(sum(span.end - span.start for span in waits))
        return min(tries)

    # Four transfers of 50 ms. The first dispatch is waited for. The second one arrives while the first chunk computes,
    # the first combine while the second chunk does, the second combine during the shared expert.
    assert exposed(chunked(2, True)) < 0.09
    # During the first dispatch instead: then the last combine is waited for.
    assert exposed(chunked(2, True, place=SharedExpert.DISPATCH)) < 0.09


# ---------------------------------------------------------------------------------------------------------- DeepEP


def _deepep(rank: int, group: CommGroup) -> None:
    layer = deepep_cases.layer_of()
    for name in deepep_cases.BACKENDS:
        all2all = deepep_cases.transport(name, group)
        kernel = layer.kernel(all2all)
        for tokens, unrouted in (((5, 3), 0.0), ((0, 4), 0.5)):
            routed = deepep_cases.tokens_of(layer, tokens[rank], seed=rank, unrouted=unrouted)
            expected = Layer(layer.w13.float(), layer.w2.float()).expected(
                Routed(routed.x.float(), routed.ids, routed.weights)
            )
            for schedule in schedules():
                what = f"{name}, {schedule.name}, {tokens} tokens"
                if schedule.chunks > 1 and not schedule.chunk_dispatch and name == "deepep_low_latency":
                    continue
                actual, _ = alone(
                    group, schedule, lambda kernel=kernel, routed=routed: kernel(routed.x, routed.weights, routed.ids)
                )
                deepep_cases.close(actual, expected, what)


def _deepep_low_latency(rank: int, group: CommGroup) -> None:
    """A buffer per chunk, made once; a dispatch for all chunks, or one buffer for all, is refused."""
    layer = deepep_cases.layer_of()
    routed = deepep_cases.tokens_of(layer, 4, seed=rank)

    def run(all2all: Any, schedule: Schedule) -> None:
        kernel = layer.kernel(all2all)
        alone(group, schedule, lambda: kernel(routed.x, routed.weights, routed.ids))

    all2all: Any = deepep_cases.transport("deepep_low_latency", group)
    for _ in range(2):
        run(all2all, chunked(3, True))
    run(all2all, chunked(1, True))
    assert len(all2all._buffers) == 3
    with pytest.raises(ConfigError, match="cannot have two combines of one dispatch under way"):
        run(all2all, chunked(2, False))
    with pytest.raises(ConfigError, match=r"has 2 chunks, but .* serves 1"):
        run(deepep_cases.transport("deepep_low_latency", group, share_buffer=True), chunked(2, True))


CHECKS: dict[str, Callable[[int, CommGroup], None]] = {
    "results": _results,
    "traffic": _traffic,
    "lanes": _lanes,
    "one_round_trip_of_counts": _one_round_trip_of_counts,
    "overlap": _overlap,
}
