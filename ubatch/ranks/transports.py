"""The process groups of a connection: made, and kept when it is gone until nothing can wait for them any more.

A process group's destructor waits for stuck operations, up to the transport's time-out, also at exit. So none is
destroyed before that time: it is kept by a reference that the interpreter's exit does not drop. So long, peers may
still read what was sent to them over sockets, too.
"""

import ctypes
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ubatch.ranks.near import NearRanks


def make_process_group(
    ranks: Sequence[int], backend: str, name: str, *, connect_s: float, transport_s: float
) -> dist.ProcessGroup:
    """A process group of only these ranks, under a name chosen by the caller.

    `new_group` either needs every rank of the job, or names the group by the number of groups in this process, which
    differs between ranks that belong to different groups.

    Args:
        ranks: global ranks, this one among them.
        connect_s: how long connecting may take.
        transport_s: how long an operation may take.
    """
    # A group has a communicator of its own also where the job's is bound to a device (`device_id`): torch would split
    # it off the job's, for which NCCL waits for all ranks of the job.
    job = c10d._get_default_group()
    bound, job.bound_device_id = job.bound_device_id, None
    try:
        made = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            c10d._get_default_store(),
            cast(Any, name),
            timeout=timedelta(seconds=connect_s),
        )
    finally:
        job.bound_device_id = bound
    pg: dist.ProcessGroup = made[0]
    c10d._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(ranks)}
    c10d._set_pg_timeout(timedelta(seconds=transport_s), pg)
    return pg


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
