"""Expert-parallel transports, behind one protocol.

    local                       one rank, nothing travels
    torch_dist                  all-to-alls of exactly the rows needed; gloo or NCCL
    allgather_reducescatter     every token to every rank; no exchange of counts
    emulated_link               another back end over a link of chosen latency and bandwidth

Each is imported when first asked for, so that one which needs a library or a device does not burden the others.
"""

from __future__ import annotations

from moe.all2all.base import All2All, All2AllTraits, Dispatched
from moe.all2all.link import EmulatedLink, LinkStatistics
from moe.all2all.registry import all2all_backends, make_all2all, register_all2all_backend

__all__ = [
    "All2All",
    "All2AllTraits",
    "Dispatched",
    "EmulatedLink",
    "LinkStatistics",
    "all2all_backends",
    "make_all2all",
    "register_all2all_backend",
]
