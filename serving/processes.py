"""Processes of ours: whether the one that started this one lives, how one has ended, and their end."""

import multiprocessing
import os
import select
import signal
import time
from collections.abc import Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path

from ubatch.errors import UBatchError

_KILLED_S, _TOLD_S, _LOOK_S = 30.0, 5.0, 0.05


class Orphaned(UBatchError):
    """The process that started this one is gone."""


def check_parent() -> None:
    """Check that the process that started this one still runs: it holds the other end of a pipe. Takes microseconds.

    Raises:
        Orphaned: it is gone.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and is_readable(parent.sentinel):
        raise Orphaned(f"the process that started it ({parent.pid}) is gone.")


def is_readable(descriptor: int, wait_s: float | None = 0) -> bool:
    """Whether a read from a descriptor would not block: there is something to read, or its other end is closed.

    Args:
        wait_s: how long to wait for that, in seconds; None without limit.
    """
    return _is_ready(descriptor, select.POLLIN, wait_s)


def is_writable(descriptor: int, wait_s: float | None = 0) -> bool:
    """Whether a write to a descriptor would not block, or would fail. Arguments as of `is_readable`."""
    return _is_ready(descriptor, select.POLLOUT, wait_s)


def _is_ready(descriptor: int, event: int, wait_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if wait_s is None else 1000 * wait_s))


def how_it_ended(process: BaseProcess) -> str:
    """`died with exit status 1` or `was killed by SIGKILL`, of a process that ends now."""
    process.join(1.0)
    status = process.exitcode
    if status is not None and status < 0:
        known = {int(each): each.name for each in signal.Signals}
        return f"was killed by {known.get(-status, f'signal {-status}')}"
    return f"died with exit status {status}"


def process_state(pid: int | None) -> str:
    """The state of a process as a letter of `/proc`: R, S and D are running, sleeping and waiting, T is stopped. Empty
    if it has ended, or this system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_dead(pid: int | None) -> bool:
    """Whether a process has ended, told or not; False where the system does not say. If a thread of it waits for a
    driver, it has not ended, though its main thread has."""
    if not Path("/proc/self/task").exists():
        return False
    try:
        return process_state(pid) == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except FileNotFoundError:
        return True


def kill(processes: Iterable[BaseProcess]) -> list[BaseProcess]:
    """Kill those that still run, and wait for them. Returns those that have not ended 30 s later: they wait for a
    driver or a disk. Those that whoever has forked them does not tell of are taken for ended after 5 s."""
    left = [process for process in processes if process.pid is not None]
    for process in left:
        process.kill()
    begun = time.monotonic()
    while left and (waited_s := time.monotonic() - begun) < _KILLED_S:
        left[0].join(_LOOK_S)
        left = [each for each in left if each.exitcode is None and not (waited_s > _TOLD_S and is_dead(each.pid))]
    return left
