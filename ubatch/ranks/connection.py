"""What joins the ranks of a group between two resets, and how a rank that waits learns that another failed.

A connection owns a process group for data, a small CPU one for votes, and a corner of the rendezvous store:

    failed     the first failure: "rank", a line break, what happened     whoever waits reads it and gives up
    suspect    why a rank's transport gave up                             starts a roll call
    alive/R    rank R answered the roll call                              who does not answer is dead

    beat/R     rank R counts on                                           who stands still is dead (`peer_watch`)

No rank waits blindly: every wait is cut into slices, and after each it looks into the store; where the device waits in
the host's place (NCCL), a thread looks, and aborts the communicator so that the device comes back. Once `failed` is
written nothing more is launched: the transport would pair what a peer launched for the step that failed with this
rank's next one. `CommGroup.reset` makes a new connection; what was launched on the old one stays there.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ubatch.errors import ForgedValue, GroupBroken, PeerFailed, TransferTimeout
from ubatch.process.heartbeat import beat
from ubatch.process.interrupts import changing
from ubatch.process.job_store import JobStore
from ubatch.process.lateness import LATE_S, Patience, late_ranks
from ubatch.ranks.launch_order import LaunchOrder
from ubatch.ranks.peer_watch import PeerWatch, weak_call

__all__ = ["Connection", "Work", "lead_again", "leading_connection"]

_SLICE = timedelta(milliseconds=200)
_LOOK_S = 0.02
_GRACE_S = 0.5
"""How long the last rank missing at a roll call may take to answer, before it is named."""
_WAIT_SLACK_S = 1.0
"""What slices of waiting and looks into the store may add to a time-out."""
_TRANSPORT_SLACK = 4
"""The transport's own time-out is so many of ours, and a late rank's time: ours, which names the peer, fires first."""


class Work(Protocol):
    """What a transport returns for an asynchronous operation (`torch.distributed.Work` is one)."""

    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""

    def wait(self, timeout: Any = ...) -> object:
        """Block until it is over."""


class Connection:
    """The ranks of a group, joined. Made by `CommGroup` on every rank at the same time.

    Attributes:
        ranks: global ranks, in group order.
        rank: this process's global rank.
        timeout_s: how long a transfer or a vote may take.
        pg: carries the data.
        vote_pg: carries the votes; always gloo, on the CPU.
        broken: why nothing may be launched any more, or None.
        order: what was launched since the last vote, where `UBATCH_CHECK_ORDER=1`; else None.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout_s: float, name: str, store: JobStore) -> None:
        self.ranks = tuple(ranks)
        self.rank = dist.get_rank()
        self.timeout_s = timeout_s
        self.broken: str | None = None
        self.order = LaunchOrder.wanted() if len(ranks) > 1 else None
        self._store = store.part(name)
        self._dependents: weakref.WeakSet[Connection] = weakref.WeakSet()
        _let_go_of_expired()
        self.pg = self._process_group(backend, f"{name}/data")
        self.vote_pg = self._process_group("gloo", f"{name}/vote")
        weakref.finalize(self, _keep, (self.pg, self.vote_pg), self._transport_timeout_s)
        self._watch: PeerWatch | None = None
        _connections.add(self)
        if torch.cuda.is_available() and self.is_stream_ordered(torch.device("cuda")):
            self.watch()

    def leading(self) -> AbstractContextManager[object]:
        """Make this the connection whose ranks take the current step together.

        Whoever waits on another connection in that step looks out here too, for the peer that failed may never come
        there; and when this connection breaks, so do those that its steps used, for they are out of step as well.
        """
        return changing(_leader, self)

    def check_usable(self) -> None:
        """Refuse to launch on a connection that is out of step.

        Raises:
            GroupBroken: a rank failed.
        """
        leader = _leader.get()
        if leader is not None and leader is not self:
            leader._dependents.add(self)
        if self.broken is not None:
            raise GroupBroken(f"the group of ranks {list(self.ranks)} is out of step: {self.broken} Call reset().")

    def used(self, other: Connection) -> bool:
        """Whether `other` was launched on in a step of this one."""
        return other in self._dependents

    def note_launch(self, lane: int, name: str, x: Tensor) -> None:
        """A transfer is launched, in the steps of the connection whose ranks vote. See `ubatch.ranks.launch_order`."""
        order = (_leader.get() or self).order
        if order is not None:
            order.note(lane, name, x)

    def orders(self, patience_s: float) -> dict[int, list[str]]:
        """What every rank has launched since the last vote, of those that say so within `patience_s`."""
        mine = self.order.launches if self.order is not None else []
        orders: dict[int, list[str]] = {}
        with suppress(dist.DistError, ForgedValue):  # it only adds to an error that is under way
            self._store.set(f"order/{self.rank}", "\n".join(mine))
            deadline = time.monotonic() + patience_s
            while len(orders) < len(self.ranks):
                for rank in self.ranks:
                    if rank not in orders and self._store.check([f"order/{rank}"]):
                        orders[rank] = self._store.get(f"order/{rank}").splitlines()
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_S)
        return orders

    def wait_for_works(self, works: Iterable[Work], name: str, check: Callable[[], None] | None = None) -> None:
        """Wait for a transport's works without using the CPU, looking out for failed peers.

        Args:
            works: what the transport returned.
            name: what errors call them.
            check: called now and then; may raise to end the wait.

        Raises:
            PeerFailed: a rank reported an error, or died.
            GroupBroken: this rank failed while it waited, in another thread, or `reset()` was called.
            TransferTimeout: not over within `timeout_s`, beside the time in which a peer was late
            (`ubatch.process.lateness`).
        """
        leader = _leader.get() or self
        patience = Patience(self.timeout_s, {*leader.ranks, *self.ranks} - {self.rank})
        for work in works:
            while not self._arrived(work, name):
                beat()
                if check is not None:
                    check()
                leader._look_out(name)
                self._look_out(name)
                if patience.over():
                    self.fail(f"rank {self.rank} waited for {name!r} longer than {self.timeout_s} s.")
                    raise TransferTimeout(
                        f"{self.broken} No peer of ranks {list(self.ranks)} reported a failure. If the step really is "
                        "that slow, raise timeout_s; else a rank does not take part in it. Call reset()."
                    )

    @property
    def longest_wait_s(self) -> float:
        """How long `wait_for_works` may take while no peer is late: until its time-out, and then for a roll call."""
        return 2 * self.timeout_s + _WAIT_SLACK_S

    def is_stream_ordered(self, device: torch.device) -> bool:
        """Whether waiting for a work only orders the device's streams and returns, as NCCL's does (gloo's blocks)."""
        kind = torch.device(device.type)
        if kind.type == "cpu" or kind not in self.pg._device_types:
            return False
        return self.pg._get_backend(kind).name() != "gloo"

    def watch(self, beat_s: float = 1.0) -> None:
        """Look out for failed peers in a thread of its own, from now until this connection breaks or is replaced."""
        if len(self.ranks) == 1 or self._watch is not None:
            return
        self._watch = PeerWatch(
            self.rank,
            self.ranks,
            self._store,
            self.timeout_s,
            failed=weak_call(self._adopt),
            lost=weak_call(self._lost),
            forged=weak_call(self.fail),
            beat_s=beat_s,
        )
        weakref.finalize(self, self._watch.stop)
        self._watch.start()

    def fail(self, what: str, rank: int | None = None) -> None:
        """Let nothing more be launched here, nor on what was used in this connection's steps, and tell the peers.

        Args:
            what: a sentence.
            rank: the global rank to blame; this one by default.
        """
        if self.broken is not None:
            return
        self.broken = what
        blamed = self.rank if rank is None else rank
        with suppress(dist.DistError, ForgedValue):  # the store may be dead, or forged: the peers learn it likewise
            self._store.compare_set("failed", "", f"{blamed}\n{what}")
        self._abort()
        for dependent in list(self._dependents):
            dependent.fail(what, blamed)

    def retire(self) -> None:
        """A new connection replaces this one; whoever still waits here gives up."""
        if self.broken is None:
            self.broken = "reset() was called meanwhile."
            self._abort()

    def adopt_failure(self) -> None:
        """Break if a peer has reported a failure here that this rank did not have to wait to see."""
        if self.broken is None and len(self.ranks) > 1:
            self._adopt()

    # -- what the watch does --------------------------------------------------------------------------------------

    def _adopt(self) -> bool:
        """Break if a peer has reported a failure; whether one has, or this connection is broken anyway."""
        if self.broken is None and self._store.check(["failed"]):
            rank, what = self._failure()
            self.fail(what, rank)
        return self.broken is not None

    def _lost(self, rank: int) -> None:
        """A peer gave no sign of life; -1: the store itself is gone."""
        if rank < 0:
            self._store_lost("the watch")
            self._abort()
        else:
            self.fail(f"rank {rank} gave no sign of life for {self.timeout_s} s.", rank)

    def _abort(self) -> None:
        """Nothing runs here any more: let kernels that wait for a peer end, so that the device comes back."""
        if self._watch is not None:
            self._watch.stop()
            self.pg.abort()

    # -- waiting --------------------------------------------------------------------------------------------------

    def _arrived(self, work: Work, name: str) -> bool:
        """Wait for one slice; whether the work is over."""
        try:
            work.wait(_SLICE)
        except RuntimeError as error:
            if not work.is_completed():
                return False
            try:
                work.wait()  # over at once; it may have completed just after the slice did
            except RuntimeError:
                raise self._connection_lost(name, error) from error
        return True

    def _look_out(self, name: str) -> None:
        """Raise if this connection broke, or a peer reported a failure, or a roll call finds one dead."""
        if self.broken is not None:
            raise GroupBroken(f"gave up waiting for {name!r}: {self.broken}")
        if len(self.ranks) == 1:
            return
        try:
            if self._store.check(["failed"]):
                raise self._peer_failed(name)
            if self._store.check(["suspect"]):
                raise self._roll_call(name, self._store.get("suspect"))
        except dist.DistError as error:
            raise self._store_lost(name) from error
        except ForgedValue as error:
            self.fail(str(error))
            raise

    def _failure(self) -> tuple[int, str]:
        return self._store.parsed("failed", self._store.get("failed"), _failure_of)

    def _peer_failed(self, name: str) -> Exception:
        rank, what = self._failure()
        self.fail(what, rank)
        if rank == self.rank:
            return GroupBroken(f"the other ranks gave this one up: {what} (It waited for {name!r}.) Call reset().")
        return PeerFailed(rank, f"{what} (This rank waited for {name!r}.) Call reset() on every rank.")

    def _connection_lost(self, name: str, error: RuntimeError) -> Exception:
        """The transport failed under this rank. Its peers may be waiting for somebody else; get them to look up."""
        cause = re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0]  # gloo adds its source line, and advice
        try:
            if self._store.check(["failed"]):
                return self._peer_failed(name)
            self._store.set("suspect", cause)
            return self._roll_call(name, cause)
        except dist.DistError:
            return self._store_lost(name)

    def _roll_call(self, name: str, cause: str) -> Exception:
        """Who does not answer is dead. All that wait on this connection answer within a slice.

        A rank that computes answers late, so while two or more are missing there is no telling which one died; when
        one is left it must be that one, for no connection is lost without a cause. Who has said that it is late counts
        for missing only where nobody else is.
        """
        self._store.set(f"alive/{self.rank}", "1")
        begun = time.monotonic()
        missing = set(self.ranks)
        while missing and time.monotonic() - begun < (self.timeout_s if len(missing) > 1 else _GRACE_S):
            if self._store.check(["failed"]):
                return self._peer_failed(name)
            silent = {rank for rank in self.ranks if not self._store.check([f"alive/{rank}"])}
            missing = silent - late_ranks(silent).keys() or silent
            time.sleep(_LOOK_S)
        if not missing:
            self.fail(f"the transport failed, though every rank is alive ({cause}).")
            return GroupBroken(f"{self.broken} (This rank waited for {name!r}.) Call reset() on every rank.")
        dead = min(missing)
        self.fail(f"rank {dead} died, or let go of the group ({cause}).", dead)
        return PeerFailed(dead, f"{self.broken} (This rank waited for {name!r}.)")

    def _store_lost(self, name: str) -> Exception:
        """The rendezvous store answers no more: its host died, which is rank 0 unless a launcher keeps it."""
        if self.rank == 0:
            self.broken = "the rendezvous store is gone. Start the job anew."
            return GroupBroken(f"gave up waiting for {name!r}: {self.broken}")
        self.broken = "rank 0 died, and the rendezvous store with it. Start the job anew."
        return PeerFailed(0, f"{self.broken} (This rank waited for {name!r}.)")

    # -- process groups -------------------------------------------------------------------------------------------

    def _process_group(self, backend: str, name: str) -> dist.ProcessGroup:
        """A process group of just these ranks, under a name of our own.

        `new_group` would either need every rank of the job, or name the group after how many groups this process
        has, which ranks that belong to different groups do not agree on.
        """
        patience = timedelta(seconds=self.timeout_s)
        store = c10d._get_default_store()
        with _not_split_off(c10d._get_default_group()):
            made = c10d._new_process_group_helper(
                len(self.ranks),
                self.ranks.index(self.rank),
                list(self.ranks),
                dist.Backend(backend),
                store,
                cast(Any, name),
                timeout=patience,
            )
        pg: dist.ProcessGroup = made[0]
        c10d._world.pg_group_ranks[pg] = {rank: index for index, rank in enumerate(self.ranks)}
        c10d._set_pg_timeout(timedelta(seconds=self._transport_timeout_s), pg)
        return pg

    @property
    def _transport_timeout_s(self) -> float:
        return _TRANSPORT_SLACK * self.timeout_s + LATE_S


