"""Layers in chunks of experts: results, the order of launches, waits and points, what is refused, on one rank."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import FakeCuda
from graph_cases import graphed
from lanes import alone
from moe_layers import Layer, Stack, make_layer, make_tokens
from torch import Tensor, nn

from moe import All2AllTraits, make_all2all
from moe.all2all.layouts import blocks_of, only_block
from ubatch import ConfigError, Point, Recv, Schedule, SharedExpert, SpanKind, Trace, dbo_yield, get_schedule, tracing
from ubatch.lanes.workers import LanePool, SingleLane
from ubatch.schedules import Launch, LayerTimes, Op, Pass, Wait, layer_program, programs_of, simulate
from ubatch.schedules.schedule import check_runnable
from ubatch.streams.streams import StreamBackend

pytestmark = pytest.mark.long

EXPERTS, HIDDEN, TOP_K, LAYERS = 8, 12, 3, 2
CPU = torch.device("cpu")
SINGLE, BASE, DECODE = (get_schedule(name) for name in ("single_batch", "mlp_shared_overlap", "two_batch_decode"))


def stack_of(layer: Layer, all2all: str = "local", layers: int = LAYERS) -> Stack:
    """Layers that pass every point that a decoder's do."""
    transport = make_all2all(all2all, group=None, num_experts=EXPERTS)
    model = Stack([layer] * layers, transport, top_k=TOP_K, shared=True)
    for kernel in model.kernels:
        kernel.register_forward_pre_hook(lambda *_: dbo_yield(Point.ATTN_PREPARE))
        kernel.register_forward_hook(lambda *_: dbo_yield(Point.LAYER))
    return model


def run_in_lanes(
    model: nn.Module, x: Tensor, schedule: Schedule, streams: StreamBackend | None = None
) -> tuple[Tensor, Trace]:
    """One traced step, an equal part of `x` per lane."""
    lanes = schedule.lanes
    pool = SingleLane(CPU, streams) if lanes == 1 else LanePool(lanes, CPU, 20.0, streams)
    with closing(pool), tracing() as trace:
        trace.step = 1
        outputs = pool.run([lambda part=part: model(part) for part in x.chunk(lanes)], schedule, [None] * lanes)
    return torch.cat(outputs), trace


def variants(base: Schedule, places: Sequence[SharedExpert] = tuple(SharedExpert)) -> Iterator[Schedule]:
    for lanes, chunks, own, place in itertools.product((1, 2, 3), (1, 2, 3), (True, False), places):
        name = f"{lanes}x{chunks}, {'own' if own else 'one'} dispatch, shared at {place}"
        yield replace(base, name=name, lanes=lanes, chunks=chunks, chunk_dispatch=own, shared_expert=place)


def test_blocks_are_the_same_share_of_every_ranks_experts() -> None:
    assert blocks_of(8, 3) == (range(2), range(2, 5), range(5, 8))
    assert blocks_of(3, 1) == (range(3),)
    for chunks in (0, 4):
        with pytest.raises(ConfigError, match=f"3 experts of a rank cannot be cut into {chunks} chunks"):
            blocks_of(3, chunks)
    ids = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [-1, 8, 9, -2]])
    masked = [only_block(ids, block, 4) for block in blocks_of(4, 2)]
    assert masked[0].tolist() == [[0, 1, -1, -1], [4, 5, -1, -1], [-1, 8, 9, -1]]
    assert masked[1].tolist() == [[-1, -1, 2, 3], [-1, -1, 6, 7], [-1, -1, -1, -1]]


class Scaling(nn.Module):
    """Experts that only multiply, and read nothing on the host: their bits depend on nothing but the token, so those of
    a sum show its order."""

    expert_range, capturable = range(EXPERTS), True
    factors = torch.linspace(0.1, 1.7, EXPERTS)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for choice in range(TOP_K):
            factor = torch.where(ids[:, choice] < 0, 0.0, self.factors[ids[:, choice]] * weights[:, choice])
            y = y + factor[:, None] * x
        return y


def scaling_model(*, shared: bool) -> Stack:
    model = stack_of(make_layer(EXPERTS, HIDDEN), "host_loopback")
    for kernel in model.kernels:
        kernel.experts, kernel.shared_experts = Scaling(), model.shared if shared else None
    return model


