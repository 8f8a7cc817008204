"""Lanes on a real GPU: streams, events, memory, ranges, and NCCL with a group of one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lanes import EVERY_POINT, FinishedWork, run
from nccl_alone import Collectives, check_reset
from torch import Tensor, nn
from wrapping import wrapped

import ubatch
from ranks import run_ranks
from ubatch import CommGroup, Transfer, UBatchConfig, UBatchWrapper, copy_to_host, dbo_register_recv_hook, dbo_yield
from ubatch.dbo import current_sm_budget, on_comm_stream
from ubatch.lanes.workers import LanePool
from ubatch.streams.streams import SMBudget

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LONG = 200_000_000
"""Cycles that keep a stream busy for a tenth of a second or so."""


@pytest.fixture
def pool() -> Iterator[LanePool]:
    made = LanePool(2, CUDA, 60.0)
    yield made
    made.close()


def delayed_copy(x: Tensor) -> Transfer[Tensor]:
    """Travels on the communication stream, much later than whoever dropped `x` would like."""
    arrived = torch.empty_like(x)
    with on_comm_stream():
        torch.cuda._sleep(1_000_000)
        arrived.copy_(x)
    return Transfer("copy", [FinishedWork()], lambda: arrived, stream_ordered=True, keep=(x, arrived))


def exchange(start: float, layers: int, hook: bool) -> Callable[[], Tensor]:
    """Holds on to nothing, and computes in whatever memory it gets meanwhile."""

    def body() -> Tensor:
        x = torch.full((1 << 16,), start, device=CUDA)
        for _ in range(layers):
            transfer = delayed_copy(x + 1)
            if hook:
                dbo_register_recv_hook(transfer.wait)
            for _ in range(4):
                torch.full((1 << 16,), -1.0, device=CUDA).neg_()
            dbo_yield()
            x = transfer.wait() * 2
        return x

    return body


@pytest.mark.parametrize("hook", [True, False])
def test_memory_is_not_given_out_while_it_travels(pool: LanePool, hook: bool) -> None:
    layers = 12
    expected = [float(start) for start in (0, 1)]
    for _ in range(layers):
        expected = [(value + 1) * 2 for value in expected]
    for _ in range(5):
        results = run(pool, exchange(0.0, layers, hook), exchange(1.0, layers, hook), schedule=EVERY_POINT)
        assert [result.unique().tolist() for result in results] == [[value] for value in expected]


def test_memory_does_not_grow(pool: LanePool) -> None:
    bodies = exchange(0.0, 8, True), exchange(1.0, 8, True)
    run(pool, *bodies)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(10):
        run(pool, *bodies)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() <= reserved


def test_the_host_waits_for_its_numbers_only(pool: LanePool) -> None:
    seen: list[bool] = []

    def reads() -> list[int]:
        copies = copy_to_host(torch.arange(4, device=CUDA))
        torch.cuda._sleep(LONG * 5)
        queued = torch.cuda.Event()
        queued.record()
        (numbers,) = copies.wait()
        seen.append(queued.query())
        assert numbers.is_pinned()
        return numbers.tolist()

    assert run(pool, reads, dbo_yield) == [[0, 1, 2, 3], None]
    assert seen == [False], "compute that was queued after the copy is not waited for"


def test_outside_lanes_the_host_gets_its_numbers() -> None:
    (numbers,) = copy_to_host(torch.arange(4, device=CUDA)).wait()
    assert numbers.tolist() == [0, 1, 2, 3]


def test_a_failure_leaves_the_device_usable(pool: LanePool) -> None:
    def fails() -> None:
        delayed_copy(torch.ones(1 << 16, device=CUDA))
        dbo_yield()
        raise ValueError("original")

    for _ in range(3):
        with pytest.raises(ValueError, match="original"):
            run(pool, fails, exchange(0.0, 3, True))
    results = run(pool, exchange(0.0, 1, True), exchange(1.0, 1, False))
    assert [result.unique().tolist() for result in results] == [[2.0], [4.0]]


BUDGETS: set[SMBudget | None] = set()
"""The budgets that `Layers` has seen; not its attribute, because the guard would see it change."""


class Layers(nn.Module):
    """Layers whose rows are independent, with a transfer in each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        BUDGETS.add(current_sm_budget())
        for _ in range(3):
            transfer = delayed_copy(self.linear(x))
            dbo_register_recv_hook(transfer.wait)
            dbo_yield("dispatch")
            x = x + transfer.wait()
        return x


