"""DeepEP's buffers: how large, how many a process may have, and whose turn it is on them.

A `deep_ep.Buffer` is registered memory, made by all ranks together:

    made       at the first launch that needs it, which every rank reaches at the same place; never during capture
    made anew  after the group was reset, on the group's new connection

**How many.** One with RDMA memory joins its ranks by NVSHMEM, which a process has once (DeepEP 2.1: `Buffer::sync` in
`csrc/legacy/buffer.hpp`, `init` in `csrc/kernels/backend/nvshmem.cu`):

    low latency    joins all ranks. Beyond one node it also splits off a team, and asserts that there is none yet: a
                   second buffer fails. Within a node there is no team, and NVSHMEM only counts how often it was joined
                   (`nvshmemi_init_counter` in its `src/host/init/init.cu`): any number of buffers
    normal         within a node has no RDMA memory. Beyond one it joins the ranks that have the same place in their
                   nodes, and asserts that its place among them is the one that NVSHMEM knows

So beyond one node a low-latency buffer is the only one of its process, and normal kernels run on it too: it is made for
both (`BufferSize.both`), in low-latency mode, as in DeepEP's `tests/legacy/test_internode.py`.

**Turns.** Beyond one node normal kernels write where low-latency ones expect zeros; DeepEP asks for
`clean_low_latency_buffer` between them, on all ranks (`deep_ep/buffers/legacy.py`).

**Queues.** DeepEP checks that a queue holds the messages of one buffer, not of several on the same queues. There are
several within a node only, where rows are stored over NVLink and use no queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from ubatch import ConfigError, capturing
from ubatch.ranks import Connection, Queued, holding_gil

BufferT = TypeVar("BufferT")

NODE = 8
"""Ranks that DeepEP takes to be one node's, joined by NVLink."""
_BUFFER_S = 300.0
"""How long all ranks may take to make a buffer, or to end one; Python's lock is held, and DeepEP sets no limit."""


def in_one_node(ranks: int) -> bool:
    """Whether DeepEP takes so many ranks to be one node's."""
    return ranks <= NODE


@dataclass(frozen=True)
class BufferSize:
    """What a `deep_ep.Buffer` is made for.

    Attributes:
        nvl_bytes, rdma_bytes: of memory, within a node and between nodes; low latency has all of it in the latter.
        queues: to every other rank.
        num_sms: the most that its normal kernels may take.
        low_latency: whether low-latency kernels run on it.
    """

    nvl_bytes: int
    rdma_bytes: int
    queues: int
    num_sms: int = 0
    low_latency: bool = False

    def both(self, other: BufferSize) -> BufferSize:
        """A size that is enough for either, one at a time."""
        return BufferSize(*map(max, astuple(self), astuple(other)))


@dataclass(eq=False)
class SizedBuffer:
    """A `deep_ep.Buffer`, and what was launched on it last.

    Attributes:
        size: what it was made for.
        under_way: the low-latency transfer that was launched last.
        dirty: it is new, or normal kernels ran on it since it was cleaned.
        cleaned_in: the capture whose graph cleans it last.
    """

    deep_ep: Any
    size: BufferSize
    under_way: Queued = field(default_factory=Queued)
    dirty: bool = True
    cleaned_in: object = None

    def launch(self, hook: Any) -> Queued:
        """A low-latency transfer is under way, which `hook` receives."""
        self.under_way = Queued(hook)
        return self.under_way


@dataclass(frozen=True)
class _Join:
    """Global ranks that NVSHMEM joins, in its order, and whether all of a group's, for low latency."""

    ranks: tuple[int, ...]
    low_latency: bool


_joins: WeakKeyDictionary[Any, _Join] = WeakKeyDictionary()
"""Of the buffers with RDMA memory that this process has."""


def _make_buffer(name: str, deep_ep: Any, connection: Connection, size: BufferSize) -> SizedBuffer:
    """Refused where the process has a buffer next to which DeepEP cannot make this one."""
    ranks = connection.ranks
    joins = ranks if size.low_latency else ranks[ranks.index(connection.rank) % NODE :: NODE]
    alone = size.low_latency and not in_one_node(len(ranks))
    if size.rdma_bytes and any(alone or other.ranks != joins for other in _joins.values()):
        kinds = " and ".join(sorted({"low latency" if each.low_latency else "normal" for each in _joins.values()}))
        raise ConfigError(
            f"all2all back end {name!r} needs a DeepEP buffer of its own, but this process has one already ({kinds}), "
            "and DeepEP joins ranks of several nodes once in a process. Use one back end for all layers and steps "
            "('deepep_auto' for prefill and decode), with one hidden size and number of experts; or 'deepep_v2'."
        )
    buffer = deep_ep.Buffer(
        connection.pg, size.nvl_bytes, size.rdma_bytes, low_latency_mode=size.low_latency, num_qps_per_rank=size.queues
    )
    if size.rdma_bytes:
        _joins[buffer] = _Join(joins, size.low_latency)
    return SizedBuffer(buffer, size)


class DeepEPBuffers(Generic[BufferT]):
    """Buffers by key, each made at its first use.

    Args:
        make: makes one; every rank calls it at the same launch.
    """

    def __init__(self, name: str, make: Callable[[Connection, tuple[int, ...]], BufferT]) -> None:
        self._name = name
        self._make = make
        self._connection: Connection | None = None
        self._buffers: dict[tuple[int, ...], BufferT] = {}

    def get(self, connection: Connection, *key: int) -> BufferT:
        """The buffer for `key`, on `connection`.

        Raises:
            ConfigError: it would have to be made while a graph is captured.
        """
        if connection is not self._connection:
            if self._buffers:  # each waits for its peers when it goes
                with holding_gil("DeepEP's buffers", _BUFFER_S):
                    self._buffers.clear()
            self._connection = connection
        if key not in self._buffers:
            if capturing():
                raise ConfigError(
                    f"all2all back end {self._name!r} has no buffer for this lane and shape yet, and cannot make one "
                    "while a graph is captured. Run the same step once before."
                )
            with holding_gil("DeepEP's buffer", _BUFFER_S):
                self._buffers[key] = self._make(connection, key)
        return self._buffers[key]


class SizedBuffers(DeepEPBuffers[SizedBuffer]):
    """`deep_ep.Buffer`s.

    They hold none of the back ends: DeepEP lets go of a buffer when nobody has it, which all ranks do together.

    Args:
        size_of: what one is made for, by hidden size; the same on every rank.
    """

    def __init__(self, name: str, deep_ep: Any, size_of: Callable[[int], BufferSize]) -> None:
        super().__init__(name, lambda connection, key: _make_buffer(name, deep_ep, connection, size_of(key[2])))

    def buffer_for(self, x: Tensor, connection: Connection, lane: int = 0, chunk: int = 0) -> SizedBuffer:
        """The buffer for `x [T, H]`, of one lane and chunk where they have buffers of their own.

        Raises:
            ConfigError: see `get`; or the process has a buffer next to which DeepEP cannot make this one.
        """
        return self.get(connection, lane, chunk, x.shape[1], x.device.index or 0)