@torch.inference_mode()
def test_a_tokens_bits_do_not_depend_on_the_lanes() -> None:
    """Of the same chunks. Those of other chunks are added in another order."""
    model, x = scaling_model(shared=False), torch.randn(7, HIDDEN)
    outputs = []
    for chunks in (1, 2, 3):
        one, two, three = (run_in_lanes(model, x, replace(BASE, lanes=n, chunks=chunks))[0] for n in (1, 2, 3))
        assert torch.equal(one, two)
        assert torch.equal(one, three)
        outputs.append(one)
    assert not torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.sample(2)
@pytest.mark.parametrize("recv", list(Recv))
@pytest.mark.parametrize("base", [BASE, DECODE], ids=lambda schedule: schedule.name)
@torch.inference_mode()
def test_the_kernel_does_what_the_simulator_says(base: Schedule, recv: Recv) -> None:
    """Every launch, wait and point of every lane in order, and who runs when."""
    model = stack_of(make_layer(EXPERTS, HIDDEN), "host_loopback")
    times = LayerTimes(attn_core=1.0, experts=1.0, dispatch=1.0, combine=1.0, shared=1.0)
    for schedule in variants(replace(base, recv=recv)):
        program = layer_program(times, LAYERS, schedule)
        _, trace = run_in_lanes(model, torch.randn(8, HIDDEN), schedule)
        assert trace.order == list(simulate([program] * schedule.lanes, schedule).order), schedule.name
        for lane, actual in enumerate(programs_of(trace, 1)):
            if recv is Recv.OWNER:
                assert outline(actual) == outline(program), f"{schedule.name}, lane {lane}"
            else:  # whoever waits, what a lane launches and passes is the same
                assert [op for op in outline(actual) if op[0] != "wait"] == [
                    op for op in outline(program) if op[0] != "wait"
                ], f"{schedule.name}, lane {lane}"


def outline(program: Sequence[Op]) -> list[tuple[str, str]]:
    """A lane's launches, waits and points; transfers by what they are and how many were launched before."""
    keys: dict[str, str] = {}
    ops = []
    for op in program:
        if isinstance(op, Launch):
            keys[op.key] = f"{op.key.partition('.')[0]} {len(keys)}"
            ops.append(("launch", keys[op.key]))
        elif isinstance(op, Wait):
            ops.append(("wait", keys[op.key]))
        elif isinstance(op, Pass):
            ops.append(("point", str(op.point)))
    return ops


@torch.inference_mode()
def test_a_steps_own_overlap_is_in_the_trace() -> None:
    """One lane, two chunks: the second dispatch travels while the first chunk computes."""
    _, trace = run_in_lanes(stack_of(make_layer(EXPERTS, HIDDEN), "host_loopback"), torch.randn(4, HIDDEN), SINGLE)
    (program,) = programs_of(trace, 1)
    first_layer = outline(program)[: outline(program).index(("point", "output"))]
    assert first_layer == [
        *(("point", "attn_prepare"), ("point", "select")),
        *(("launch", "dispatch 0"), ("launch", "dispatch 1"), ("point", "dispatch")),
        *(("wait", "dispatch 0"), ("launch", "combine 2"), ("wait", "dispatch 1"), ("launch", "combine 3")),
        *(("point", "combine"), ("wait", "combine 2"), ("wait", "combine 3")),
    ]


