"""Collectives inside and outside lanes, against references that see every rank's data."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import FP8, Mlp, collectives
from lanes import lane_pool
from torch import Tensor

import ubatch
from ranks import on_ranks
from ubatch import CommGroup, Recv, Schedule, UBatchConfig, UBatchWrapper, launch_all_gather, launch_reduce_scatter

pytestmark = pytest.mark.ranks


def data(seed: int, rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` has: small integers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def check(group: CommGroup, seed: int) -> int:
    """Run every collective in every dtype; returns how many cases there were."""
    cases = [(each, dtype) for each in collectives(group) for dtype in each.dtypes]
    for number, (collective, dtype) in enumerate(cases):
        name = f"{collective.name} {dtype}"
        inputs = [data(seed + number, rank, *shape, dtype=dtype) for rank, shape in enumerate(collective.shapes)]
        x = inputs[group.rank]
        before, expected = x.clone(), collective.reference(inputs)
        result = collective.call(x)
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape), name
        assert _same(result, expected), name
        assert _same(x, before), f"{name} wrote its input"
        assert not result.numel() or result.data_ptr() != x.data_ptr(), name
    return len(cases)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype in FP8 else torch.equal(a, b)


# ------------------------------------------------------------------------------------------- inside and outside


def in_lanes(group: CommGroup, schedule: Schedule, body: Callable[[], Any]) -> list[Any]:
    with lane_pool(schedule.lanes) as pool:
        return pool.run([body] * schedule.lanes, schedule, [None] * schedule.lanes, frozenset(group.ranks))


SCHEDULES = (
    Schedule("two lanes"),
    Schedule("three lanes", lanes=3),
    Schedule("peer", recv=Recv.PEER),
    Schedule("three lanes, peer, lead 2", lanes=3, lead=2, recv=Recv.PEER),
)


@pytest.mark.parametrize(
    ("world_size", "schedules"),
    [
        pytest.param(1, SCHEDULES[1:3], id="1"),
        pytest.param(2, SCHEDULES, marks=pytest.mark.slow, id="2"),
        pytest.param(3, SCHEDULES[::3], id="3"),  # both kinds of receiving, and three ranks with as many lanes
    ],
)
@on_ranks()
def test_every_collective_equals_its_reference_inside_lanes_and_outside(
    rank: int, group: CommGroup, world_size: int, schedules: Sequence[Schedule]
) -> None:
    assert check(group, 0) > 100
    for number, schedule in enumerate(schedules):
        counts = in_lanes(
            group, schedule, lambda n=number: check(group, 10000 * (n + 1) + 500 * ubatch.dbo_current_ubatch_id())
        )
        assert min(counts) > 100
    with torch.inference_mode():
        check(group, 1)


@on_ranks(2)
def test_bytes_are_those_that_cross_the_link(rank: int, group: CommGroup) -> None:
    x = torch.ones(6, 5, dtype=torch.float16)  # 10 bytes a row

    def crossing(transfer: ubatch.Transfer[Tensor]) -> tuple[str, int, int]:
        transfer.wait()
        return transfer.name, transfer.bytes_sent, transfer.bytes_received

    assert crossing(ubatch.launch_all_to_all_single(x, group)) == ("all_to_all", 30, 30)
    sent, received = ([1, 5], [1, 2]) if rank == 0 else ([2, 4], [5, 4])
    transfer = ubatch.launch_all_to_all_single(x, group, received, sent, name="uneven")
    assert crossing(transfer) == ("uneven", *((50, 20) if rank == 0 else (20, 50)))
    assert crossing(launch_all_gather(x, group)) == ("all_gather", 60, 60)
    rows = [6, 2]
    transfer = launch_all_gather(x[: rows[rank]], group, sizes=rows)
    assert crossing(transfer) == ("all_gather", *((60, 20) if rank == 0 else (20, 60)))
    assert crossing(ubatch.launch_all_reduce(x, group)) == ("all_reduce", 60, 60), "2 (R - 1) / R of 60 bytes"
    assert crossing(ubatch.launch_all_reduce(torch.ones(()), group)) == ("all_reduce", 4, 4)
    assert crossing(launch_reduce_scatter(x, group)) == ("reduce_scatter", 30, 30)
    transfer = launch_reduce_scatter(x, group, sizes=[4, 2])
    assert crossing(transfer) == ("reduce_scatter", *((20, 40) if rank == 0 else (40, 20)))


# ---------------------------------------------------------------------------------------- a tensor-parallel module


@on_ranks(2)
def test_a_dense_tensor_parallel_module_overlaps(rank: int, group: CommGroup) -> None:
    x = data(0, 0, 13, 8, dtype=torch.float64) / 9
    with torch.no_grad():
        expected = Mlp(None)(x)
    for lanes in (2, 3):
        config = UBatchConfig(verify="off", num_ubatches=lanes, dbo_prefill_token_threshold=4, group=group)
        model = UBatchWrapper(Mlp(group), config)
        with torch.no_grad(), ubatch.tracing() as trace:
            torch.testing.assert_close(model(x), expected)
        assert model.statistics().engaged == 1
        turn = [(lane, "collective") for lane in range(lanes)]
        assert trace.order == turn * 3 + [(lane, "end") for lane in range(lanes)]
        moved = [span for span in trace.spans if span.kind is ubatch.SpanKind.TRANSFER]
        assert len(moved) == 3 * lanes
        assert {span.bytes for span in moved if span.lane == 0} == {13 // lanes * 8 * 8 * 2}
        for transfer in moved[:-1]:  # while it travels, another lane computes
            assert any(
                span.kind is ubatch.SpanKind.COMPUTE
                and span.lane != transfer.lane
                and max(span.start, transfer.start) < min(span.end, transfer.end)
                for span in trace.spans
            ), transfer

    model = UBatchWrapper(Mlp(group), UBatchConfig(verify="off", dbo_prefill_token_threshold=4, group=group))
    with pytest.raises(ubatch.GradientError, match=r"lane 0.*requires grad.*no_grad"):
        model(x)
    group.reset()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x[:3]), expected[:3])  # unsplit: gradients are nobody's business here


# -------------------------------------------------------------------------------------------------------- refused


@on_ranks(2)
def test_what_cannot_work_is_refused_before_it_is_launched(rank: int, group: CommGroup) -> None:
    x = torch.ones(4, 2)

    with pytest.raises(ubatch.ConfigError, match="must be a CommGroup, not ProcessGroup"):
        ubatch.all_to_all_single(x, dist.group.WORLD)  # type: ignore[arg-type]
    for launch, pattern in (
        (lambda: ubatch.all_to_all_single(x[:3], group), "3 rows do not divide by 2"),
        (lambda: ubatch.all_to_all_single(x, group, [2, 2], [1, 2]), "input_split_sizes .* sum to 4"),
        (lambda: ubatch.all_to_all_single(x, group, [2, 2], [-1, 5]), "input_split_sizes"),
        (lambda: ubatch.all_to_all_single(x, group, [4], [2, 2]), "output_split_sizes"),
        (lambda: ubatch.all_to_all_single(x, group, [5, -1], [2, 2]), "output_split_sizes"),
        (lambda: ubatch.all_to_all_single(x, group, [3, 3], [2, 2]), "sends itself 2 rows .* expects 3"),
        (lambda: launch_all_gather(x, group, sizes=[4, 4, 4]), "one number per rank"),
        (lambda: launch_all_gather(x, group, sizes=[1, 1]), "this rank has 4 rows"),
        (lambda: ubatch.reduce_scatter(x[:3], group), "do not divide"),
        (lambda: launch_reduce_scatter(x, group, sizes=[1, 1]), "sum to 4"),
        (lambda: ubatch.all_to_all_single(torch.ones(()), group), "0-dim"),
        (lambda: ubatch.all_gather(torch.ones(()), group), "0-dim"),
        (lambda: ubatch.all_reduce(x.to(torch.float8_e4m3fn), group), "float8_e4m3fn .* nobody sums"),
        (lambda: ubatch.reduce_scatter(x.to(torch.float8_e5m2), group), "nobody sums"),
    ):
        with pytest.raises(ubatch.ConfigError, match=pattern):
            launch()

    # A wrapper without a group did not vote, so nothing is launched in its lanes, on any rank.
    unvoted = UBatchWrapper(Mlp(group), UBatchConfig(verify="off", dbo_prefill_token_threshold=4))
    with (
        torch.no_grad(),
        pytest.raises(ubatch.UnvotedCollectiveError, match=r"ranks \[0, 1\] in lane 0.*UBatchConfig.group"),
    ):
        unvoted(torch.ones(8, 8, dtype=torch.float64))
    # Nothing of the above was launched, or the ranks would be out of step here.
    assert torch.equal(ubatch.all_reduce(torch.full((2,), float(rank)), group), torch.ones(2))


@on_ranks(2)
def test_inputs_that_require_grad_are_refused_in_a_lane(rank: int, group: CommGroup) -> None:
    x = torch.ones(4, 2, requires_grad=True)

    def body() -> None:
        for launch in (ubatch.all_reduce, ubatch.all_gather, ubatch.reduce_scatter, ubatch.all_to_all_single):
            with pytest.raises(ubatch.GradientError):
                launch(x, group)
            with torch.no_grad():
                launch(x, group)
            launch(x.detach(), group)

    in_lanes(group, Schedule("two lanes"), body)