@contextmanager
def _not_split_off(default: dist.ProcessGroup) -> Iterator[None]:
    """Let a group have a communicator of its own, also where the job's was bound to a device (`device_id`).

    Torch would split it off the job's then, and NCCL waits for every rank of the job to do so, not of the group alone.
    """
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _failure_of(text: str) -> tuple[int, str]:
    rank, what = text.split("\n", 1)
    return int(rank), what


def _after_fork_in_child() -> None:
    for connection in [each for each in _connections if len(each.ranks) > 1]:
        connection.broken = "this process was forked, and its peers know its parent only. Make a group here."


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

_leader: ContextVar[Connection | None] = ContextVar("ubatch_leading_connection", default=None)


def leading_connection() -> Connection | None:
    """The connection whose ranks take the current step together; None outside of steps."""
    return _leader.get()


@contextmanager
def lead_again(leader: Connection | None) -> Iterator[None]:
    """Let `leader` lead in this thread too, for what comes later of its step; nothing if it broke, or another leads."""
    if leader is None or leader.broken is not None or _leader.get() is not None:
        yield
        return
    with leader.leading():
        yield


# A process group's destructor waits for what is stuck in it, up to the transport's time-out, also at exit. So nobody
# destroys one before that has passed: it is kept by a reference that the interpreter's exit does not drop.
_kept: list[tuple[float, dist.ProcessGroup]] = []


def _keep(pgs: Sequence[dist.ProcessGroup], seconds: float) -> None:
    for pg in pgs:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))
        _kept.append((time.monotonic() + seconds, pg))


def _let_go_of_expired() -> None:
    now = time.monotonic()
    expired = [pg for until, pg in _kept if until <= now]
    _kept[:] = [(until, pg) for until, pg in _kept if until > now]
    for pg in expired:
        with suppress(ValueError):  # the job's process groups were destroyed meanwhile
            dist.destroy_process_group(pg)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(pg))