@pytest.mark.parametrize("lanes", [1, 2])
@torch.inference_mode()
def test_on_a_gpu_a_chunk_waits_for_its_own_transfer_only(lanes: int) -> None:
    """The communication stream carries what comes later while the experts of a chunk compute."""
    cuda, x = FakeCuda(), torch.randn(4 * lanes, HIDDEN)
    model = stack_of(make_layer(EXPERTS, HIDDEN), "host_loopback", layers=1)
    # Of the communication stream, at each call of the experts: what is done, and launched.
    expected, seen = model(x), []
    model.kernels[0].experts.register_forward_pre_hook(
        lambda *_: seen.append((cuda.compute.clock.get("comm", 0), cuda.comm.clock["comm"]))
    )
    with cuda.installed():
        actual, _ = run_in_lanes(model, x, replace(BASE, lanes=lanes, chunks=2), cuda)
    cuda.check(f"{lanes} lanes")
    torch.testing.assert_close(actual, expected)
    assert len(seen) == 2 * lanes
    for number, (after, launched) in enumerate(seen):
        assert after < launched, f"call {number} of the experts comes after all {launched} copies"
    first, second = seen[:2]
    assert first[0] < second[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "schedule",
    [
        SINGLE,
        replace(SINGLE, name="one_dispatch", chunks=3, chunk_dispatch=False),
        replace(BASE, name="two_by_two", chunks=2),
        replace(DECODE, name="two_by_three", chunks=3, chunk_dispatch=False),
    ],
    ids=lambda schedule: schedule.name,
)
def test_replays(schedule: Schedule) -> None:
    """Captured on the device that records every operation: replays equal the plain call."""
    model = scaling_model(shared=True)
    with graphed(model, schedule=schedule) as case:
        captured = case.wrapper.capture(case.x(6, HIDDEN))
        assert captured.key.schedule == schedule.name
        for _ in range(3):
            x = case.x(6, HIDDEN)
            torch.testing.assert_close(case.wrapper(x), model(x))
        statistics = case.wrapper.statistics()
        assert statistics.graph_replays == 3, statistics
        single = schedule.lanes == 1
        assert (statistics.engaged, statistics.engaged_single) == ((0, 3) if single else (3, 0)), statistics


@torch.inference_mode()
def test_experts_compute_only_the_chunks_rows() -> None:
    layer = make_layer(EXPERTS, HIDDEN)
    routed = make_tokens(layer, 9, TOP_K)
    kernel = layer.kernel(make_all2all("local", group=None, num_experts=EXPERTS))
    expected = torch.bincount(routed.ids.flatten(), minlength=EXPERTS).tolist()
    for own in (True, False):
        schedule, rows = Schedule("one", lanes=1, chunks=4, chunk_dispatch=own), [0] * EXPERTS
        with mock.patch.object(kernel.experts, "run_expert", wraps=kernel.experts.run_expert) as run:
            alone(None, schedule, lambda: kernel(routed.x, routed.weights, routed.ids))
        for slot, x in (call.args for call in run.call_args_list):
            rows[slot] += x.shape[0]
        assert rows == expected


def test_gradients_flow_through_lanes_and_chunks_where_nothing_travels() -> None:
    model = stack_of(make_layer(EXPERTS, HIDDEN))
    x, grads = torch.randn(6, HIDDEN), []
    for schedule in (None, BASE, replace(BASE, chunks=3), replace(BASE, chunks=2, chunk_dispatch=False)):
        leaf = x.clone().requires_grad_()
        output = model(leaf) if schedule is None else run_in_lanes(model, leaf, schedule)[0]
        output.square().sum().backward()
        grads.append(leaf.grad)
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0])


@torch.inference_mode()
def test_low_precision_is_summed_in_float32() -> None:
    layer = make_layer(EXPERTS, HIDDEN, dtype=torch.bfloat16)
    routed = make_tokens(layer, 5, TOP_K)
    kernel = layer.kernel(make_all2all("local", group=None, num_experts=EXPERTS))
    schedule = Schedule("one", lanes=1, chunks=8)
    actual, _ = alone(None, schedule, lambda: kernel(routed.x, routed.weights, routed.ids))
    parts = [kernel(routed.x, routed.weights, torch.where(routed.ids == expert, expert, -1)) for expert in range(8)]
    assert actual.dtype is torch.bfloat16
    assert torch.equal(actual, torch.stack(parts).float().sum(0).to(torch.bfloat16))


# ----------------------------------------------------------------------------------------------------------- costs


def traits(other_ranks: int, **others: Any) -> All2AllTraits:
    return All2AllTraits(True, False, False, None, 8, other_ranks, others.pop("routed", True), **others)


def test_what_chunks_cost_in_bytes() -> None:
    """The published factors, and the cases that need no reckoning."""
    assert traits(1).chunk_factors(32, 4, 2)[0] == pytest.approx(1.48, abs=0.005)
    assert traits(31).chunk_factors(256, 8, 2)[0] == pytest.approx(1.06, abs=0.005)
    assert traits(3).chunk_factors(32, 4, 1) == (1.0, 1.0)
    assert traits(3, routed=False).chunk_factors(32, 4, 3) == (3.0, 3.0)
    assert traits(3, per_expert=True).chunk_factors(32, 4, 3) == (1.0, 1.0)
    assert traits(3, per_expert=True, routed=False).chunk_factors(32, 4, 3) == (3.0, 3.0)
    one = traits(1, cuts_combine=True).chunk_factors(32, 4, 2, chunk_dispatch=False)
    assert one == (1.0, pytest.approx(1.48, abs=0.005))
    assert traits(1).chunk_factors(32, 4, 2, chunk_dispatch=False) == (1.0, 2.0)


