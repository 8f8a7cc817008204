"""`host_loopback`: what crosses host memory, in lanes and outside, and what it refuses while a graph is captured."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from lanes import lane_pool, run
from moe_layers import Layer, Stack, make_layer, make_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe import FusedMoEModularKernel, make_experts
from moe.all2all import HostLoopbackAll2All, host_loopback
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
