"""`host_loopback`: what crosses host memory, in lanes and outside, and what it refuses while a graph is captured.

`host_loopback_batched`: rows by expert and back, and what crosses. What it does for a layer whose combines are
signalled is in `test_moe_signalled`.
"""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import lane_pool, run
from moe_layers import Layer, Stack, make_layer, make_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe import BatchedDispatch, EmulatedLink, FusedMoEModularKernel, make_all2all, make_experts
from moe.all2all import HostLoopbackAll2All, host_loopback
from moe.all2all.host_loopback_batched import HostLoopbackBatchedAll2All, sort_pairs, sum_pairs
from moe.all2all.layouts import blocks_of
from moe.all2all.payload import pack_rows
from ubatch import ConfigError, UBatchConfig, UBatchWrapper
from ubatch.lanes.workers import LanePool

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
INFINITE = float("inf")


def loopback(layer: Layer, bytes_factor: float = 1.0, sms: int = 0) -> HostLoopbackAll2All:
    return HostLoopbackAll2All(num_experts=layer.num_experts, bytes_factor=bytes_factor, sms=sms)


def memory_of(transport: HostLoopbackAll2All, lane: int | None, device: torch.device = CPU) -> Tensor:
    return transport._staging[lane, device].memory


def as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_payload_crosses_host_memory_bit_by_bit(dtype: torch.dtype) -> None:
    layer = make_layer(dtype=dtype)
    routed = make_tokens(layer, 5, unrouted=0.3)
    transport = loopback(layer)
    sent = transport.dispatch(routed.x, routed.ids, routed.weights)
    arrived = sent.wait()
    assert torch.equal(arrived.hidden_states, routed.x)
    assert torch.equal(arrived.topk_ids.long(), routed.ids)
    assert torch.equal(arrived.topk_weights, routed.weights)
    assert arrived.experts == range(layer.num_experts)

    payload = as_bytes(pack_rows(routed.x, routed.ids, routed.weights))
    assert torch.equal(memory_of(transport, None)[: payload.numel()], payload)
    assert (sent.bytes_sent, sent.bytes_received) == (payload.numel(), payload.numel())

    home = transport.combine(routed.x * 2, arrived.handle)
    assert torch.equal(home.wait(), routed.x * 2)
    assert home.bytes_sent == routed.x.nbytes
    assert torch.equal(memory_of(transport, None)[: routed.x.nbytes], as_bytes(routed.x * 2))
    assert home.wait().data_ptr() != arrived.hidden_states.data_ptr(), "two transfers share no memory on the device"


def test_what_comes_back_was_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spoil host memory between the two copies: the result is spoilt, so nothing short-cuts it."""
    layer = make_layer()
    transport = loopback(layer)
    copy = Tensor.copy_

    def spoil(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if source.data_ptr() == memory_of(transport, None).data_ptr():
            source.zero_()
        return copy(self, source, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", spoil)
    assert not transport.combine(torch.ones(3, layer.hidden_size), None).wait().any()


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 3.25])
def test_more_bytes_cross_and_the_payload_stays_the_same(factor: float) -> None:
    layer = make_layer()
    y = torch.randn(4, layer.hidden_size)
    copied = CountCopies()
    with copied:
        home = loopback(layer, factor).combine(y, None)
    assert torch.equal(home.wait(), y)
    assert home.bytes_sent == round(factor * y.nbytes)
    assert copied.bytes == 2 * home.bytes_sent, "to the host, and back"


@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize("rows", [1, 70, 400])
def test_sms_move_every_byte(rows: int, factor: float, programs: list[int]) -> None:
    """Sizes that no word divides, blocks for fewer and for more programs than asked for."""
    y = torch.randint(0, 256, (rows, 87), dtype=torch.uint8)
    home = loopback(make_layer(), factor, sms=3).travel("combine", y)
    assert torch.equal(home.wait(), y)
    assert home.bytes_sent == round(factor * y.nbytes)
    assert max(programs) == {1: 1, 70: 2, 400: 3}[rows]


def test_what_a_schedule_reserves_comes_before_what_the_transport_is_given(programs: list[int]) -> None:
    layer = make_layer()
    model = Stack([layer, layer], loopback(layer, sms=3))
    for comm_sms, expected in ((0, 3), (5, 5)):
        programs.clear()
        config = UBatchConfig(verify="off", dbo_prefill_token_threshold=2, comm_sms=comm_sms)
        with FakeCuda().installed() as cuda, closing(UBatchWrapper(model, config)) as wrapper, torch.inference_mode():
            wrapper(torch.randn(800, 12))
            cuda.check()
            assert wrapper.statistics().engaged == 1
            assert wrapper.statistics().sm_budget == ({"host_loopback": True} if comm_sms else {})
        assert max(programs) == expected


def test_a_cpu_has_no_sms(monkeypatch: pytest.MonkeyPatch, programs: list[int]) -> None:
    monkeypatch.setattr("ubatch.kernels.triton_jit.INTERPRETED", False)
    with pytest.raises(ConfigError, match=r"host_loopback's sms are a GPU's\. Leave them out"):
        loopback(make_layer(), sms=3).travel("combine", torch.ones(4))
    assert not programs


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The programs of every copy."""
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    from moe.kernels import copy

    kernel, launched = copy._copy_kernel, list[int]()

    class Noting:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(grid[0])
            return kernel[grid]

    monkeypatch.setattr(copy, "_copy_kernel", Noting())
    return launched


