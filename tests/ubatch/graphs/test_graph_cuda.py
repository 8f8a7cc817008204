"""`CudaGraphs`, driven against a stand-in for `torch.cuda` that logs the calls and fails where it is told to.

Checked here: the order of calls, what is undone after a failure, and when pools begin and end. That CUDA really
captures is checked by the tests marked `gpu` (`test_graphs*.py`).
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ubatch import ConfigError, CudaGraphs
from ubatch.graphs import cuda as module


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Without a pool: one of its own, and a capture that does not fail."""
        assert not gc.isenabled()
        self._fails = None if pool is None else self._cuda.fails
        self._cuda.log.append(f"begin on {self._cuda.current.name} in {pool}, {capture_error_mode}")
        if pool in self._cuda.host_underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._cuda.underway.append(pool)
        self._cuda.host_underway.append(pool)
        if self._fails == "begin":
            raise RuntimeError("cannot begin")
        self._cuda.reserved += 100

    def capture_end(self) -> None:
        assert not gc.isenabled()
        self._cuda.log.append(f"end on {self._cuda.current.name}")
        if self._fails is not None:
            raise RuntimeError("cannot end")
        self._cuda.host_underway.remove(self._cuda.underway.pop())

    def replay(self) -> None:
        self._cuda.log.append(f"replay on {self._cuda.current.name}")

    def reset(self) -> None:
        self._cuda.log.append("reset")


class Cuda:
    """What `ubatch.graphs.cuda` uses of torch.

    Attributes:
        underway: pools that the device's allocator believes are being captured into.
        host_underway: those that the allocator of pinned memory does.
        fails: "begin" or "end".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.underway: list[str] = []
        self.host_underway: list[str] = []
        self.fails: str | None = None
        self.reserved = 0
        self.streams = itertools.chain(["warm-up", "capture"], (f"capture {n}" for n in itertools.count(2)))
        self.current = Stream(self, "user's")
        self.pools = iter(["pool 1", "pool 2", "pool 3"])
        note = self.log.append
        for name, stand_in in {
            "current_device": lambda: 0,
            "Stream": lambda device: Stream(self, next(self.streams)),
            "current_stream": lambda device: self.current,
            "stream": self.on,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device: note("synchronize"),
            "empty_cache": lambda: note("empty_cache"),
            "graph_pool_handle": lambda: next(self.pools),
            "memory_reserved": lambda device: self.reserved,
            "CUDAGraph": lambda: Graph(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch, "zeros", lambda *_, device: note(f"a kernel on {self.current.name}"))
        monkeypatch.setattr(module, "CudaStreams", lambda device: SimpleNamespace(device=torch.device("cuda:0")))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocate, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda device, pool: note(f"release {pool} on {device}"), raising=False
        )

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def end_allocate(self, device: int, pool: str) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording to mempool_id")
        self.underway.remove(pool)
        self.log.append(f"end allocating to {pool} on {device}")

    def logged(self) -> list[str]:
        """What was logged since the last time."""
        entries = list(self.log)
        self.log.clear()
        return entries


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def captured(graphs: CudaGraphs) -> Any:
    with graphs.capture() as capture:
        capture.begin()
        with capture.part():
            pass
        return capture.end()


def test_a_capture_in_order(cuda: Cuda) -> None:
    graphs = CudaGraphs("cuda")
    assert graphs.device == torch.device("cuda", 0)
    assert gc.isenabled()
    recording = captured(graphs)
    assert gc.isenabled()
    assert recording.nbytes == 100
    assert cuda.logged() == ["synchronize", "empty_cache", "begin on capture in pool 1, thread_local", "end on capture"]
    recording.take_turn()
    recording.replay()
    assert cuda.logged() == ["replay on user's"]


def test_a_warm_up_is_ordered_with_the_callers_stream_also_if_it_fails(cuda: Cuda) -> None:
    graphs = CudaGraphs("cuda:0")

    def warm_up() -> None:
        with graphs.warming_up():
            cuda.log.append(f"run on {cuda.current.name}")
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        warm_up()
    assert cuda.logged() == ["warm-up waits for user's", "run on warm-up", "user's waits for warm-up"]


def test_replays_of_one_pool_never_overlap_on_two_streams(cuda: Cuda) -> None:
    graphs = CudaGraphs("cuda")
    first, second = captured(graphs), captured(graphs)
    cuda.logged()
    first.take_turn()
    second.take_turn()
    assert cuda.logged() == [], "one stream keeps its order"
    with cuda.on(Stream(cuda, "another")):
        first.take_turn()
        second.take_turn()
    second.take_turn()
    assert cuda.logged() == ["another waits for user's", "user's waits for another"]


def test_graphs_share_a_pool_until_the_last_is_released(cuda: Cuda) -> None:
    graphs = CudaGraphs("cuda")
    first, second = captured(graphs), captured(graphs)
    first.release()
    third = captured(graphs)
    for recording in (second, third):
        recording.release()
    captured(graphs)
    begun = [entry.split(" in ")[1] for entry in cuda.logged() if entry.startswith("begin")]
    assert begun == [*["pool 1, thread_local"] * 3, "pool 2, thread_local"], "a pool that is empty is not used again"
    assert graphs.another()._pool is None


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_after_a_failure_the_allocator_knows_that_nothing_is_captured(cuda: Cuda, fails: str) -> None:
    graphs = CudaGraphs("cuda")
    cuda.fails = fails
    with pytest.raises(RuntimeError, match=f"cannot {fails}"):
        captured(graphs)
    assert not cuda.underway
    assert gc.isenabled()
    log = cuda.logged()
    assert log[-9:] == [
        "end on capture",
        "reset",
        "end allocating to pool 1 on 0",
        "release pool 1 on 0",
        "begin on capture 2 in None, thread_local",  # for the generator of random numbers
        "a kernel on capture 2",
        "end on capture 2",
        "reset",
        "synchronize",
    ]
    cuda.fails = None
    captured(graphs)
    assert "begin on capture 2 in pool 2, thread_local" in cuda.logged()


def test_after_a_failure_others_live_and_the_next_is_captured_elsewhere(cuda: Cuda) -> None:
    """The allocator of pinned memory refuses the pool from now on, and nobody can tell it otherwise."""
    graphs = CudaGraphs("cuda")
    lives = captured(graphs)
    cuda.fails = "end"
    with pytest.raises(RuntimeError, match="cannot end"):
        captured(graphs)
    cuda.fails = None
    cuda.logged()
    for _ in range(2):
        captured(graphs)
    begun = [entry for entry in cuda.logged() if entry.startswith("begin")]
    assert begun == ["begin on capture 2 in pool 2, thread_local"] * 2
    lives.replay()
    assert cuda.logged() == ["replay on user's"]


def test_an_error_of_the_model_ends_the_capture_and_drops_what_was_recorded(cuda: Cuda) -> None:
    graphs = CudaGraphs("cuda")

    def fail() -> None:
        with graphs.capture() as capture:
            capture.begin()
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert not cuda.underway
    assert gc.isenabled()
    assert cuda.logged()[-3:] == ["end on capture", "reset", "synchronize"]


def test_a_capture_that_never_began_is_not_ended(cuda: Cuda) -> None:
    with CudaGraphs("cuda").capture():
        pass
    assert cuda.logged() == ["synchronize", "empty_cache"]


def test_only_cuda_has_cuda_graphs() -> None:
    with pytest.raises(ConfigError, match=r"CUDA graphs need a CUDA device, not 'cpu'\. Move the module there"):
        CudaGraphs("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="this torch sees no CUDA device"):
            CudaGraphs("cuda")
