"""What every all-to-all back end promises: checks of one (`all2all_bench`), run for all that are registered.

`tests/moe/all2all/test_all2all_conformance.py` runs them. A back end that is registered needs nothing here,
unless it takes options, or does not carry the usual rows: then a line in `all2all_bench.CASES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import deep_ep_standin
import pytest
import torch
import torch.distributed as dist
from all2all_bench import CASES, EXPERTS, ROOM, Bench, refused
from moe_layers import Layer, Routed, Stack, lanes_of, make_layer
from placements import random_placement
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe import (
    All2AllTraits,
    BatchedDispatch,
    check_schedule_by_name,
    local_experts,
    make_all2all,
    traits_in,
)
from ranks import run_ranks
from ubatch import (
    CommGroup,
    ConfigError,
    ForwardContext,
    ForwardMode,
    GradientError,
    Recv,
    Schedule,
    Trace,
    get_schedule,
    interleave,
    set_forward_context,
    tracing,
)

SIGNALLED = get_schedule("single_batch_signalled")


# ----------------------------------------------------------------------------------------------------- outside of lanes


def results(bench: Bench) -> None:
    """Uneven and empty ranks, experts and ranks without tokens, tokens without experts, one choice and more."""
    layer = bench.layer()
    kernel = layer.kernel(bench.all2all)
    loads = ((5, 3), (0, 4), (4, 0), (0, 0), (ROOM, 15))
    visited = ((None, 0.0, 2), (range(4), 0.5, 1), (range(4, 8), 0.0, 3), (range(3, 5), 0.2, 2), (None, 1.0, 2))
    for tokens in loads:
        for only, unrouted, top_k in visited:
            routed = bench.tokens(layer, tokens, top_k, only=only, unrouted=unrouted)
            what = f"{tokens} tokens on {only}, top {top_k}, {unrouted} unrouted"
            bench.check(kernel(routed.x, routed.weights, routed.ids), bench.expected(layer, routed), what)


def dtypes(bench: Bench) -> None:
    for dtype in bench.case.dtypes:
        layer = bench.layer(dtype)
        routed = bench.tokens(layer, (3, 4), 3)
        actual = layer.kernel(bench.all2all)(routed.x, routed.weights, routed.ids)
        bench.check(actual, bench.expected(layer, routed), str(dtype), dtype)


def strided_inputs(bench: Bench) -> None:
    layer = bench.layer()
    routed = bench.tokens(layer, (5, 3))
    x = torch.cat([routed.x, torch.full_like(routed.x, float("nan"))], dim=1)[:, : bench.case.hidden]
    ids, weights = (each.t().contiguous().t() for each in (routed.ids, routed.weights))
    bench.check(layer.kernel(bench.all2all)(x, weights, ids), bench.expected(layer, routed), "strided")


def tokens_apart(bench: Bench) -> None:
    """A token without numbers, and padding that holds none, change no bit of any other; padding gives zeros."""
    layer = bench.layer()
    routed = bench.tokens(layer, (6, 6))
    ids, x, weights = routed.ids.clone(), routed.x.clone(), routed.weights.clone()
    ids[5] = -1
    x[[1, 5]], weights[[1, 5]] = float("nan"), float("inf")
    kernel = layer.kernel(bench.all2all)
    clean, found = kernel(routed.x, routed.weights, ids), kernel(x, weights, ids)
    assert torch.equal(found[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])
    assert not found[5].any()


def inference_mode_and_outside(bench: Bench) -> None:
    """What is made at the first call, in inference mode, serves outside of it."""
    if not bench.case.any_ids:
        return  # the stand-in's memory does not
    layer = bench.layer()
    routed = bench.tokens(layer, (4, 4))
    kernel = layer.kernel(Bench(bench.case, bench.rank, bench.group).all2all)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            x, weights, ids = routed.x.clone(), routed.weights.clone(), routed.ids.clone()
            bench.check(kernel(x, weights, ids), bench.expected(layer, routed), str(mode))


def several_under_way(bench: Bench) -> None:
    """Two dispatches and their combines, waited for in another order; what each needs is in its handle."""
    if bench.all2all.traits.cuts_combine is None or bench.case.name == "deepep_auto":
        return  # one at a time on a lane's buffer
    layer = bench.layer()
    both = [bench.tokens(layer, tokens, top_k) for tokens, top_k in (((5, 3), 2), ((2, 4), 3))]
    sent = [bench.all2all.dispatch(each.x, each.ids, each.weights) for each in both]
    arrived: list[Any] = [each.wait() for each in reversed(sent)][::-1]
    kernel = layer.kernel(bench.all2all)
    home = [kernel._computed(each) for each in arrived]
    for routed, transfer in reversed(list(zip(both, home, strict=True))):
        output = transfer.wait()
        assert transfer.wait() is output, "a second call returns the same"
        bench.check(output, bench.expected(layer, routed), f"{len(routed.x)} tokens")


# ----------------------------------------------------------------------------------------------------- lanes and chunks


def served(bench: Bench, schedule: Schedule) -> bool:
    """Whether the traits say so."""
    traits = bench.all2all.traits
    if bench.case.name == "deepep_auto":
        chosen = bench.all2all.low_latency if bench.case.mode is ForwardMode.DECODE else bench.all2all.high_throughput
        traits = chosen.traits
    return (
        (traits.max_lanes is None or schedule.lanes <= traits.max_lanes)
        and schedule.chunks <= traits.max_chunks
        and (schedule.chunks == 1 or schedule.chunk_dispatch or traits.cuts_combine is not None)
    )


def schedules() -> Iterator[Schedule]:
    """Orders of lanes: round the ring, with a lead, received by peers; and chunks, with a dispatch each, or one."""
    first = get_schedule("mlp_shared_overlap")
    yield first
    yield replace(first, name="received by the peer", recv=Recv.PEER)
    yield replace(get_schedule("two_batch_decode"), name="chunks, lane 0 leads", chunks=3)
    yield replace(
        get_schedule("two_batch_prefill"), name="three lanes, one dispatch", lanes=3, chunks=2, chunk_dispatch=False
    )


def lanes(bench: Bench) -> None:
    """In lanes, with an idle rank too, what the plain call gives; every lane passes the same points on every rank."""
    model = Stack([bench.layer(seed=seed) for seed in (0, 1)], bench.all2all, shared=True)
    for schedule in filter(lambda each: served(bench, each), schedules()):
        with closing(lanes_of(model, bench.group, schedule, schedule.lanes)) as wrapper:
            for tokens in ((7, 11), (7, 0)):
                x = torch.randn(tokens[bench.rank], bench.case.hidden).to(bench.case.dtypes[0])
                expected, what = model(x), f"{schedule.name}, {tokens} tokens"
                mode = set_forward_context(ForwardContext(mode=bench.case.mode, num_tokens=len(x)))
                with tracing() as trace, mode:
                    bench.check(wrapper(x), expected, what)
                points = [p for _ in (0, 1) for p in ("select", "dispatch", "combine", "output") if schedule.active(p)]
                assert trace.order == interleave([points] * schedule.lanes, lead=schedule.lead), what
                _check_launches(bench, trace, schedule.lanes, what)
            assert wrapper.statistics().engaged == 2, what


def _check_launches(bench: Bench, trace: Trace, lanes: int, what: str) -> None:
    own = [
        [event.name for event in trace.events if (event.kind, event.lane) == ("launch", lane)] for lane in range(lanes)
    ]
    assert all(each == own[0] for each in own), f"{what}: lanes launch different things: {own}"
    theirs: list[Any] = [own]
    if bench.group is not None:
        theirs = [None] * bench.ranks
        dist.all_gather_object(theirs, own, group=bench.group.pg)
    assert all(each == own for each in theirs), f"{what}: ranks launch different things: {theirs}"


def chunks(bench: Bench) -> None:
    """As many as the traits say, with dispatches of their own and with one; what they exclude is refused by name."""
    layer = bench.layer()
    kernel = layer.kernel(bench.all2all)
    for number in (2, 3, len(bench.all2all.experts)):
        for own in (True, False):
            schedule = Schedule(f"{number} chunks, {own}", lanes=1, chunks=number, chunk_dispatch=own)
            for tokens, only in (((5, 3), None), ((0, 4), range(3, 6))):
                routed = bench.tokens(layer, tokens, only=only, unrouted=0.2)
                given = routed.x, routed.weights, routed.ids
                _run_or_refused(bench, kernel, schedule, given, bench.expected(layer, routed), _fits(bench, schedule))


def _fits(bench: Bench, schedule: Schedule) -> bool:
    traits = bench.all2all.traits  # outside of steps, for `deepep_auto`, too
    return schedule.chunks <= traits.max_chunks and (schedule.chunk_dispatch or traits.cuts_combine is not None)


def _run_or_refused(
    bench: Bench, kernel: nn.Module, schedule: Schedule, given: Any, expected: Tensor, fits: bool
) -> None:
    if fits:
        bench.check(bench.alone(schedule, lambda: kernel(*given))[0], expected, schedule.name)
        return
    with refused(ConfigError, schedule.name):
        bench.alone(schedule, lambda: kernel(*given))


def signalled(bench: Bench) -> None:
    """A combine that begins while its experts compute: as the traits say, or refused."""
    traits, layer = bench.all2all.traits, bench.layer()
    fits = traits.sends_blocks or traits.signals
    assert type(bench.all2all).may_signal or not fits
    if type(bench.all2all).may_signal:
        check_schedule_by_name(SIGNALLED, bench.case.name)
    else:
        with pytest.raises(ConfigError, match=r"which all2all back end .* cannot do"):
            check_schedule_by_name(SIGNALLED, bench.case.name)
    experts = ["grouped", "packed", "native"] if not traits.signals else ["triton_batched"]
    if traits.signals:
        pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    for name in experts[: None if fits else 1]:
        kernel = layer.kernel(bench.all2all, name)
        for tokens, only, unrouted in (
            ((5, 3), None, 0.0),
            ((0, 4), None, 0.5),
            ((0, 0), None, 0.0),
            ((5, 3), range(2, 6), 0.2),
        ):
            routed = bench.tokens(layer, tokens, 3, only=only, unrouted=unrouted)
            given = routed.x, routed.weights, routed.ids
            _run_or_refused(bench, kernel, SIGNALLED, given, bench.expected(layer, routed), fits)


def placements(bench: Bench) -> None:
    """Experts in any slots, some twice, some slots idle: whole, in lanes, in chunks, and combined block by block."""
    for number, redundant, seed in ((5, 3, 1), (5, 2, 2), (7, 0, 3), (8, 0, 4)):
        placement = random_placement(1, number, bench.ranks, redundant, seed)
        if placement.num_slots != EXPERTS:  # one rank has no idle ones
            placement = random_placement(1, number, bench.ranks, EXPERTS - number, seed)
        placement = placement.filled() if bench.all2all.traits.batched else placement
        layer = make_layer(number, bench.case.hidden, 4, seed, bench.case.dtypes[0])
        kernel = layer.kernel(bench.all2all, placement=placement)
        for tokens, top_k, unrouted in (((5, 3), 2, 0.0), ((0, 4), 3, 0.5), ((ROOM, 15), 1, 0.0)):
            routed = bench.tokens(layer, tokens, top_k, unrouted=unrouted)
            given, expected = (routed.x, routed.weights, routed.ids), bench.expected(layer, routed)
            what = f"{number} experts, {redundant} redundant, {tokens} tokens"
            bench.check(kernel(*given), expected, what)
            for schedule in (
                *(Schedule("cut", lanes=1, chunks=2, chunk_dispatch=own) for own in (True, False)),
                SIGNALLED,
            ):
                fits = bench.all2all.traits.sends_blocks if schedule.signalled else _fits(bench, schedule)
                if fits:
                    bench.check(bench.alone(schedule, lambda: kernel(*given))[0], expected, f"{what}, {schedule.name}")  # noqa: B023
        model = Stack([layer], bench.all2all, placement=placement)
        for schedule in filter(lambda each: served(bench, each), schedules()):
            with closing(lanes_of(model, bench.group, schedule, schedule.lanes)) as wrapper:
                x = torch.randn((7, 11)[bench.rank], bench.case.hidden).to(bench.case.dtypes[0])
                expected = model(x)
                with set_forward_context(ForwardContext(mode=bench.case.mode, num_tokens=len(x))):
                    bench.check(wrapper(x), expected, f"{number} experts, {schedule.name}")
                assert wrapper.statistics().engaged == 1, schedule.name


# ---------------------------------------------------------------------------------------------------- traits are truths


class HostReads(TorchDispatchMode):
    """Notes what is read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def traits(bench: Bench) -> None:
    all2all = bench.all2all
    own, layer = all2all.traits, bench.layer()
    captured = own.capturable and bench.case.any_ids  # a stand-in reads on the host
    assert isinstance(own, All2AllTraits)
    assert all2all.num_experts == EXPERTS
    assert all2all.experts == local_experts(EXPERTS, bench.rank, bench.ranks)
    assert own.other_ranks == bench.ranks - 1
    assert 1 <= own.max_chunks <= len(all2all.experts)
    for mode in ForwardMode:
        there = traits_in(all2all, mode, 1)
        assert (there.other_ranks, there.batched) == (own.other_ranks, own.batched)
    routed = bench.tokens(layer, (4, 4))
    with bench.voted(4, 4):
        bench.there_and_back(routed)  # makes buffers
        with tracing() as trace, HostReads() as reads:
            transfer = all2all.dispatch(routed.x, routed.ids, routed.weights)
        waited = [event.name for event in trace.events if event.kind == "wait"]
        assert own.is_async or transfer.done(), "it says that transfers are complete when they were launched"
        arrived: Any = transfer.wait()
        assert own.blocks_host or not waited, f"the host waited for {waited}"
        assert not captured or not reads.seen, f"it says that it can be captured, and reads: {reads.seen}"
        assert own.batched or not isinstance(arrived, BatchedDispatch)
        assert arrived.experts == all2all.experts
        y = arrived.hidden_states.to(routed.x.dtype).contiguous()
        with HostReads() as reads:
            all2all.combine(y, arrived.handle).wait()
        assert not captured or not reads.seen, f"it says that it can be captured, and reads: {reads.seen}"
    all2all.listen()