@torch.inference_mode()
def test_a_wrapped_module_with_ranges_and_a_budget() -> None:
    model = Layers().to(CUDA)
    x = torch.randn(32, 64, device=CUDA)
    expected = model(x)
    with wrapped(model, comm_sms=8) as wrapper, ubatch.profile_ranges():
        torch.testing.assert_close(wrapper(x), expected)
        assert wrapper.statistics().engaged == 1
    total = torch.cuda.get_device_properties(CUDA).multi_processor_count
    assert {None, SMBudget(total, 8)} == BUDGETS


# --------------------------------------------------------------------------------------------- NCCL, a group of one


def test_nccl() -> None:
    run_ranks(_nccl, 1, timeout_s=110.0)


@torch.inference_mode()
def _nccl(rank: int, ranks: int) -> None:
    torch.cuda.set_device(0)
    group = CommGroup.from_process_group(dist.new_group(backend="nccl"), timeout_s=30.0)
    assert group.stream_ordered(CUDA)
    assert not group.stream_ordered(torch.device("cpu"))
    for check in (_collectives, _counts, _unwaited, _in_a_graph, check_reset):
        check(group)
    torch.cuda.synchronize()


def _wrapped(group: CommGroup, **settings: Any) -> UBatchWrapper:
    return UBatchWrapper(
        Collectives(group, layers=3).eval(),
        UBatchConfig(verify="off", group=group, dbo_prefill_token_threshold=2),
        device=CUDA,
        **settings,
    )


def _collectives(group: CommGroup) -> None:
    """In lanes and outside: the same; every dtype that only moves."""
    x = torch.randn(64, 256, device=CUDA)
    wrapper = _wrapped(group)
    expected = Collectives(group, layers=3)(x)
    for _ in range(20):
        torch.testing.assert_close(wrapper(x), expected, rtol=0, atol=0)
    assert wrapper.statistics().engaged == 20
    wrapper.close()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int32):
        rows = torch.arange(8, device=CUDA).float().view(4, 2).to(dtype)
        assert torch.equal(ubatch.all_to_all_single(rows, group).float(), rows.float())


def _counts(group: CommGroup) -> None:
    """Numbers for the host arrive, in lanes, before what compute has queued since is done."""
    pool = LanePool(2, CUDA, 60.0)

    def body() -> tuple[list[int], bool]:
        counts = ubatch.launch_all_to_all_single(torch.tensor([7], device=CUDA), group, to_host=True)
        torch.cuda._sleep(LONG * 5)
        queued = torch.cuda.Event()
        queued.record()
        return counts.wait().tolist(), queued.query()

    run(pool, dbo_yield, dbo_yield)
    torch.cuda.synchronize()
    assert pool.run([body, dbo_yield], EVERY_POINT, [None] * 2, frozenset(group.ranks)) == [([7], False), None]
    torch.cuda.synchronize()
    pool.close()


def _unwaited(group: CommGroup) -> None:
    """A transfer that nobody waits for is over when the lanes are, in the order of the streams."""
    pool = LanePool(2, CUDA, 60.0)
    results: list[Transfer[Tensor]] = []

    def body() -> None:
        results.append(ubatch.launch_all_to_all_single(torch.full((1 << 20, 1), 3.0, device=CUDA), group))

    pool.run([body, dbo_yield], EVERY_POINT, [None] * 2, frozenset(group.ranks))
    assert results[0].wait().unique().tolist() == [3.0]
    assert results[0].done()
    pool.close()


def _in_a_graph(group: CommGroup) -> None:
    """Captured across the lanes' threads; replays give what the eager call gives."""
    wrapper = _wrapped(group, cudagraph_mode="full")
    x = torch.randn(64, 256, device=CUDA)
    wrapper.capture(x)
    for _ in range(5):
        x = torch.randn(64, 256, device=CUDA)
        torch.testing.assert_close(wrapper(x), Collectives(group, layers=3)(x), rtol=0, atol=0)
    assert wrapper.statistics().graph_replays == 5
    wrapper.close()
