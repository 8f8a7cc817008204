"""Single-batch overlap over `torch_dist`: what blocks of experts have completed goes home during the next ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import deepep_cases
import pytest
import torch
from moe_layers import Layer, make_layer, make_tokens
from only_lane import alone
from torch import Tensor, nn

from moe import EmulatedLink, FusedMoEModularKernel, SoftmaxTopKRouter, make_all2all, make_experts
from moe.experts.grouped import GroupedExperts, RowPlan
from ranks import run_ranks
from ubatch import (
    CommGroup,
    ConfigError,
    Schedule,
    SpanKind,
    UBatchConfig,
    UBatchWrapper,
    get_schedule,
    tracing,
)

EXPERTS, HIDDEN, TOP_K = 8, 12, 3
SIGNALLED, CHUNKS, SERIAL = (get_schedule(name) for name in ("single_batch_signalled", "single_batch", "serial"))
LANES = replace(get_schedule("mlp_shared_overlap"), name="lanes", signalled=True)


def test_results_and_traffic() -> None:
    run_ranks(_check_all, 2, ["results", "traffic", "lanes"])


@pytest.mark.slow
def test_three_ranks() -> None:
    """A token's sum is in the order of the ranks, with whichever block each of them sends it."""
    run_ranks(_check_all, 3, ["results", "lanes"])


@pytest.mark.slow
def test_it_overlaps_and_is_no_slower_than_two_chunks() -> None:
    """Over an emulated link that is busy as long as the experts are."""
    run_ranks(_check_all, 2, ["speed"])


def test_who_cannot_is_refused_by_name() -> None:
    run_ranks(_check_all, 2, ["refused"])
    deepep_cases.run_checks(_deepep_refused)


def _check_all(rank: int, ranks: int, names: list[str]) -> None:
    group = CommGroup.from_process_group(timeout_s=20.0)
    with torch.inference_mode():
        for name in names:
            CHECKS[name](rank, group)


def transports(group: CommGroup, experts: int) -> Iterator[tuple[str, Any]]:
    for name, options in {"torch_dist": {}, "emulated_link": {"link": EmulatedLink(1e-5, 1e9)}}.items():
        yield name, make_all2all(name, group=group, num_experts=experts, **options)


def _results(rank: int, group: CommGroup) -> None:
    """Uneven and empty ranks, ranks, blocks and tokens without experts; more experts than blocks; all CPU experts."""
    for held in (4, 11):
        layer = make_layer(held * group.size, HIDDEN)
        for experts in ("grouped", "packed", "native"):
            for name, all2all in transports(group, layer.num_experts):
                kernel = layer.kernel(all2all, experts)
                for tokens in ((5, 3, 1), (0, 4, 0), (0, 0, 0)):
                    for only, unrouted in ((None, 0.0), (None, 0.5), (range(held - 2, held + 2), 0.2)):
                        routed = make_tokens(layer, tokens[rank], TOP_K, 10 + rank, only, unrouted)
                        given = routed.x, routed.weights, routed.ids
                        actual, _ = alone(group, SIGNALLED, lambda k=kernel, g=given: k(*g))
                        expected, _ = alone(group, SERIAL, lambda k=kernel, g=given: k(*g))
                        what = f"{held} {experts}, {name}, {tokens} tokens on {only}, {unrouted} unrouted"
                        if experts == "grouped":
                            assert torch.equal(actual, expected), what
                        torch.testing.assert_close(
                            actual, layer.expected(routed), msg=lambda text, w=what: f"{w}: {text}"
                        )


def _traffic(rank: int, group: CommGroup) -> None:
    """A combine for each of eight blocks at most, together the bytes of one; counts are waited for once."""
    for held, blocks in ((4, 4), (16, 8)):
        layer = make_layer(held * 2, HIDDEN)
        kernel = layer.kernel(make_all2all("torch_dist", group=group, num_experts=layer.num_experts))
        routed = make_tokens(layer, 40, TOP_K, seed=rank)
        sent: dict[str, list[int]] = {}
        for schedule in (SIGNALLED, SERIAL):
            _, trace = alone(group, schedule, lambda k=kernel, r=routed: k(r.x, r.weights, r.ids))
            carried = [span for span in trace.spans if span.kind is SpanKind.TRANSFER]
            sent[schedule.name] = [span.bytes for span in carried if span.name == "combine"]
            waits = [event.name for event in trace.events if event.kind == "wait" and "counts" in event.name]
            assert len(waits) == 1, waits
        assert (len(sent[SIGNALLED.name]), len(sent[SERIAL.name])) == (blocks, 1)
        assert sum(sent[SIGNALLED.name]) == sum(sent[SERIAL.name])
        assert max(sent[SIGNALLED.name]) < 0.6 * sum(sent[SERIAL.name])