def test_factors_and_shares_are_what_random_routing_sends() -> None:
    ids = torch.rand(20000, 32).topk(4, dim=1).indices
    visits = torch.stack([((only_block(ids, block, 16) >= 0) & (ids < 16)).any(1) for block in blocks_of(16, 3)])
    travels = visits.any(0)
    factor, _ = traits(1).chunk_factors(32, 4, 3)
    assert visits.sum() / travels.sum() == pytest.approx(factor, rel=0.02)

    once = traits(1, once=True, cuts_combine=True)
    assert once.chunk_factors(32, 4, 3) == once.chunk_factors(32, 4, 3, chunk_dispatch=False) == (1.0, 1.0)
    numbered = visits[:, travels].to(torch.int8)
    first, last = numbered.argmax(0), 2 - numbered.flip(0).argmax(0)
    for found, shares in zip((first, last), once.chunk_shares(32, 4, 3), strict=True):
        assert sum(shares) == pytest.approx(1.0)
        assert tuple((torch.bincount(found) / len(found)).tolist()) == pytest.approx(shares, abs=0.015)
    assert once.chunk_shares(32, 4, 2, chunk_dispatch=False)[0] == (1.0,)
    assert once.chunk_shares(32, 4, 2)[1] == pytest.approx(once.chunk_shares(32, 4, 2)[0][::-1])
    assert traits(1).chunk_shares(32, 4, 2) == ((0.5, 0.5), (0.5, 0.5))


# --------------------------------------------------------------------------------------------------------- refusals


@torch.inference_mode()
def test_what_no_back_end_serves_is_refused() -> None:
    model = stack_of(make_layer(EXPERTS, HIDDEN))
    x = torch.randn(4, HIDDEN)
    with pytest.raises(ConfigError, match="has 9 chunks, but all2all back end LocalAll2All with 8 experts"):
        run_in_lanes(model, x, replace(BASE, chunks=9))
    kernel: Any = model.kernels[0]
    kernel.all2all.traits = replace(kernel.all2all.traits, cuts_combine=None)
    run_in_lanes(model, x, replace(BASE, chunks=2))
    with pytest.raises(ConfigError, match="cannot have two combines of one dispatch under way"):
        run_in_lanes(model, x, replace(BASE, chunks=2, chunk_dispatch=False))


def test_schedules_that_could_differ_between_ranks_are_refused() -> None:
    class Own(Schedule):
        def active(self, point: str) -> bool:
            return torch.rand(()).item() > 0.5

    with pytest.raises(ConfigError, match=r"schedule 'mine' is a Own\. A schedule is data"):
        check_runnable(Own("mine"))
    with pytest.raises(ConfigError, match="one lane and recv=peer"):
        check_runnable(Schedule("mine", lanes=1, chunks=2, recv=Recv.PEER))
    check_runnable(SINGLE)


def test_whatever_ranks_measure_their_order_is_the_same() -> None:
    """Who launches what, and when, follows from the schedule, not from how long it takes, nor from who is idle."""
    slow = LayerTimes(attn_core=5.0, experts=9.0, dispatch=1.0, combine=7.0, attn_prepare=2.0, shared=3.0)
    idle = LayerTimes(attn_core=0.0, experts=0.0, dispatch=0.0, combine=0.0)
    points = (Point.ATTN_PREPARE, Point.SELECT, Point.OUTPUT, Point.LAYER)
    for schedule in variants(BASE, (SharedExpert.COMBINE, SharedExpert.COMBINE_RETURN)):
        for recv, lead in itertools.product(Recv if schedule.lanes > 1 else (Recv.OWNER,), (0, 2, 99)):
            for off in (frozenset(), frozenset(points[:2]), frozenset(points)):
                own = replace(schedule, recv=recv, lead=lead, points_off=off)
                orders = []
                for times in (slow, idle):
                    line = simulate([layer_program(times, 3, own)] * own.lanes, own)
                    launches = [(span.lane, span.name) for span in line.spans if span.kind is SpanKind.TRANSFER]
                    orders.append((line.order, launches))
                assert orders[0] == orders[1]