def bytes_sent(bench: Bench) -> None:
    """At most what the traits say, however the tokens are routed; nothing for tokens that stay, if it is routed."""
    own, layer = bench.all2all.traits, bench.layer()
    if not own.other_ranks:
        return
    for top_k in (1, 2, 4):
        routed = bench.tokens(layer, (6, 6), top_k)
        home = (bench.all2all.experts.start + torch.arange(top_k)).expand(6, -1).contiguous()
        for ids, most in ((routed.ids, own.chunk_bytes(6, bench.case.hidden, top_k, routed.x.dtype)), (home, 0)):
            sent = [bench.all2all.dispatch(routed.x, ids, routed.weights)]
            arrived: Any = sent[0].wait()
            sent.append(bench.all2all.combine(arrived.hidden_states.to(routed.x.dtype).contiguous(), arrived.handle))
            sent[1].wait()
            total = sum(each.bytes_sent for each in sent)
            assert total <= most or (ids is home and not own.routed), f"top {top_k}: {total} bytes, not {most}"


def bytes_of_chunks(bench: Bench) -> None:
    """With `once`, together those of one chunk."""
    layer = bench.layer()
    kernel, routed = layer.kernel(bench.all2all), bench.tokens(layer, (6, 6), 3)
    totals = []
    for number in (1, 2, 4):
        schedule = Schedule("some", lanes=1, chunks=number)
        if not bench.all2all.traits.once or not _fits(bench, schedule):
            return
        _, trace = bench.alone(schedule, lambda: kernel(routed.x, routed.weights, routed.ids))
        totals.append(sum(span.bytes for span in trace.spans if span.name in ("dispatch", "combine") and span.bytes))
    assert len(set(totals)) == 1, totals


