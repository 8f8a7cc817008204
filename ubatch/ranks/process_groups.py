"""Makes the process groups of a connection."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


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
