"""Over two gloo ranks: what `torch_dist` and `allgather_reducescatter` send, whole, in chunks and in blocks, and when.

That results are right is in `test_all2all_conformance`.
"""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from lanes import alone
from moe_layers import Layer, Routed, Stack, lanes_of, make_layer, make_tokens, run_checks
from torch import Tensor, nn

from moe import EmulatedLink, FusedMoEModularKernel, local_experts, make_all2all, mask_padding
from moe.all2all.layouts import blocks_of, only_block
from moe.experts.torch_experts import GroupedExperts, RowPlan
from ubatch import (
    CommGroup,
    ConfigError,
    ForwardContext,
    ForwardMode,
    Schedule,
    SharedExpert,
    SpanKind,
    Trace,
    get_schedule,
    set_forward_context,
    tracing,
)

pytestmark = pytest.mark.ranks

BACKENDS = ["torch_dist", "allgather_reducescatter"]
EXPERTS, HIDDEN, TOP_K = 8, 12, 2
SIGNALLED, CHUNKS, SERIAL = (get_schedule(name) for name in ("single_batch_signalled", "single_batch", "serial"))


def test_traffic() -> None:
    run_checks(_traffic, _known_sizes, _sent_to_all, _traffic_of_chunks, _one_round_trip_of_counts, _traffic_of_blocks)


def test_an_emulated_link() -> None:
    run_checks(_emulated_link, _overlap)


def test_a_signalled_schedule_that_is_not_served() -> None:
    run_checks(_refused)


@pytest.mark.slow
def test_three_ranks_in_blocks() -> None:
    """A token's sum is in the order of the ranks, with whichever block each of them sends it."""
    run_checks(_bits_of_blocks, ranks=3)


@pytest.mark.slow
def test_blocks_overlap_and_are_no_slower_than_two_chunks() -> None:
    """Over an emulated link that is busy as long as the experts are."""
    run_checks(_speed_of_blocks)


def _traffic(rank: int, group: CommGroup) -> None:
    """What crosses the link: each token once per rank, nothing for padding; one row per visit comes back."""
    layer = make_layer(EXPERTS, HIDDEN)
    other = local_experts(EXPERTS, 1 - rank, 2)
    own = local_experts(EXPERTS, rank, 2)
    ids = torch.tensor([[other[0], other[1]], [own[0], other[3]], [own[1], own[2]], [other[0], other[2]]])
    ids = mask_padding(ids, 3)
    routed = Routed(torch.randn(4, HIDDEN), ids, torch.full((4, TOP_K), 0.5))
    row, result = HIDDEN * 4 + TOP_K * 8, HIDDEN * 4
    assert _sent(layer, "torch_dist", group, routed) == {"dispatch": 4 * row, "combine": 4 * result}
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


# ------------------------------------------------------------------------------------------------------------ in chunks


def chunked(chunks: int, own: bool, place: SharedExpert = SharedExpert.COMBINE) -> Schedule:
    name = f"{chunks} chunks, {'own' if own else 'one'} dispatch"
    return Schedule(name, lanes=1, chunks=chunks, chunk_dispatch=own, shared_expert=place)


def _traffic_of_chunks(rank: int, group: CommGroup) -> None:
    """A token travels once, with the first chunk that it visits there, and its result with the last one."""
    layer = make_layer(EXPERTS, HIDDEN)
    all2all = make_all2all("torch_dist", group=group, num_experts=EXPERTS)
    kernel, held, other = layer.kernel(all2all), EXPERTS // 2, 1 - rank
    ids = torch.rand(6, EXPERTS, generator=torch.Generator().manual_seed(3)).topk(3, dim=1).indices
    ids = (ids + held * rank) % EXPERTS  # what one rank sends is then what it gets
    routed = Routed(torch.randn(6, HIDDEN), ids, torch.full((6, 3), 0.5))
    row, result = HIDDEN * 4 + 3 * 8, HIDDEN * 4
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


def _one_round_trip_of_counts(rank: int, group: CommGroup) -> None:
    """However many chunks, the host waits for counts once a layer."""
    layer = make_layer(EXPERTS, HIDDEN)
    kernel = layer.kernel(make_all2all("torch_dist", group=group, num_experts=EXPERTS))
    routed = make_tokens(layer, 6, 3, seed=rank)
    for schedule in itertools.starmap(chunked, itertools.product((1, 2, 3, 4), (True, False))):
        _, trace = alone(group, schedule, lambda: kernel(routed.x, routed.weights, routed.ids))
        waits = [event.name for event in trace.events if event.kind == "wait" and "counts" in event.name]
        assert len(waits) == 1, f"{schedule.name}: {waits}"


