"""Streams and events: one protocol, implemented by CUDA on a GPU and by null objects on a CPU.

All lanes share one compute stream (the caller's current one) and one communication stream; only events are per
lane. On a CPU there are no streams: work is done when the call returns, and transfers progress in the
background, so the null objects do nothing and the code path stays the same.

The SM budget: how many of a GPU's streaming multiprocessors are reserved for communication kernels.

A communication kernel that starts late waits for SMs that persistent GEMMs hold; one that takes too many SMs slows the
GEMMs down. A schedule with `comm_sms` divides the SMs, but only kernels with an adjustable number of SMs can obey:

    budget = current_sm_budget()
    if budget is not None:
        launch(num_sms=budget.compute)      or budget.comm, for a transport
        report_sm_use("my_gemm", obeys=True)

Without a budget no SM is reserved. The programs of the grouped GEMM then take the next free tile dynamically
(`moe.kernels.grouped_gemm`), so that no tile waits for an SM that a transport holds.

`UBatchWrapper.statistics().sm_budget` tells which kernels obeyed. Kernels in a captured graph keep the budget of the
capture.

Source: DeepEP's `Buffer.set_num_sms`; SGLang's `num_sms` of its single-batch overlap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ubatch.errors import ConfigError


class Event(Protocol):
    """A marked position in a stream that another stream can wait for."""

    def record(self, stream: Any) -> None:
        """Mark all work queued on `stream` so far."""

    def wait(self, stream: Any) -> None:
        """Let later work of `stream` start only after the marked work."""

    def query(self) -> bool:
        """Whether the marked work is done; True if nothing was marked. Not while a graph is captured."""

    def synchronize(self) -> None:
        """Block the calling thread until the marked work is done. Not while a graph is captured."""


class StreamBackend(Protocol):
    """Stream operations of a device."""

    def current(self) -> Any:
        """The calling thread's current stream."""

    def set_current(self, stream: Any) -> None:
        """Make `stream` the calling thread's current stream."""

    def new_stream(self) -> Any:
        """A new stream."""

    def new_event(self) -> Event:
        """A new event without timing."""

    def warm_up(self) -> None:
        """Bind the calling thread to the device, before anything is timed or captured."""

    def sm_count(self) -> int:
        """Number of streaming multiprocessors of the device; 0 for a CPU."""


class NullEvent:
    """An event of a CPU: earlier work is always done."""

    def record(self, stream: Any) -> None:
        """Nothing to mark."""

    def wait(self, stream: Any) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class NullStreams:
    """Streams of a CPU, which has one: None."""

    def current(self) -> None:
        """Always None."""

    def set_current(self, stream: Any) -> None:
        """Do nothing: there is only one stream."""

    def new_stream(self) -> None:
        """Always None."""

    def new_event(self) -> NullEvent:
        return NullEvent()

    def warm_up(self) -> None:
        """Do nothing: a CPU needs no warm-up."""

    def sm_count(self) -> int:
        """Always 0: a CPU has no SMs."""
        return 0


class CudaStreams:
    """Streams of one CUDA device; without an index in `device`, the calling thread's current one.

    Attributes:
        device: with its index.

    Raises:
        ConfigError: there is no CUDA device, or not one with this index.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device {device} asked for, but this torch sees no CUDA device. Use device='cpu'.")
        index: int | None = device.index
        count = torch.cuda.device_count()
        if index is not None and index >= count:
            raise ConfigError(
                f"device {device} asked for, but this torch sees {count} CUDA devices. Use 'cuda:0' to "
                f"'cuda:{count - 1}', or 'cuda' for the current one."
            )
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def set_current(self, stream: Any) -> None:
        torch.cuda.set_stream(stream)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def warm_up(self) -> None:
        torch.cuda.set_device(self.device)

    def sm_count(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)


def mark_now(device: torch.device) -> Event:
    """An event behind all that is queued on the current stream of a CUDA device."""
    streams = CudaStreams(device)
    event = streams.new_event()
    event.record(streams.current())
    return event


def make_streams(device: torch.device) -> StreamBackend:
    """The stream back end of `device`.

    Raises:
        ConfigError: the device is neither a CPU nor an existing CUDA device.
    """
    if device.type == "cpu":
        return NullStreams()
    if device.type == "cuda":
        return CudaStreams(device)
    raise ConfigError(f"device {device} is not supported. Use 'cpu' or 'cuda'.")


@dataclass(frozen=True)
class SMBudget:
    """A device's SMs, divided between compute and communication.

    Attributes:
        total: SMs of the device.
        comm: SMs that communication kernels may take, at least 1 and less than `total`.

    Raises:
        ConfigError: no SM is left for one of the two.
    """

    total: int
    comm: int

    def __post_init__(self) -> None:
        if not 0 < self.comm < self.total:
            raise ConfigError(
                f"comm_sms is {self.comm}, but must be 1 to {self.total - 1} on a device with {self.total} streaming "
                "multiprocessors, or 0 to share all of them."
            )

    @property
    def compute(self) -> int:
        """SMs for compute kernels."""
        return self.total - self.comm


def merge_sm_use(users: dict[str, bool], *reports: Mapping[str, bool]) -> None:
    """Merge reports into `users`; a kernel that once took more than its share stays False."""
    for report in reports:
        for user, obeys in list(report.items()):
            users[user] = obeys and users.get(user, True)


def share_out_sms(comm_sms: int, streams: StreamBackend) -> SMBudget | None:
    """The budget of a step whose schedule reserves `comm_sms`; None if it reserves none, or the device has no SMs.

    Raises:
        ConfigError: the device has too few.
    """
    total = streams.sm_count() if comm_sms else 0
    return SMBudget(total, comm_sms) if total else None
