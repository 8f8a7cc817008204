"""The connection of a group's ranks between two resets, and how a waiting rank learns that another failed.

A connection owns a process group for data, a CPU process group for votes, and these keys of the rendezvous store:

    failed     the first failure: "rank", a line break, what happened     waiting ranks read it and give up
    suspect    why a rank's transport gave up                             starts a roll call
    alive/R    rank R answered the roll call                              a rank that does not answer is dead

    beat/R     rank R's counter, which rises while it lives               if it stops, rank R is dead (`peer_watch`)

Every wait is cut into slices, and after each slice the rank reads the store. If the device waits instead of the host
(NCCL), a thread reads it, and aborts the communicator so that the device stops waiting. After `failed` is written
nothing more is launched: the transport would pair a peer's launch from the failed step with this rank's next one.
`CommGroup.reset` makes a new connection; transfers of the old one stay there.
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ubatch.errors import ForgedValue, GroupBroken, LaunchOrderError, PeerFailed, TransferTimeout
from ubatch.process.heartbeat import beat
from ubatch.process.interrupts import changing
from ubatch.process.job_store import LATE_S, JobStore, Patience, late_ranks
from ubatch.ranks.launch_order import VARIABLE, LaunchOrder
from ubatch.ranks.near import Channel, NearRanks, OtherLaunch, connect_near
from ubatch.ranks.peer_watch import PeerWatch
from ubatch.ranks.transports import forget_near_ranks, keep, let_go_of_expired, make_process_group

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in torch 2.13."""

_SLICE = timedelta(milliseconds=200)
_LOOK_S = 0.02
_GRACE_S = 0.5
"""Seconds that the last missing rank has to answer a roll call before it counts as dead."""
_TEXT_BYTES = 256
_WAIT_SLACK_S = 1.0
"""Seconds that slices of waiting and reads of the store may add to a time-out."""
_TRANSPORT_SLACK = 4
"""The transport's time-out is this multiple of ours, plus a late rank's time, so that ours, which names the peer, fires
first."""


class Work(Protocol):
    """An asynchronous operation of a transport, such as a `torch.distributed.Work`."""

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""

    def wait(self, timeout: Any = ...) -> object:
        """Block until it has ended."""