class Stack(nn.Module):
    def __init__(self, layers: list[Layer], all2all: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Linear(HIDDEN, HIDDEN)
        self.kernels = nn.ModuleList(layer.kernel(all2all, shared_experts=shared) for layer in layers)
        self.router = SoftmaxTopKRouter(TOP_K)
        self.num_experts = all2all.num_experts

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            weights, ids = self.router(x[:, : self.num_experts])
            x = x + kernel(x, weights, ids)
        return x


@contextmanager
def wrapped(model: nn.Module, group: CommGroup, schedule: Schedule) -> Iterator[UBatchWrapper]:
    config = UBatchConfig(
        verify="off",
        group=group,
        schedule=schedule,
        num_ubatches=max(schedule.lanes, 2),
        dbo_prefill_token_threshold=3,
        timeout_s=20.0,
    )
    with closing(UBatchWrapper(model, config)) as wrapper:
        yield wrapper


def _lanes(rank: int, group: CommGroup) -> None:
    """In one lane and in several, with an idle rank too, what the plain call gives."""
    experts = 3 * group.size
    layers = [make_layer(experts, HIDDEN, seed=seed) for seed in (0, 1)]
    for name, all2all in transports(group, experts):
        model = Stack(layers, all2all)
        for tokens in ((6, 9, 7), (0, 7, 8)):
            x = torch.randn(tokens[rank], HIDDEN)
            expected = model(x)
            for schedule in (SIGNALLED, LANES, replace(LANES, lanes=3, name="three lanes")):
                with wrapped(model, group, schedule) as wrapper:
                    torch.testing.assert_close(wrapper(x), expected, msg=lambda text, s=schedule: f"{s.name}: {text}")
                    statistics = wrapper.statistics()
                    assert statistics.engaged + statistics.engaged_single == 1, (name, schedule.name, statistics)


class Timed(GroupedExperts):
    """Experts that take their time, but no CPU; and when the last of them was done."""

    SECONDS = 0.02
    ended = 0.0

    def _run_experts(self, hidden_states: Tensor, plan: RowPlan, slots: range) -> Tensor:
        time.sleep(self.SECONDS * sum(plan.rows_per_expert[slot] > 0 for slot in slots))
        results = super()._run_experts(hidden_states, plan, slots)
        self.ended = time.monotonic()
        return results


def _speed(rank: int, group: CommGroup) -> None:
    layer = make_layer(32, 64)
    routed = make_tokens(layer, 400, 4, seed=rank)
    compute_s = 16 * Timed.SECONDS
    link = EmulatedLink(2e-5, 1e9)
    all2all = make_all2all("emulated_link", group=group, num_experts=32, link=link)
    held = all2all.experts
    experts = Timed(layer.w13[held.start : held.stop], layer.w2[held.start : held.stop], held.start)
    kernel = FusedMoEModularKernel(all2all, experts)

    def run() -> Tensor:
        return kernel(routed.x, routed.weights, routed.ids)

    expected, _ = alone(group, SERIAL, run)
    link.bytes_per_s = link.statistics().bytes_sent / compute_s
    link.reset_statistics()
    seconds: dict[str, list[float]] = {schedule.name: [] for schedule in (SIGNALLED, CHUNKS, SERIAL)}
    for _ in range(4):
        for schedule in (SIGNALLED, CHUNKS, SERIAL):
            torch.distributed.barrier(group.pg)
            begun = time.perf_counter()
            actual, trace = alone(group, schedule, run)
            seconds[schedule.name].append(time.perf_counter() - begun)
            torch.testing.assert_close(actual, expected)
            if schedule is SIGNALLED:
                combines = [span for span in trace.spans if span.kind is SpanKind.TRANSFER and span.name == "combine"]
                assert len(combines) == 8
                hidden = [max(0.0, min(span.end, experts.ended) - span.start) for span in combines]
                assert sum(hidden) > 0.3 * sum(span.end - span.start for span in combines), "nothing was hidden"
    # Undisturbed: 1.65, 1.74 and 2 times the experts' time. A machine that is busy only adds to it.
    signalled, chunks, serial = (min(seconds[each.name]) for each in (SIGNALLED, CHUNKS, SERIAL))
    assert signalled < 1.02 * chunks, seconds
    assert signalled < 0.9 * serial, seconds


def _refused(rank: int, group: CommGroup) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    layer = make_layer(EXPERTS, HIDDEN)
    routed = make_tokens(layer, 6, TOP_K)
    dist = make_all2all("torch_dist", group=group, num_experts=EXPERTS)
    gathered = make_all2all("allgather_reducescatter", group=group, num_experts=EXPERTS)
    for kernel, schedule, why in (
        (
            layer.kernel(dist),
            replace(SIGNALLED, chunks=2),
            "by blocks of experts of one dispatch, not of 2. Set chunks",
        ),
        (
            layer.kernel(dist, "triton"),
            SIGNALLED,
            "TritonExperts run all at once .* Use experts 'grouped', or .* chunks",
        ),
        (layer.kernel(gathered), SIGNALLED, "AllGatherReduceScatterAll2All cannot do: .* such as 'single_batch', or"),
    ):
        with tracing() as trace, pytest.raises(ConfigError, match=why):
            alone(group, schedule, lambda k=kernel: k(routed.x, routed.weights, routed.ids))
        assert not [event for event in trace.events if event.kind == "launch"]


def _deepep_refused(rank: int, group: CommGroup) -> None:
    layer = deepep_cases.layer_of()
    routed = deepep_cases.tokens_of(layer, 4, seed=rank)
    for name in (*deepep_cases.BACKENDS, "deepep_auto"):
        kernel = layer.kernel(deepep_cases.transport(name, group))
        with pytest.raises(ConfigError, match=r"DeepEP\w+All2All cannot do: .* Use a schedule in chunks"):
            alone(group, SIGNALLED, lambda k=kernel: k(routed.x, routed.weights, routed.ids))


CHECKS: dict[str, Callable[[int, CommGroup], None]] = {
    "results": _results,
    "traffic": _traffic,
    "lanes": _lanes,
    "speed": _speed,
    "refused": _refused,
}


# ------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("experts", ["grouped", "packed", "native"])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 3, 6), (0, 1, 2, 3, 4, 5, 6)], ids=len)
def test_every_row_comes_with_its_last_expert(experts: str, cuts: tuple[int, ...]) -> None:
    layer = make_layer(6, HIDDEN)
    held: Any = make_experts(experts, layer.w13, layer.w2, first_expert=2)
    blocks = [range(start, stop) for start, stop in pairwise(cuts)]
    for tokens, only, unrouted in ((9, None, 0.0), (9, None, 0.6), (4, range(1), 0.0), (3, None, 1.0), (0, None, 0.0)):
        routed = make_tokens(layer, tokens, 2 if only is None else 1, only=only, unrouted=unrouted)
        ids = torch.where(routed.ids >= 0, routed.ids + 1, -1)  # one more below, one fewer above
        slots = torch.where((ids >= 2) & (ids < 8), ids - 2, -1)
        last = [
            max([0, *(number for number, block in enumerate(blocks) for s in row if s in block)])
            for row in slots.tolist()
        ]
        whole = held(routed.x, ids, routed.weights)
        parts = list(held.run_blocks(routed.x, ids, routed.weights, blocks))
        assert len(parts) == len(blocks)
        for number, part in enumerate(parts):
            rows = [row for row, block in enumerate(last) if block == number]
            torch.testing.assert_close(part, whole[rows])


def test_a_block_is_computed_when_it_is_asked_for() -> None:
    layer = make_layer(4, HIDDEN)
    routed = make_tokens(layer, 30)
    experts: Any = make_experts("grouped", layer.w13, layer.w2)
    with mock.patch.object(experts, "run_expert", wraps=experts.run_expert) as run:
        blocks = experts.run_blocks(routed.x, routed.ids, routed.weights, [range(0, 1), range(1, 4)])
        counts = []
        for _ in blocks:
            counts.append(run.call_count)
    assert counts == [1, 4]