def room(bench: Bench) -> None:
    """As many tokens as the traits say; more are refused before anything is launched."""
    most = bench.all2all.traits.max_tokens
    if most is None:
        return
    layer = bench.layer()
    routed = bench.tokens(layer, (most, most))
    bench.check(
        layer.kernel(bench.all2all)(routed.x, routed.weights, routed.ids), bench.expected(layer, routed), "full"
    )
    more = bench.tokens(layer, (most + 1, most + 1))
    with refused(ConfigError, f"has room for {most} tokens"):
        bench.all2all.dispatch(more.x, more.ids, more.weights)


# ------------------------------------------------------------------------------------------------------------- refusals


def refusals(bench: Bench) -> None:
    """Gradients, unless they arrive, and wrong dtypes; before anything is launched, so that the ranks can go on."""
    layer = bench.layer()
    routed = bench.tokens(layer, (3, 3))
    with torch.enable_grad():
        x, weights, ids = routed.x.clone().requires_grad_(), routed.weights.clone(), routed.ids.clone()
        if bench.all2all.traits.is_async:
            with refused(GradientError, "got a tensor that requires grad"):
                bench.all2all.dispatch(x, ids, weights)
            with refused(GradientError, "got a tensor that requires grad"):
                bench.all2all.dispatch(x.detach(), ids, weights.requires_grad_())
        else:
            _check_gradients(bench, layer, x, weights, ids)
    if bench.all2all.traits.is_async:
        arrived: Any = bench.all2all.dispatch(routed.x, routed.ids, routed.weights).wait()
        y = arrived.hidden_states.to(routed.x.dtype).contiguous()
        with (
            torch.enable_grad(),
            refused(GradientError, "got a tensor that requires grad"),
        ):
            bench.all2all.combine(torch.zeros_like(y).requires_grad_(), arrived.handle)
        bench.all2all.combine(y, arrived.handle).wait()
        for wrong in ((routed.x.int(), routed.ids, routed.weights), (routed.x, routed.ids.int(), routed.weights)):
            with refused(ConfigError, "dispatch needs floating hidden states, float32 weights and int64 ids"):
                bench.all2all.dispatch(*wrong)
    results_of = layer.kernel(bench.all2all)(routed.x, routed.weights, routed.ids)
    bench.check(results_of, bench.expected(layer, routed), "after what was refused")


