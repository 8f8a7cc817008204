"""NVSHMEM, for `deep_ep_standin`: what a process may join, and what DeepEP asserts of it.

Source: DeepEP 2.1, `Buffer::sync` in `csrc/legacy/buffer.hpp` and `init` in `csrc/kernels/backend/nvshmem.cu`. The real
assertion is that a rank's number is the one that NVSHMEM knows; here it fails on every rank, as it does on most.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from deep_ep_standin_events import place, require


@dataclass
class Shmem:
    """NVSHMEM, of which a process has one. The first buffer with RDMA memory starts it, the last one ends it.

    Attributes:
        ranks: global, that it joins.
        queues: to each of them, as the first buffer asked.
        users: buffers.
        team: whether a buffer split a team off, which only one may.
    """

    ranks: list[int]
    queues: int
    users: int = 0
    team: bool = False


_shmem: list[Shmem] = []


def join(buffer: Any, ranks: list[int], queues: int) -> Shmem:
    """What `Buffer::sync` and `nvshmem::init` do."""
    joined = ranks if buffer.low_latency_mode else ranks[buffer.rank % place.node :: place.node]
    if not _shmem:
        _shmem.append(Shmem(joined, queues))
    (shmem,) = _shmem
    require(shmem.ranks == joined, f"NVSHMEM has joined ranks {shmem.ranks}, not {joined}")
    if buffer.low_latency_mode and buffer.num_nodes > 1:
        require(not shmem.team, "cpu_rdma_team == NVSHMEM_TEAM_INVALID: a second low-latency buffer")
        shmem.team = True
    shmem.users += 1
    weakref.finalize(buffer, _leave, shmem).atexit = False
    return shmem


def _leave(shmem: Shmem) -> None:
    shmem.users, shmem.team = shmem.users - 1, False
    if not shmem.users:
        _shmem.clear()
