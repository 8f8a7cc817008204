"""Device-side signals: a projection that says which blocks are done, and a copy that waits for them.

Triton's interpreter runs one program after the other, so it shows what is signalled, copied and reset, not that the two
kernels run at once: that is a `gpu` test.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

from moe.kernels.signals import SignalTimeout, copy_signalled, make_signals, project_down_signalling, reference_counts

pytestmark = pytest.mark.triton

CASES = [
    pytest.param(3, 150, 48, 40, [150, 0, 65], id="full, empty and a block and a row"),
    pytest.param(2, 64, 130, 24, [1, 64], id="two tiles of columns"),
    pytest.param(1, 7, 16, 16, [5], id="less than a block"),
]


def batches(experts: int, capacity: int, depth: int, rows: list[int], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rows and their numbers; what is behind them is NaN, so that a reader shows."""
    x = torch.randn(experts, capacity, depth, device=device)
    for expert, count in enumerate(rows):
        x[expert, count:] = float("nan")
    return x, torch.tensor(rows, dtype=torch.int32, device=device)


def check(out: Tensor, x: Tensor, w2: Tensor, rows: list[int], untouched: float) -> None:
    for expert, count in enumerate(rows):
        torch.testing.assert_close(out[expert, :count].float(), x[expert, :count].float() @ w2[expert].float().T)
        assert (out[expert, count:] == untouched).all()