def _check_gradients(bench: Bench, layer: Layer, x: Tensor, weights: Tensor, ids: Tensor) -> None:
    found = []
    for run in (layer.kernel(bench.all2all), lambda x, weights, ids: layer.expected(Routed(x, ids, weights))):
        leaf = x.detach().clone().requires_grad_()
        output = run(leaf, weights, ids)
        assert output.requires_grad, "gradients were lost"
        output.square().sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def makers(bench: Bench) -> None:
    """What cannot be made is refused by name: experts that do not divide, more ranks than are served."""
    with pytest.raises(ConfigError, match=r"experts do not divide|must be|num_experts"):
        make_all2all(bench.case.name, group=bench.group, num_experts=7 if bench.ranks > 1 else 0, **bench.case.options)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'wings'"):
        make_all2all(bench.case.name, group=bench.group, num_experts=EXPERTS, **bench.case.options, wings=2)


CHECKS: dict[str, Callable[[Bench], None]] = {
    check.__name__: check
    for check in (
        *(traits, bytes_sent, bytes_of_chunks, room),
        *(results, dtypes, strided_inputs, tokens_apart, inference_mode_and_outside, several_under_way),
        *(lanes, chunks, signalled, placements),
        *(refusals, makers),
    )
}


def check_case(name: str) -> None:
    """All checks of a case, on as many ranks as it serves."""
    run_ranks(_check_on_rank, CASES[name].ranks, name)


def _check_on_rank(rank: int, ranks: int, name: str) -> None:
    case = CASES[name]
    with torch.no_grad(), deep_ep_standin.installed(in_torch=True):
        deep_ep_standin.Buffer.shared_by_lanes = "share_buffer" in case.options
        bench = Bench(case, rank, CommGroup.from_process_group(timeout_s=20.0) if ranks > 1 else None)
        for check in CHECKS.values():
            try:
                check(bench)
            except BaseException as error:
                error.add_note(f"in check {check.__name__!r} of {name}, on rank {rank}")
                raise
