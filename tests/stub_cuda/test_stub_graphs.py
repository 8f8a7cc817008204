"""Graphs of wrappers over the stub: their memory and pools, failed captures, random generators, several threads."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from graph_cases import Net, graphed, memory
from stub_cuda.counts import counted, of
from torch import Tensor

from ubatch import CaptureFailed, CudaGraphs, capturing


class Reads(Net):
    """Reads a number on the host while it is captured, if it is armed."""

    armed = True

    def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
        y = super().forward(x, residual, double)
        if capturing() and self.armed:
            y.sum().item()
        return y


def on_device() -> int:
    """Bytes that the allocator holds when everything that it can give back is back."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_dropped_graph_gives_its_pool_back() -> None:
    with graphed(Net(), device="cuda", num_ubatches=2) as case:
        x = case.x(6)
        case.wrapper.capture(x)  # libraries keep some memory of the first one
        case.wrapper.drop_graphs()
        before = on_device()
        for _ in range(3):
            case.wrapper.capture(x)
            with counted() as replayed:
                case.wrapper(x)
            assert replayed["graph launch"] == 1
            case.wrapper.drop_graphs()
            assert on_device() <= before


def test_capturing_takes_memory_before_it_begins_and_waits_for_nobody_within() -> None:
    with graphed(Net(), device="cuda", num_ubatches=2) as case, counted() as found:
        case.wrapper.capture(case.x(6))
    assert (found["capture begin"], found["capture end"], of(found, "refused")) == (1, 1, 0)
    assert not of(found, "module load during", "cublas create during")


def test_failed_captures_leave_a_bounded_rest() -> None:
    module = Reads()
    with graphed(module, device="cuda", num_ubatches=2) as case:
        x, held, reserved = case.x(6), [], []
        for _ in range(4):
            with counted() as found, pytest.raises(CaptureFailed):
                case.wrapper.capture(x)
            assert found["refused 901 end capture"] == 1
            held.append(memory("cuda"))
            reserved.append(on_device())
        assert held[1:] == held[1:2] * 3
        assert reserved[1:] == reserved[1:2] * 3
        module.armed = False
        case.wrapper.capture(x)
        with counted() as found:
            case.wrapper(x)
        assert found["graph launch"] == 1


DRAWS: dict[str, Callable[[torch.device], object]] = {
    "randn": lambda device: torch.randn(2, device=device),
    "manual_seed": lambda device: torch.manual_seed(1),
    "multinomial": lambda device: torch.ones(4, device=device).multinomial(1),
    "own": lambda device: torch.rand(2, device=device, generator=torch.Generator(device).manual_seed(0)),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_after_a_failed_capture_random_numbers_are_drawn(draw: str) -> None:
    device = torch.device("cuda", 0)
    graphs, x = CudaGraphs(device), torch.zeros(4, device=device)

    def attempt(*, fails: bool) -> object:
        with graphs.capture() as capture:
            capture.begin()
            y = x + torch.randn(4, device=device)
            if fails:
                y.sum().item()
            return capture.end()

    with pytest.raises(RuntimeError, match="capturing"):
        attempt(fails=True)
    DRAWS[draw](device)
    assert attempt(fails=False)
    DRAWS[draw](device)


def test_lanes_launch_from_their_own_threads_into_one_capture() -> None:
    threads: set[int] = set()

    class Watched(Net):
        def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
            if capturing():
                threads.add(threading.get_ident())
            return super().forward(x, residual, double)

    with graphed(Watched(), device="cuda", num_ubatches=3) as case, counted() as found:
        case.wrapper.capture(case.x(6))
    assert len(threads) == 3
    assert (found["capture begin"], found["capture end"], of(found, "refused")) == (1, 1, 0)
    assert found["captured memcpy D2D"] >= 3 * 2, "every lane's copies of both layers"


def test_captures_of_two_threads_at_a_time() -> None:
    """A capture spoils none of another thread. Both wait for the device before either begins."""
    device, both = torch.device("cuda", 0), threading.Barrier(2, timeout=30)
    x = torch.zeros(4, device=device)
    ended: list[object] = []

    def capture_one() -> None:
        with CudaGraphs(device).capture() as capture:
            both.wait()
            capture.begin()
            y = x + 1
            both.wait()
            ended.append((capture.end(), y))
            both.wait()

    threads = [threading.Thread(target=capture_one) for _ in range(2)]
    with counted() as found:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(ended) == found["capture end"] == 2
    assert not of(found, "refused")