@pytest.mark.sample(2)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize(("experts", "capacity", "columns", "depth", "rows"), CASES)
def test_blocks_are_signalled_copied_and_reset(
    experts: int, capacity: int, columns: int, depth: int, rows: list[int], programs: int
) -> None:
    x, rows_per_expert = batches(experts, capacity, depth, rows)
    w2 = torch.randn(experts, columns, depth)
    signals = make_signals(experts, capacity, columns, "cpu")
    assert signals.counts.shape == (experts * -(-capacity // 64),)
    assert signals.threshold == -(-columns // 128)
    for _ in range(2):  # as a graph would replay them
        y = project_down_signalling(x, w2, rows_per_expert, signals, programs)
        assert torch.equal(signals.counts, reference_counts(rows_per_expert, capacity, signals))
        out = torch.full_like(y, -7.0)
        copy_signalled(y, rows_per_expert, signals, out, programs)
        check(out, x, w2, rows, untouched=-7.0)
        assert not signals.counts.any()
        signals.check()


def test_rows_go_to_their_places() -> None:
    x, rows_per_expert = batches(2, 70, 16, [66, 3])
    w2 = torch.randn(2, 130, 16)
    signals = make_signals(2, 70, 130, "cpu")
    y = project_down_signalling(x, w2, rows_per_expert, signals, 2)
    exists = (torch.arange(70) < rows_per_expert[:, None]).flatten()
    places = torch.full((140,), 1 << 30, dtype=torch.int32)  # far away, if anybody looked
    places[exists] = torch.randperm(75, dtype=torch.int32)[:69]
    out = torch.full((75, 130), -7.0)
    copy_signalled(y, rows_per_expert, signals, out, 2, places)
    expected = torch.full((75, 130), -7.0)
    expected[places[exists].long()] = y.flatten(0, 1)[exists]
    assert torch.equal(out, expected)


def test_signals_may_share_an_alarm_and_memory() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    first = make_signals(2, 70, 16, "cpu")
    second = make_signals(3, 70, 16, "cpu", memory=lambda num_bytes: memory, alarm=first.alarm)
    assert second.counts.shape == (6,)
    assert second.counts.data_ptr() == memory.data_ptr()
    assert not first.alarm.rung()
    second.counts[1] = 1
    first.alarm.gave_up.fill_(1)
    first.alarm.told.fill_(1)
    assert second.alarm.rung()
    with pytest.raises(SignalTimeout):
        first.alarm.check(first, second)
    assert not second.alarm.rung()
    assert not second.counts.any()


def test_a_block_that_nobody_finishes_does_not_hang() -> None:
    x, rows_per_expert = batches(2, 70, 16, [70, 3])
    w2 = torch.randn(2, 16, 16)
    signals = replace(make_signals(2, 70, 16, "cpu"), patience=5)
    y = project_down_signalling(x, w2, rows_per_expert, signals, 1)
    signals.counts[1] = 0  # the second block of the first expert
    out = torch.full_like(y, -7.0)
    copy_signalled(y, rows_per_expert, signals, out, 1)
    assert (out[0, 64:] == -7.0).all(), "copied what was not done"
    torch.testing.assert_close(out[0, :64], y[0, :64])
    assert signals.alarm.rung(), "the host is told without asking the device"
    with pytest.raises(SignalTimeout, match="looked 5 times for a block of 64 rows"):
        signals.check()
    assert not signals.alarm.rung()
    signals.check()
    assert not signals.counts.any()


def test_once_a_copy_has_given_up_the_others_wait_for_nothing() -> None:
    """Or a step of many blocks and layers would take as many times the patience, which is a hang."""
    x, rows_per_expert = batches(3, 64, 16, [3, 64, 1])
    w2 = torch.randn(3, 16, 16)
    signals = make_signals(3, 64, 16, "cpu")  # as patient as ever
    y = project_down_signalling(x, w2, rows_per_expert, signals, 1)
    signals.counts[1:] = 0
    signals.alarm.gave_up.fill_(1)
    out = torch.full_like(y, -7.0)
    copy_signalled(y, rows_per_expert, signals, out, 1)
    torch.testing.assert_close(out[0, :3], y[0, :3])
    assert (out[1:] == -7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_copy_runs_beside_the_projection(captured: bool) -> None:
    """Two streams, the SMs shared out: results are complete, many times over, and in pinned host memory too."""
    experts, capacity, columns, depth, rows = 8, 512, 2048, 1024, [512, 100, 0, 64, 65, 511, 300, 1]
    x, rows_per_expert = batches(experts, capacity, depth, rows, "cuda")
    x = x.to(torch.bfloat16)
    w2 = (torch.randn(experts, columns, depth, device="cuda") / depth**0.5).to(torch.bfloat16)
    signals = make_signals(experts, capacity, columns, "cuda")
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    out = torch.empty(experts, capacity, columns, dtype=torch.bfloat16, pin_memory=True)
    comm = torch.cuda.Stream()

    def step() -> Tensor:
        forked = torch.cuda.Event()
        forked.record()
        y = project_down_signalling(x, w2, rows_per_expert, signals, sms - 16)
        with torch.cuda.stream(comm):
            comm.wait_event(forked)  # not behind the projection
            copy_signalled(y, rows_per_expert, signals, out, 16)
        torch.cuda.current_stream().wait_stream(comm)
        return y

    step()  # compiles
    torch.cuda.synchronize()
    signals.check()
    run = step
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()

        def run() -> Tensor:
            graph.replay()
            return y

    for _ in range(50):
        out.fill_(-7.0)
        y = run()
        torch.cuda.synchronize()
        signals.check()
        assert not signals.counts.any()
        for expert, count in enumerate(rows):
            assert torch.equal(out[expert, :count], y[expert, :count].cpu())
            expected = x[expert, :count].float() @ w2[expert].float().T
            torch.testing.assert_close(y[expert, :count].float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_a_device_tells_the_host() -> None:
    """A copy without a projection gives up, and writes so to pinned memory."""
    y, rows_per_expert = batches(2, 70, 16, [70, 3], "cuda")
    signals = replace(make_signals(2, 70, 16, "cuda"), patience=1000)
    assert signals.alarm.told.is_pinned()
    copy_signalled(y, rows_per_expert, signals, torch.empty_like(y), 2)
    torch.cuda.synchronize()
    assert signals.alarm.rung()
    with pytest.raises(SignalTimeout):
        signals.check()
    assert not signals.alarm.rung()