def test_every_lane_has_its_own_memory() -> None:
    transport = loopback(make_layer())
    with lane_pool(3) as pool:
        run(pool, *(lambda rows=rows: transport.combine(torch.ones(rows, 12), None).wait() for rows in (7, 0, 4)))
    assert {lane for lane, _ in transport._staging} == {0, 2}, "the lane without rows sends nothing"


def test_memory_grows_between_graphs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()
    transport = loopback(layer)

    def combine(rows: int) -> None:
        y = torch.randn(rows, layer.hidden_size)
        assert torch.equal(transport.combine(y, None).wait(), y)

    def capture(rows: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(host_loopback, "capturing", lambda: True)
            combine(rows)

    with pytest.raises(ConfigError, match=r"memory for 0 bytes, not for a message of 192, and cannot make more while"):
        capture(4)
    combine(4)
    first = memory_of(transport, None)
    assert first.numel() == 256
    combine(5)
    assert memory_of(transport, None) is first, "256 bytes hold 240"
    capture(5)
    combine(9)
    assert memory_of(transport, None) is not first
    assert transport._staging[None, CPU].outgrown == (first,), "a graph still writes to it"
    combine(20)
    assert transport._staging[None, CPU].outgrown == (first,), "no graph knows the second"
    assert transport.pinned_bytes == 256 + 1024


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        *(
            ({"bytes_factor": factor}, "bytes_factor must be at least 1")
            for factor in (0.5, 0.0, INFINITE, float("nan"))
        ),
        ({"sms": -1}, r"sms must be at least 0 \(0 takes none\), not -1"),
        ({"group": SimpleNamespace(rank=0, size=2)}, "stands in for a network: it serves one rank, not 2"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        HostLoopbackAll2All(num_experts=8, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [0, 4])
@pytest.mark.usefixtures("no_thread_leaks")
@torch.inference_mode()
def test_on_a_gpu_eager_lanes_and_a_graph_give_what_one_batch_does(sms: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    layer = make_layer(num_experts=8, hidden=256, intermediate=64, dtype=torch.bfloat16)
    transport = loopback(layer, bytes_factor=1.5, sms=sms)
    kernel = FusedMoEModularKernel(transport, make_experts("grouped", layer.w13.to(device), layer.w2.to(device)))
    routed = make_tokens(layer, 96)
    x, ids, weights = routed.x.to(device), routed.ids.to(device), routed.weights.to(device)
    expected = kernel(x, weights, ids)
    torch.testing.assert_close(expected.float().cpu(), layer.expected(routed).float(), atol=2e-2, rtol=2e-2)
    assert memory_of(transport, None, device).is_pinned()

    halves = [slice(0, 48), slice(48, 96)]
    pool = LanePool(2, device, 20.0)
    with closing(pool):
        parts = run(pool, *(lambda half=half: kernel(x[half], weights[half], ids[half]) for half in halves))
    torch.cuda.synchronize()
    torch.testing.assert_close(torch.cat(parts), torch.cat([kernel(x[h], weights[h], ids[h]) for h in halves]))

    sent = transport.dispatch(x, ids, weights).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arrived = transport.dispatch(x, ids, weights).wait()
        home = transport.combine(arrived.hidden_states.contiguous() * 2, None).wait()
    x.copy_(torch.randn_like(x))
    with (
        pytest.raises(ConfigError, match="cannot make more while a graph is captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        transport.combine(torch.zeros(1 << 20, dtype=torch.bfloat16, device=device).view(-1, 256), None)
    graph.replay()
    assert torch.equal(home, x * 2)
    assert torch.equal(arrived.topk_ids, sent.topk_ids)


class CountCopies(TorchDispatchMode):
    """Bytes that `copy_` moves."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.copy_.default:
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


# -------------------------------------------------------------------------------------------------- by expert, and back


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 9),
    top_k=st.integers(1, 4),
    experts=st.integers(4, 6),
    unrouted=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_every_pair_has_its_row(tokens: int, top_k: int, experts: int, unrouted: float, seed: int) -> None:
    layer = make_layer(experts, seed=seed)
    routed = make_tokens(layer, tokens, top_k, seed, unrouted=unrouted)
    ids = torch.where(torch.rand(routed.ids.shape) < 0.1, experts + 3, routed.ids)  # no expert's, either
    batches = sort_pairs(routed.x, ids, experts)
    assert batches.hidden_states.shape == (experts, tokens, layer.hidden_size)
    assert batches.hidden_states.is_contiguous()
    assert batches.rows_per_expert.dtype is torch.int32
    assert not batches.overflowed.any()
    rows = batches.row_of_pair.tolist()
    for expert in range(experts):
        pairs = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]
        assert batches.rows_per_expert[expert] == len(pairs)
        assert [rows[pair] for pair in pairs] == [expert * tokens + nth for nth in range(len(pairs))]
        for nth, pair in enumerate(pairs):
            assert torch.equal(batches.hidden_states[expert, nth], routed.x[pair // top_k])
    nowhere = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if not 0 <= chosen < experts]
    assert all(rows[pair] == experts * tokens for pair in nowhere)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_summed_in_its_own_order(dtype: torch.dtype) -> None:
    """Bit by bit as alone, whoever is next to it; what nobody wrote is NaN, and counts for nothing."""
    rows, weights = torch.randn(7, 5, 33).to(dtype), torch.rand(7, 5)
    ids = torch.randint(-1, 4, (7, 5))
    rows[ids < 0], weights[ids < 0] = float("nan"), float("inf")
    whole = sum_pairs(rows, ids, weights, 4)
    for token in range(7):
        alone = slice(token, token + 1)
        assert torch.equal(sum_pairs(rows[alone], ids[alone], weights[alone], 4), whole[alone])
        total = torch.zeros(33)
        for choice in range(5):
            if ids[token, choice] >= 0:
                total = total + rows[token, choice].float() * weights[token, choice]
        assert torch.equal(whole[token], total.to(dtype))
    for gave_up in (0, 1):
        found = sum_pairs(rows, ids, weights, 4, torch.tensor([gave_up], dtype=torch.int32))
        assert found.isnan().all() if gave_up else torch.equal(found, whole)


def test_the_kernel_sums_as_torch_does() -> None:
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    from triton_batches import DEVICE

    from moe.kernels.reduce import sum_choices

    rows, weights, ids = torch.randn(6, 3, 40), torch.rand(6, 3), torch.randint(-1, 5, (6, 3))
    rows[ids < 0], weights[ids < 0] = float("nan"), float("nan")
    given = [each.to(DEVICE) for each in (rows, ids, weights)]
    for gave_up in (None, 0, 1):
        flag = None if gave_up is None else torch.tensor([gave_up], dtype=torch.int32)
        told = None if flag is None else flag.to(DEVICE)
        found = sum_choices(given[0], given[1], 0, 5, given[2], told).cpu()
        torch.testing.assert_close(found, sum_pairs(rows, ids, weights, 5, flag), equal_nan=True)
        assert bool(found.isnan().all()) is bool(gave_up)


def test_a_token_that_chooses_an_expert_too_often_is_not_lost_silently() -> None:
    layer = make_layer(4)
    kernel = layer.kernel(HostLoopbackBatchedAll2All(num_experts=4))
    x, weights = torch.randn(3, layer.hidden_size), torch.ones(3, 2)
    ids = torch.tensor([[1, 1], [1, 2], [1, 3]])  # four rows for an expert that has room for three tokens
    output = kernel(x, weights, ids)
    assert output.isnan().all(1).tolist() == [False, False, True]
    expected = make_layer(4).kernel(make_all2all("local", group=None, num_experts=4))(x, weights, ids)
    torch.testing.assert_close(output[:2], expected[:2])


# ------------------------------------------------------------------------------------------------------- the transport


def batched(num_experts: int = 8, **options: Any) -> HostLoopbackBatchedAll2All:
    made = make_all2all("host_loopback_batched", group=None, num_experts=num_experts, **options)
    assert isinstance(made, HostLoopbackBatchedAll2All)
    return made


def test_what_crosses() -> None:
    """Tokens once, results one by one."""
    layer, there = make_layer(), batched(bytes_factor=1.5)
    routed = make_tokens(layer, 5, 3)
    sent = there.dispatch(routed.x, routed.ids, routed.weights)
    assert sent.bytes_sent == round(1.5 * (routed.x.nbytes + 5 * 3 * 8))
    arrived = sent.wait()
    assert isinstance(arrived, BatchedDispatch)
    assert arrived.hidden_states.shape == (8, 5, layer.hidden_size)
    home = there.combine(torch.ones_like(arrived.hidden_states), arrived.handle)
    assert home.bytes_sent == round(1.5 * 3 * routed.x.nbytes)
    torch.testing.assert_close(home.wait(), torch.ones_like(routed.x))  # weights sum to 1
    assert there.pinned_bytes == 1 << (round(3 * routed.x.nbytes) - 1).bit_length()


@pytest.mark.parametrize("cut", [False, True], ids=["dispatches", "one_dispatch"])
def test_chunks_have_their_own_experts_rows(cut: bool) -> None:
    layer, there = make_layer(), batched()
    routed = make_tokens(layer, 6, 3, unrouted=0.2)
    blocks = blocks_of(8, 3)
    given = routed.x, routed.ids, routed.weights, blocks
    chunks = there.dispatch_cut(*given).wait() if cut else [each.wait() for each in there.dispatch_chunks(*given)]
    total = torch.zeros_like(routed.x)
    for number, (chunk, block) in enumerate(zip(chunks, blocks, strict=True)):
        assert chunk.handle.chunk == number
        counts = [int((routed.ids == expert).sum()) if expert in block else 0 for expert in range(8)]
        assert chunk.rows_per_expert.tolist() == counts
        y = torch.full_like(chunk.hidden_states, float("nan"))
        for expert, count in enumerate(counts):
            y[expert, :count] = chunk.hidden_states[expert, :count]
        total += there.combine(y, chunk.handle).wait()
    here = ((routed.ids >= 0) * routed.weights).sum(1, keepdim=True)
    torch.testing.assert_close(total, here * routed.x)


def test_an_emulated_link_delays_it_and_signals_nothing() -> None:
    layer = make_layer()
    link = make_all2all(
        "emulated_link", group=None, num_experts=8, link=EmulatedLink(1e-5, 1e9), inner="host_loopback_batched"
    )
    assert link.traits.batched
    assert not link.traits.signals
    routed = make_tokens(layer, 4)
    torch.testing.assert_close(layer.kernel(link)(routed.x, routed.weights, routed.ids), layer.expected(routed))
