"""Shared tools of the sections: the device, timing on it, its ceilings, and the time left.

arm       a function that runs something once and returns its milliseconds
blocks    arms interleaved A B B A (`serving.workbench.bench.statistics.interleave_arms`)
ceiling   the most that this device can do, measured: copies on it, copies to the host, matrix products
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from serving.workbench.bench.statistics import bootstrap, environment, interleave_arms, timed
from serving.workbench.gpu.report import Arms
from ubatch import UBatchError

if TYPE_CHECKING:
    from ubatch import GraphBackend

_LEAST_MS = 2.0
"""Shortest time of an arm: events have a resolution of half a microsecond, and starting a replay takes time."""
_MOST_REPEATS = 50


@dataclass(frozen=True)
class Captured:
    """A graph, and what it captured: `run` holds the tensors that the graph reads, wherever they were made."""

    graph: torch.cuda.CUDAGraph
    run: Callable[[], object]

    def replay(self) -> None:
        self.graph.replay()


class OutOfTime(UBatchError):
    """A section has used up its time; its results so far are kept."""


@dataclass
class Bench:
    """One section's tools.

    Attributes:
        tiny: use shapes for a smoke test.
        budget_s: seconds that this section may take; no new table row starts after that.
        graphs: captures overlapped steps; None uses the device's own graphs, and captures nothing on a CPU.
        show: draw progress bars.
    """

    device: torch.device
    tiny: bool = False
    blocks: int = 15
    budget_s: float = 60.0
    graphs: GraphBackend | None = None
    show: bool = True
    _begun: float = field(default_factory=time.monotonic)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of models: bf16, or fp32 where bf16 is emulated."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def captures(self) -> bool:
        """Whether overlapped steps are captured; if not, every arm runs eagerly."""
        return self.device.type == "cuda" or self.graphs is not None

    @property
    def seconds(self) -> float:
        """Seconds since the section began."""
        return time.monotonic() - self._begun

    def check_time(self, before: str) -> None:
        """Raises `OutOfTime` if the section has used up its budget."""
        if self.seconds > self.budget_s:
            raise OutOfTime(f"out of time before {before}: {self.seconds:.0f} s of {self.budget_s:.0f} s are used up.")

    def warm_up(self, run: Callable[[], object]) -> None:
        """Call `run` so that it compiles, tunes itself and allocates its buffers."""
        for _ in range(1 if self.tiny else 3):
            run()

    def synchronize(self) -> None:
        """Wait for the device; does nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- arms -----------------------------------------------------------------------------------------------------

    def timed(self, run: Callable[[], object]) -> Callable[[], float]:
        """An arm: milliseconds from calling `run` until the device has finished, the host's time included."""
        return timed(run, self.synchronize)

    def launched(self, run: Callable[[], object], calls: int = 1) -> Callable[[], float]:
        """An arm: milliseconds until `run` returns, called on an idle device; the mean of some calls."""
        launch = timed(run)

        def arm() -> float:
            spent = 0.0
            for _ in range(calls):
                self.synchronize()
                spent += launch()
            self.synchronize()
            return spent / calls

        return arm

    def kernel(self, run: Callable[[], object], *, capture: bool = True) -> Callable[[], float]:
        """An arm: the device's milliseconds for one `run`, from a graph of several runs, so that launches cost nothing.

        `run` launches the same work on the same tensors every time. If it cannot be captured, the figure includes
        launches.
        """
        self.warm_up(run)
        once = self.timed(run)()
        if self.device.type != "cuda":
            return self.timed(run)
        repeats = max(1, min(_MOST_REPEATS, round(_LEAST_MS / max(once, 1e-3)) + 1))
        replay = self.captured(run, repeats).replay if capture else (lambda: [run() for _ in range(repeats)])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def arm() -> float:
            begin.record()
            replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / repeats

        return arm

    def captured(self, run: Callable[[], object], repeats: int = 1) -> Captured:
        """`run`, `repeats` times, in a CUDA graph on one stream. Warm up first."""
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                run()
        return Captured(graph, run)

    def step(self, run: Callable[[], object]) -> Callable[[], object]:
        """On a GPU, a function that replays `run` as a graph on one stream; else `run` itself."""
        self.warm_up(run)
        return self.captured(run).replay if self.device.type == "cuda" else run

    def interleave(self, arms: Mapping[str, Callable[[], float]], label: str) -> Arms:
        """Block means of every arm. A smoke test runs each arm once."""
        if self.tiny:
            return {name: [arm()] for name, arm in arms.items()}
        return interleave_arms(arms, self.blocks, label=label, show=self.show)

    # -- ceilings -------------------------------------------------------------------------------------------------

    @cached_property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth of a copy on the device, reads plus writes: the ceiling of memory-bound kernels."""
        source = self._noise(1 << (14 if self.tiny else 31))
        target = torch.empty_like(source)
        # Not in a graph: captured, it moved fewer bytes than kernels that only read.
        return 2 * source.nbytes / self._fastest_s(lambda: target.copy_(source), capture=False)

    @cached_property
    def matrix_flops_per_s(self) -> float:
        """Operations per second of a large product of random matrices, in the dtype of models."""
        n = 32 if self.tiny else 8192
        a, b = self.randn(n, n), self.randn(n, n)
        return 2 * n**3 / self._fastest_s(lambda: a @ b)

    @cached_property
    def host_bytes_per_s(self) -> float:
        """Payload bytes per second to pinned host memory and back, over the time of both directions in turn."""
        source = self._noise(1 << (14 if self.tiny else 28))
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.device.type == "cuda")

        def there_and_back() -> None:
            host.copy_(source, non_blocking=True)
            source.copy_(host, non_blocking=True)

        return source.nbytes / self._fastest_s(there_and_back)

    def randn(self, *shape: int) -> torch.Tensor:
        """Random numbers in the dtype of models; not zeros, which multiply faster."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _noise(self, num_bytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=self.device)

    def _fastest_s(self, run: Callable[[], object], *, capture: bool = True) -> float:
        """Seconds of `run`, the median of a few calls; a ceiling is not interleaved with other arms."""
        arm = self.kernel(run, capture=capture)
        return bootstrap([arm() for _ in range(7)]).median / 1e3


def describe_machine() -> dict[str, Any]:
    """The hardware, the driver, the versions and the commit."""
    found = environment()
    found["triton"] = _version("triton")
    found["cuda"] = torch.version.cuda
    found["commit"] = _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["sms"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def _version(module: str) -> str | None:
    try:
        return str(getattr(__import__(module), "__version__", None))
    except ImportError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
