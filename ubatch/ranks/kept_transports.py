"""Transports of connections that are gone, which are kept until nothing can wait for them any more.

A process group's destructor waits for stuck operations, up to the transport's time-out, also at exit. So none is
destroyed before that time: it is kept by a reference that the interpreter's exit does not drop. So long, peers may
still read what was sent to them over sockets, too.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from ubatch.ranks.near import NearRanks

_kept: list[tuple[float, dist.ProcessGroup | NearRanks]] = []
"""Until when, in seconds of `time.monotonic`, and what."""


def keep(transports: Sequence[dist.ProcessGroup | NearRanks], seconds: float) -> None:
    """Keep transports for so long; those to ranks of this machine send and receive nothing more."""
    for each in transports:
        if isinstance(each, NearRanks):
            each.stop()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        _kept.append((time.monotonic() + seconds, each))


def let_go_of_expired() -> None:
    """Destroy those whose time is over."""
    now = time.monotonic()
    expired = [each for until, each in _kept if until <= now]
    _kept[:] = [(until, each) for until, each in _kept if until > now]
    for each in expired:
        if isinstance(each, NearRanks):
            each.close()
            continue
        with suppress(ValueError):  # the job's process groups were destroyed meanwhile
            dist.destroy_process_group(each)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))


def forget_near_ranks() -> None:
    """In a forked child: let go of the sockets, which are its parent's."""
    near = [each for _, each in _kept if isinstance(each, NearRanks)]
    _kept[:] = [each for each in _kept if not isinstance(each[1], NearRanks)]
    for each in near:
        each.forget()
