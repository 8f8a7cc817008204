"""The stub itself: what it counts, and what it refuses as CUDA's documentation says."""

import threading
from collections.abc import Callable

import pytest
import torch
from stub_cuda.counts import counted, launches, of
from torch import Tensor

_broken: list[torch.cuda.CUDAGraph] = []


def captured(work: Callable[[], object], mode: str = "thread_local") -> torch.cuda.CUDAGraph:
    """A graph of it. If that fails, torch's allocator is told that the capture is over, as `CudaGraphs` does."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            work()
    except RuntimeError:
        graph.reset()
        torch._C._cuda_endAllocateToPool(0, pool)
        torch._C._cuda_releasePool(0, pool)
        _broken.append(graph)
        raise
    return graph


def test_it_counts_kernels_products_copies_and_waits() -> None:
    x = torch.ones(64, 64, device="cuda")
    pinned = torch.empty(64, 64).pin_memory()
    x @ x  # makes the handle
    with counted() as found:
        y = x + 1
        y @ x
        y.clone()
        pinned.copy_(y, non_blocking=True)
        torch.cuda.synchronize()
    assert (of(found, "kernel"), of(found, "cublas cublas")) == (1, 1)
    assert (found["memcpy D2D"], found["memcpy D2H"], found["wait device"]) == (1, 1, 1)
    assert launches(found) == 4


def test_copies_are_done_eagerly_and_by_graphs() -> None:
    source = torch.arange(8.0).cuda()
    target = torch.empty_like(source)
    graph = captured(lambda: target.copy_(source))
    source.copy_(torch.arange(8.0, 16.0))
    with counted() as found:
        graph.replay()
    assert target.tolist() == list(range(8, 16))
    assert launches(found) == found["graph launch"] == 1


def test_a_capture_counts_apart() -> None:
    x = torch.ones(8, device="cuda")
    captured(lambda: x + 1)
    with counted() as found:
        captured(lambda: (x + 1).clone())
    assert (of(found, "captured kernel"), found["captured memcpy D2D"]) == (1, 1)
    assert (found["capture begin"], found["capture end"], found["graph instantiate"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("work", "refused"),
    [
        (lambda x: x.sum().item(), "refused 900 wait stream"),
        (lambda x: torch.cuda.synchronize(), "refused 900 wait device"),
        (lambda x: torch.cuda.Event().record() or torch.cuda.current_stream().query(), "refused 900 query stream"),
    ],
)
def test_what_the_host_may_not_do_in_a_capture(work: Callable[[Tensor], object], refused: str) -> None:
    x = torch.ones(8, device="cuda")
    with counted() as found, pytest.raises(RuntimeError, match=r"capturing|previous error during capture"):
        captured(lambda: work(x))
    assert found[refused] == 1
    assert found["refused 901 end capture"] == 1


def test_a_capture_must_be_joined() -> None:
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()

    def forks() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined work"):
        captured(forks)


def test_a_capture_may_not_wait_for_what_is_outside() -> None:
    x, outside = torch.ones(8, device="cuda"), torch.cuda.Event()
    outside.record()

    def waits() -> None:
        outside.wait()
        x.add_(1)

    with pytest.raises(RuntimeError, match=r"previous error during capture|uncaptured work"):
        captured(waits)


def test_an_event_of_a_capture_is_not_the_hosts() -> None:
    event = torch.cuda.Event()
    captured(lambda: event.record() or torch.ones(8, device="cuda").add_(1))
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        event.query()


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_another_threads_allocation_spoils_a_global_capture_alone(mode: str) -> None:
    x = torch.ones(8, device="cuda")
    failed: list[BaseException] = []

    def allocates() -> None:
        try:
            torch.empty(1 << 34, dtype=torch.uint8, device="cuda")  # from the device: nothing so large is cached
        except RuntimeError as error:
            failed.append(error)

    def work() -> None:
        thread = threading.Thread(target=allocates)
        thread.start()
        thread.join()
        x.add_(1)

    torch.cuda.empty_cache()
    if mode == "thread_local":
        captured(work, mode)
        assert not failed
    else:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            captured(work, mode)
        assert failed


# -- a graph's copies, and memory that is gone ------------------------------------------------------------------------


def on_device() -> Tensor:
    """A tensor that has memory of the device by itself."""
    torch.cuda.empty_cache()
    return torch.ones(1 << 22, device="cuda")


def test_a_graph_whose_copy_reads_freed_memory_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """On a GPU such a launch crashed within the driver. Memory in the allocator's cache is still there."""
    sources, target = [on_device()], on_device()
    graph = captured(lambda: target.copy_(sources[0]))
    graph.replay()
    sources.clear()
    graph.replay()
    torch.cuda.empty_cache()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()
    assert "a graph's memcpy node reads 16777216 bytes at 0x" in capfd.readouterr().err


def test_a_graph_whose_kernel_reads_freed_memory_is_not_noticed() -> None:
    """A kernel's arguments have no types here, so that no address among them is known. A limit, told in docs/gpu.md."""
    sources = [on_device()]
    graph = captured(lambda: sources[0] + 1)
    sources.clear()
    with counted() as found:
        torch.cuda.empty_cache()
        graph.replay()
    assert found["free device"] == 1
    assert not of(found, "refused")
