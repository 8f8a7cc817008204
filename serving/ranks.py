"""Ranks on this machine: one process each, gloo between them, pinned to cores.

Under `torchrun` (RANK and WORLD_SIZE in the environment) the launcher has started the processes; this one joins them.
Otherwise the ranks are spawned here, and if one fails the others are ended. They rendezvous in a file of a private
folder, and gloo listens on the loopback address only.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from serving.logs import log_event
from serving.network import LOOPBACK, choose_interface
from serving.processes import how_it_ended, kill
from ubatch import ConfigError, UBatchError
from ubatch.process import num_cores

_logger = logging.getLogger(__name__)

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_START_TIMEOUT = timedelta(minutes=5)


class RankFailed(UBatchError):
    """A rank's process ended with an error; the message has its traceback."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu") -> Any:
    """Call `fn(rank, world_size, *args)` on every rank; returns rank 0's (picklable) result.

    `fn` must be a function of a module. Under a launcher the result is None on the other ranks.

    Args:
        fn: function of a module.
        world_size: number of ranks.
        args: further arguments of `fn`, picklable.
        device: `cpu`: every rank computes on one thread, pinned to one core if there are enough; `cuda`: rank i uses
            GPU i of its machine, and is pinned to the cores near it.

    Raises:
        ConfigError: a launcher started another number of ranks.
        RankFailed: a rank raised; the others are ended.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        launched = int(os.environ["WORLD_SIZE"])
        if launched != world_size:
            raise ConfigError(f"{world_size} ranks asked for, but the launcher started {launched}. Make them agree.")
        _choose_launched_interface()
        return _run_rank(fn, int(os.environ["RANK"]), world_size, device, args)
    context = mp.get_context("spawn")
    readers, ranks = [], []
    with (
        terminated_as_exit(),
        tempfile.TemporaryDirectory(prefix="ubatch-ranks-", ignore_cleanup_errors=True) as folder,
    ):
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_spawned, args=(fn, rank, world_size, f"{folder}/store", writer, device, args), daemon=True
                )
                process.start()
                writer.close()  # the rank holds the other copy; when it dies, the reader ends
                readers.append(reader)
                ranks.append(process)
            result = _collect(readers, ranks)
            for process in ranks:
                process.join()
            return result
        finally:
            kill(ranks)


def _collect(readers: Sequence[Any], ranks: Sequence[Any]) -> Any:
    """Wait until every rank has reported; returns rank 0's result. Waiting uses no core: the ranks need them."""
    result: Any = None
    waiting = dict(zip(readers, range(len(readers)), strict=True))
    while waiting:
        ready: list[Any] = wait(list(waiting))
        for reader in ready:
            rank = waiting.pop(reader)
            try:
                value, error = reader.recv()
            except EOFError:
                ranks[rank].join()
                raise RankFailed(f"rank {rank} {how_it_ended(ranks[rank])}.") from None
            if error is not None:
                raise RankFailed(f"rank {rank} failed:\n{error}")
            if rank == 0:
                result = value
    return result


@contextmanager
def terminated_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the ranks are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _spawned(
    fn: Callable[..., Any], rank: int, world_size: int, store: str, writer: Any, device: str, args: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        choose_interface(LOOPBACK)
        writer.send((_run_rank(fn, rank, world_size, device, args, dist.FileStore(store)), None))
    except BaseException:
        writer.send((None, traceback.format_exc()))
        sys.exit(1)


def _choose_launched_interface() -> None:
    """On one machine, listen on loopback only; on several, warn that the network must be private."""
    everywhere = os.environ["WORLD_SIZE"]
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == everywhere:
        choose_interface(LOOPBACK)
    elif os.environ["RANK"] == "0":
        log_event(
            _logger,
            "ranks on several machines are not authenticated: torchrun, gloo and NCCL cannot, and whoever reaches them "
            "can run code here; their network must be private (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose one)",
            level=logging.WARNING,
        )


def _run_rank(
    fn: Callable[..., Any], rank: int, world_size: int, device: str, args: Any, store: dist.Store | None = None
) -> Any:
    local = int(os.environ.get("LOCAL_RANK", rank))
    gpu = torch.device("cuda", local) if device == "cuda" else None
    pin_rank(local, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), gpu)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_START_TIMEOUT)
    try:
        result = fn(rank, world_size, *args)
        dist.barrier()
        return result if rank == 0 else None
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- the cores that a rank's threads run on ----------------------------------------------------------------------------
#
# on a CPU     one core of its own: a lane hand-off then takes a fifth of the time
# on a GPU     the cores of the GPU's NUMA node: engine, lanes, the transports' threads and compilers all need some


def pin_rank(local_rank: int, local_size: int, gpu: torch.device | None = None) -> frozenset[int] | None:
    """Pin this thread and the threads that it starts, and set the size of torch's thread pool.

    Args:
        local_rank: index of this process among this machine's processes.
        local_size: number of this machine's processes.
        gpu: the rank's GPU; None for the CPU.

    Returns:
        The cores; None if nothing was pinned. On a CPU, that is because there are fewer cores than ranks; on a GPU,
        because the GPU's NUMA node is unknown or has fewer cores than this rank's share of all cores.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if gpu is None:
        torch.set_num_threads(1)
        return _pin([usable[local_rank]] if len(usable) >= local_size else [])
    torch.set_num_threads(max(1, num_cores() // local_size))
    near = _cores_near(gpu)
    cores = [core for core in usable if core in near]
    return _pin(cores if len(cores) >= len(usable) // max(2, local_size) else [])


def _cores_near(gpu: torch.device) -> set[int]:
    """The cores of a GPU's NUMA node; empty if the system does not know them."""
    properties: Any = torch.cuda.get_device_properties(gpu)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        return _parse_cores((_PCI_DEVICES / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def _parse_cores(text: str) -> set[int]:
    """Parse the kernel's list of cores, for example `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _pin(cores: list[int]) -> frozenset[int] | None:
    if not cores:
        return None
    os.sched_setaffinity(0, cores)
    return frozenset(cores)
