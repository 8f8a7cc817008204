"""CUDA graphs through `torch.cuda.CUDAGraph`.

Reasons for the design:

- The lanes' threads launch into streams whose capture the caller's thread began. CUDA allows that: streams are
  captured, not threads. `capture_error_mode="thread_local"` checks calls that are unsafe *during* a capture (such as
  `cudaMalloc`) in the caller's thread alone, so a watchdog or a loader in another thread does not spoil the capture.
  Reading from or synchronising a captured stream is an error in every mode, in every thread.
- The allocator chooses by stream: memory allocated on the capture stream, or on a stream forked from it, comes from the
  pool, in whichever thread.
- Warm-up uses a separate stream. Libraries keep one workspace per stream. Those of the capture stream are thus
  allocated during the capture, in the pool, and live as long as the graphs that use them.
- After a failed `capture_end`, PyTorch's allocators still think that a capture is under way. `_abort` resets the device
  allocator. The pinned-memory allocator cannot be reset and refuses another capture into the same pool, so the next
  capture gets a new pool; existing graphs keep theirs. It also gets a new stream, because a library's workspace must
  not be in a pool that may be freed before the graphs that use it. The random generator of the device believes so, too,
  and refuses to draw a number outside a graph: only a capture that ends well tells it otherwise, so `_abort` makes one.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ubatch.errors import ConfigError
from ubatch.streams.graph_protocols import Capture, Recording
from ubatch.streams.streams import CudaStreams

_log = logging.getLogger(__name__)

_broken: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. PyTorch's host allocator may keep a pointer to each, so they are never freed: a few
hundred bytes each."""


class CudaGraphs:
    """Captures on one CUDA device.

    Args:
        device: a CUDA device; without an index, the current one.

    Raises:
        ConfigError: it is not a CUDA device, or does not exist.
    """

    def __init__(self, device: torch.device | str) -> None:
        chosen = torch.device(device)
        if chosen.type != "cuda":
            raise ConfigError(
                f"CUDA graphs need a CUDA device, not {str(chosen)!r}. Move the module there, or use "
                "cudagraph_mode none."
            )
        self._device = CudaStreams(chosen).device
        self._warm_up_stream = torch.cuda.Stream(self._device)
        self._capture_stream = torch.cuda.Stream(self._device)
        self._pool: Any = None
        self._alive = 0
        self._last_stream: torch.cuda.Stream | None = None

    def another(self) -> CudaGraphs:
        return CudaGraphs(self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        side, current = self._warm_up_stream, torch.cuda.current_stream(self._device)
        side.wait_stream(current)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the capture stream cannot use memory that the warm-up stream has cached
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._device), torch.cuda.stream(self._capture_stream):
            capture = _CudaCapture(self)
            try:
                yield capture
            finally:
                capture.close()

    def start_over(self) -> None:
        """Use a new pool and stream for later captures; existing graphs keep theirs.

        One small kernel is captured and forgotten: then random numbers can be drawn outside graphs again.
        """
        self._pool = None
        self._capture_stream = torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._capture_stream):
                graph.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                graph.capture_end()
            graph.reset()
        except RuntimeError as error:  # the error that ended the first capture is the one to raise
            _broken.append(graph)
            _log.warning("random numbers cannot be drawn on %s until a graph is captured: %s", self._device, error)

    def take_turn(self) -> None:
        """See `Recording.take_turn`."""
        stream = torch.cuda.current_stream(self._device)
        if self._last_stream is not None and stream != self._last_stream:
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def count(self, change: int) -> None:
        """Add `change` (1 or -1) to the number of graphs in the pool; a pool without graphs is not used again."""
        self._alive += change
        if not self._alive:
            self._pool = None
            self._last_stream = None


class _CudaCapture:
    """See `ubatch.streams.graph_protocols.Capture`."""

    def __init__(self, graphs: CudaGraphs) -> None:
        self._graphs = graphs
        self._graph = torch.cuda.CUDAGraph()
        self._under_way = False
        self._reserved = 0
        self._collects = False

    def begin(self) -> None:
        device = self._graphs.device
        # Garbage collection in any thread may destroy CUDA objects, which is not allowed during a capture.
        self._collects = gc.isenabled()
        gc.disable()
        self._under_way = True
        self._reserved = torch.cuda.memory_reserved(device)
        self._graph.capture_begin(pool=self._graphs._pool, capture_error_mode="thread_local")

    def part(self) -> nullcontext[None]:
        return nullcontext()

    def end(self) -> Recording:
        self._graph.capture_end()
        self._under_way = False
        grown = torch.cuda.memory_reserved(self._graphs.device) - self._reserved
        return _CudaRecording(self._graphs, self._graph, max(0, grown))

    def close(self) -> None:
        """Abort the capture, unless it has ended or never began."""
        try:
            if self._under_way:
                self._under_way = False
                self._abort()
        finally:
            if self._collects:
                gc.enable()

    def _abort(self) -> None:
        device, pool = self._graphs.device, self._graphs._pool
        try:
            self._graph.capture_end()  # even if it raises, it ends the streams' capture
        except RuntimeError as error:
            _log.debug("ending a failed capture: %s", error)
            self._graph.reset()  # later versions of torch clean up here
            # Otherwise the allocator would never reuse some memory, and the next empty_cache() would fail.
            try:
                torch._C._cuda_endAllocateToPool(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)
            except RuntimeError as unknown:  # the capture failed before it began or after it ended: nothing to clean up
                _log.debug("the allocator knows of no capture: %s", unknown)
            _broken.append(self._graph)
            self._graphs.start_over()
        else:
            self._graph.reset()
        self._graphs.count(0)
        torch.cuda.synchronize(device)


class _CudaRecording:
    """See `ubatch.streams.graph_protocols.Recording`."""

    def __init__(self, graphs: CudaGraphs, graph: torch.cuda.CUDAGraph, nbytes: int) -> None:
        self._graphs = graphs
        self._graph = graph
        self.nbytes = nbytes
        self.take_turn = graphs.take_turn
        self.replay = graph.replay
        graphs.count(1)

    def release(self) -> None:
        torch.cuda.synchronize(self._graphs.device)  # the graph may be running
        self._graph.reset()
        self._graphs.count(-1)