class Connection:
    """The connected ranks of a group. `CommGroup` makes it on every rank at the same time.

    Attributes:
        ranks: global ranks, in group order.
        place: this rank's place among them.
        timeout_s: how long a transfer or a vote may take.
        longest_wait_s: longest time of `wait_for_works` if no peer is late: its time-out plus a roll call.
        pg: carries the data.
        down_pg: with gloo, carries large data to lower ranks (`ubatch.ranks.ways`); else None.
        vote_pg: carries what ranks tell each other on the CPU; always gloo.
        near: carries the votes, and with gloo small data, if all ranks are on one machine; else None.
        broken: why nothing may be launched any more, or None.
        order: the launches since the last vote if `UBATCH_CHECK_ORDER=1`, else None.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout_s: float, name: str, store: JobStore) -> None:
        self.ranks = tuple(ranks)
        self.rank = dist.get_rank()
        self.place = self.ranks.index(self.rank)
        self.timeout_s = timeout_s
        self.longest_wait_s = 2 * timeout_s + _WAIT_SLACK_S
        self.broken: str | None = None
        self.order = LaunchOrder() if len(ranks) > 1 and os.environ.get(VARIABLE) == "1" else None
        self._name, self._sides = name, 0
        self._store = store.part(name)
        self._dependents: weakref.WeakSet[Connection] = weakref.WeakSet()
        let_go_of_expired()
        self.pg = self._process_group(backend, f"{name}/data")
        self.vote_pg = self._process_group("gloo", f"{name}/vote")
        two = len(self.ranks) > 1 and self._is_gloo(torch.device("cpu"))
        self.down_pg = self._process_group("gloo", f"{name}/down") if two else None
        pgs = [self.pg, self.vote_pg, *([] if self.down_pg is None else [self.down_pg])]
        weakref.finalize(self, keep, pgs, self._transport_timeout_s)
        self._watch: PeerWatch | None = None
        self.near: NearRanks | None = None
        if len(self.ranks) > 1:
            with changing(_leader, None):  # the step in which a group is reset is led by its old connection
                self.near = connect_near(self.place, len(self.ranks), self._tell, timeout_s)
        if self.near is not None:
            weakref.finalize(self, keep, [self.near], self._transport_timeout_s)
        _connections.add(self)
        if torch.cuda.is_available() and self.is_stream_ordered(torch.device("cuda")):
            self.watch()

    def make_side_pg(self) -> dist.ProcessGroup:
        """Another CPU process group of the same ranks, whose transfers never get in the order of the steps' ones. Every
        rank must call it, equally often.

        Raises:
            RuntimeError: the ranks did not connect within the time-out.
        """
        self._sides += 1
        made = self._process_group("gloo", f"{self._name}/side/{self._sides}")
        weakref.finalize(self, keep, [made], self._transport_timeout_s)
        return made

    def leading(self) -> AbstractContextManager[object]:
        """Make this the connection whose ranks take the current step together.

        A wait on another connection in that step also watches this one, because a peer that failed here may never reach
        the other. When this connection breaks, all connections that its steps used break too, because they are out of
        step as well.
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
        """Whether a step of this connection has launched on `other`."""
        return other in self._dependents

    def gather(self, own: bytes, name: str) -> list[bytes]:
        """Every rank's bytes, in group order, which are equally many. Errors as `wait_for_works`.

        Args:
            name: of the exchange, for errors.
        """
        size, ranks = len(own), len(self.ranks)
        ours, everyone = bytearray(own), bytearray(size * ranks)
        work: Work
        if self.near is None:
            into, out_of = (torch.frombuffer(each, dtype=torch.uint8) for each in (everyone, ours))
            work = all_gather_single(into, out_of, group=self.vote_pg, async_op=True)
        else:
            work = self.near.exchange(Channel.VOTES, memoryview(ours), memoryview(everyone), None, [1] * ranks, size)
        self.wait_for_works((work,), name)
        return [bytes(everyone[start : start + size]) for start in range(0, size * ranks, size)]

    def _tell(self, text: str) -> list[str]:
        """Every rank's text, in group order."""
        told = self.gather(text.encode().ljust(_TEXT_BYTES, b"\0"), "connecting")
        return [each.rstrip(b"\0").decode() for each in told]

    def orders(self, patience_s: float) -> dict[int, list[str]]:
        """Rank -> its launches since the last vote, for ranks that answer within `patience_s` seconds."""
        mine = self.order.launches if self.order is not None else []
        orders: dict[int, list[str]] = {}
        with suppress(dist.DistError, ForgedValue):  # this only adds detail to an error
            self._store.set(f"order/{self.rank}", "\n".join(mine))
            deadline = time.monotonic() + patience_s
            while len(orders) < len(self.ranks) and time.monotonic() <= deadline:
                for rank in self.ranks:
                    if rank not in orders and self._store.check([f"order/{rank}"]):
                        orders[rank] = self._store.get(f"order/{rank}").splitlines()
                time.sleep(_LOOK_S)
        return orders

    def wait_for_works(self, works: Iterable[Work], name: str, check: Callable[[], None] | None = None) -> None:
        """Wait for a transport's works without using the CPU, and watch for failed peers.

        Args:
            check: called after every slice; may raise to end the wait.

        Raises:
            PeerFailed: a rank reported an error, or died.
            GroupBroken: another thread of this rank failed during the wait, or called `reset()`.
            TransferTimeout: not over within `timeout_s`, not counting time in which a peer was late
                (`ubatch.process.job_store`).
        """
        leader = _leader.get() or self
        patience: Patience | None = None
        for work in works:
            while True:
                try:
                    work.wait(_SLICE)
                    break
                except RuntimeError as error:
                    if self._is_over(work, name, error):
                        break
                patience = patience or Patience(self.timeout_s, {*leader.ranks, *self.ranks} - {self.rank})
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

    def is_stream_ordered(self, device: torch.device) -> bool:
        """Whether waiting for a work only orders the device's streams and returns, as NCCL's does (gloo's blocks)."""
        kind = torch.device(device.type)
        return kind.type != "cpu" and kind in self.pg._device_types and not self._is_gloo(kind)

    def _is_gloo(self, kind: torch.device) -> bool:
        return kind in self.pg._device_types and self.pg._get_backend(kind).name() == "gloo"

    def watch(self, beat_s: float = 1.0) -> None:
        """Watch for failed peers in a separate thread, until this connection breaks or is replaced."""
        if len(self.ranks) == 1 or self._watch is not None:
            return
        watched = weakref.proxy(self)
        self._watch = PeerWatch(self.rank, self.ranks, self._store, self.timeout_s, watched, beat_s)
        weakref.finalize(self, self._watch.stop)
        self._watch.start()

    def fail(self, what: str, rank: int | None = None) -> None:
        """Break this connection and those that its steps used, so that nothing more is launched, and tell the peers.

        Args:
            what: what happened, as a sentence.
            rank: the global rank to blame; this one by default.
        """
        if self.broken is not None:
            return
        self.broken = what
        blamed = self.rank if rank is None else rank
        with suppress(dist.DistError, ForgedValue):  # the store may be dead, or forged: the peers notice it themselves
            self._store.compare_set("failed", "", f"{blamed}\n{what}")
        self._abort()
        for dependent in list(self._dependents):
            dependent.fail(what, blamed)

    def retire(self) -> None:
        """A new connection replaces this one; threads that still wait here give up."""
        if self.broken is None:
            self.broken = "reset() was called meanwhile."
            self._abort()

    def adopt_failure(self) -> bool:
        """Break if a peer has reported a failure. Returns whether this connection is broken."""
        if self.broken is None and self._store.check(["failed"]):
            self.fail(*self._failure())
        return self.broken is not None

    def lost(self, rank: int) -> None:
        """Handle a peer that gave no sign of life; -1: the store itself is gone."""
        if rank < 0:
            self._store_lost("the watch")
            self._abort()
        else:
            self.fail(f"rank {rank} gave no sign of life for {self.timeout_s} s.", rank)

    def _abort(self) -> None:
        """Abort the communicator, so that kernels that wait for a peer end and the device becomes free."""
        if self.near is not None:
            self.near.stop()
        if self._watch is not None:
            self._watch.stop()
            self.pg.abort()

    # -- waiting --------------------------------------------------------------------------------------------------

    def _is_over(self, work: Work, name: str, error: RuntimeError) -> bool:
        """Whether a work has ended that was waited for in vain, with `error`."""
        if not work.is_completed():
            return False
        if self.broken is not None:
            raise GroupBroken(f"gave up waiting for {name!r}: {self.broken}")
        if isinstance(error, OtherLaunch):
            raise self._launched_otherwise(name, error) from error
        try:
            work.wait()  # returns at once; the work may have completed just after the slice
        except RuntimeError:
            raise self._connection_lost(name, error) from error
        return True

    def _look_out(self, name: str) -> None:
        """Raise if this connection broke, a peer reported a failure, or a roll call finds a dead rank."""
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

    def _failure(self) -> tuple[str, int]:
        """What happened, and on which rank."""
        return self._store.parsed("failed", self._store.get("failed"), _failure_of)

    def _peer_failed(self, name: str) -> Exception:
        what, rank = self._failure()
        self.fail(what, rank)
        if rank == self.rank:
            return GroupBroken(f"the other ranks gave this one up: {what} (It waited for {name!r}.) Call reset().")
        return PeerFailed(rank, f"{what} (This rank waited for {name!r}.) Call reset() on every rank.")

    def _launched_otherwise(self, name: str, error: OtherLaunch) -> Exception:
        """Handle a peer that sent something else: because it failed, if it says so soon."""
        until = time.monotonic() + _GRACE_S
        try:
            while time.monotonic() < until:
                if self._store.check(["failed"]):
                    return self._peer_failed(name)
                time.sleep(_LOOK_S)
        except dist.DistError:
            return self._store_lost(name)
        self.fail(f"{error}.")
        return LaunchOrderError(
            f"{error}. (This rank waited for {name!r}.) {VARIABLE}=1 on every rank says where. Call reset()."
        )

    def _connection_lost(self, name: str, error: RuntimeError) -> Exception:
        """Handle a transport failure on this rank. Peers may be waiting for other ranks; start a roll call."""
        cause = re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0]  # strips gloo's source line and advice
        try:
            if self._store.check(["failed"]):
                return self._peer_failed(name)
            self._store.set("suspect", cause)
            return self._roll_call(name, cause)
        except dist.DistError:
            return self._store_lost(name)

    def _roll_call(self, name: str, cause: str) -> Exception:
        """Find the dead rank: the one that does not answer. Every rank that waits on this connection answers within a
        slice.

        A rank that computes answers late, so while two or more are missing it is unknown which one died. When one is
        left it must be that one, because a connection is not lost without a cause. A rank that has declared itself late
        counts as missing only if no other rank is missing.
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
        """The rendezvous store does not answer: its host died, which is rank 0 unless a launcher runs the store."""
        if self.rank == 0:
            self.broken = "the rendezvous store is gone. Start the job anew."
            return GroupBroken(f"gave up waiting for {name!r}: {self.broken}")
        self.broken = "rank 0 died, and the rendezvous store with it. Start the job anew."
        return PeerFailed(0, f"{self.broken} (This rank waited for {name!r}.)")

    def _process_group(self, backend: str, name: str) -> dist.ProcessGroup:
        seconds = self._transport_timeout_s
        return make_process_group(self.ranks, backend, name, connect_s=self.timeout_s, transport_s=seconds)

    @property
    def _transport_timeout_s(self) -> float:
        return _TRANSPORT_SLACK * self.timeout_s + LATE_S


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _failure_of(text: str) -> tuple[str, int]:
    rank, what = text.split("\n", 1)
    return what, int(rank)


def _after_fork_in_child() -> None:
    for connection in [each for each in _connections if len(each.ranks) > 1]:
        connection.broken = "this process was forked, and its peers know its parent only. Make a group here."
        if connection.near is not None:
            connection.near.forget()
    forget_near_ranks()


os.register_at_fork(after_in_child=_after_fork_in_child)

_leader: ContextVar[Connection | None] = ContextVar("ubatch_leading_connection", default=None)


leading_connection = _leader.get
"""Returns the connection whose ranks take the current step together; None outside of steps."""


def lead_again(leader: Connection | None) -> AbstractContextManager[object]:
    """Make `leader` lead in this thread too, for the rest of its step. Does nothing if it broke or another one
    leads."""
    if leader is None or leader.broken is not None or _leader.get() is not None:
        return nullcontext()
    return leader.leading()