# ------------------------------------------------------------------------------------------------------------ in blocks


def _traffic_of_blocks(rank: int, group: CommGroup) -> None:
    """A combine for each of eight blocks at most, together the bytes of one; counts are waited for once."""
    for held, blocks in ((4, 4), (16, 8)):
        layer = make_layer(held * 2, HIDDEN)
        kernel = layer.kernel(make_all2all("torch_dist", group=group, num_experts=layer.num_experts))
        routed = make_tokens(layer, 40, 3, seed=rank)
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


def _bits_of_blocks(rank: int, group: CommGroup) -> None:
    """The same bits as in one piece: of more experts than blocks, idle ranks, tokens without experts."""
    layer = make_layer(11 * group.size, HIDDEN)
    kernel = layer.kernel(make_all2all("torch_dist", group=group, num_experts=layer.num_experts))
    for tokens, unrouted in (((5, 3, 1), 0.0), ((0, 4, 2), 0.5)):
        routed = make_tokens(layer, tokens[rank], 3, 10 + rank, unrouted=unrouted)
        outputs = [
            alone(group, schedule, lambda r=routed: kernel(r.x, r.weights, r.ids))[0]
            for schedule in (SIGNALLED, SERIAL)
        ]
        assert torch.equal(*outputs)
        torch.testing.assert_close(outputs[0], layer.expected(routed))


class Timed(GroupedExperts):
    """Experts that take their time, but no CPU; and when the last of them was done."""

    SECONDS = 0.02
    ended = 0.0

    def _run_experts(self, hidden_states: Tensor, plan: RowPlan, slots: range) -> Tensor:
        time.sleep(self.SECONDS * sum(plan.rows_per_expert[slot] > 0 for slot in slots))
        results = super()._run_experts(hidden_states, plan, slots)
        self.ended = time.monotonic()
        return results


def _speed_of_blocks(rank: int, group: CommGroup) -> None:
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
    layer = make_layer(EXPERTS, HIDDEN)
    kernel = layer.kernel(make_all2all("torch_dist", group=group, num_experts=EXPERTS))
    routed = make_tokens(layer, 6, TOP_K)
    two = replace(SIGNALLED, chunks=2)
    with tracing() as trace, pytest.raises(ConfigError, match="dispatch, not of 2"):
        alone(group, two, lambda: kernel(routed.x, routed.weights, routed.ids))
    kernel = layer.kernel(kernel.all2all, "reference")
    with pytest.raises(ConfigError, match=r"ReferenceExperts run all at once .* Use experts 'grouped', or .* chunks"):
        alone(group, SIGNALLED, lambda: kernel(routed.x, routed.weights, routed.ids))
    assert not [event for event in trace.events if event.kind == "launch"]


# ------------------------------------------------------------------------------------------------ over an emulated link


def _emulated_link(rank: int, group: CommGroup) -> None:
    """The answer is the inner back end's, the link carries every payload, and nothing arrives early."""
    layers = [make_layer(EXPERTS, HIDDEN, seed=seed) for seed in (0, 1)]
    for inner in BACKENDS:
        link = EmulatedLink(2e-3, 1e6)
        all2all = make_all2all("emulated_link", group=group, num_experts=EXPERTS, link=link, inner=inner)
        model = Stack(layers, all2all)
        wrapper = lanes_of(model, group, "mlp_shared_overlap")
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


def _overlap(rank: int, group: CommGroup) -> None:
    """One lane: every chunk's transfer but the first dispatch and the last combine travels while something computes."""
    layer = make_layer(EXPERTS, HIDDEN)
    link = EmulatedLink(0.05, 1e9)
    kernel = layer.kernel(make_all2all("emulated_link", group=group, num_experts=EXPERTS, link=link))
    kernel.shared_experts = nn.Identity()
    for module in (kernel.experts, kernel.shared_experts):
        module.register_forward_pre_hook(lambda *_: time.sleep(0.06))
    routed = make_tokens(layer, 6, 3, seed=rank)

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
    assert exposed(chunked(2, True, SharedExpert.DISPATCH)) < 0.09
