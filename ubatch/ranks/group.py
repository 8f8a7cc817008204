"""A set of ranks that share collectives: their votes, and how they restart after a failure.

After a failure nothing runs on the group until every rank calls `reset()`, which waits for all and then makes a new
`Connection`. The ranks meet at one key of the rendezvous store, `epoch:ranks here`, changed only atomically:

    a rank arrives               "4:0"    ->  "4:0,2"
    the last one arrives         "4:0,2"  ->  "5:"         waiting ranks see the new epoch, and connect
    a rank gives up waiting      "4:0,2"  ->  "4:2"        so that no rank expects it
"""

from __future__ import annotations

import itertools
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import cast

import torch
import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from ubatch.errors import (
    ConfigError,
    ForgedValue,
    GroupBroken,
    LaunchOrderError,
    OverlapDeclined,
    TransferTimeout,
    describe,
    note,
)
from ubatch.process.job_store import JobStore, Patience, job_store
from ubatch.process.machine import machine_name
from ubatch.ranks.connection import Connection
from ubatch.ranks.launch_order import BALLOT_WIDTH, check_ballots, first_difference
from ubatch.schedules.vote import OFFER_WIDTH, Decision, Offer, decide, decode_offer, encode_offer, fingerprint

_BALLOT = struct.Struct(f"={OFFER_WIDTH + BALLOT_WIDTH}q")
_NUMBER = struct.Struct("=d")
_POLL_S = 0.02
_PATIENCE_S = 2.0
_UNTOLD = "the ranks launched in different orders since the last vote, and could not tell each other how."


class CommGroup:
    """Ranks that share collectives. Make one with `from_process_group`, on every rank of it.

    Attributes:
        ranks: global ranks, in group order.
        rank: this process's place among them.
        size: how many there are.
        backend: of torch.distributed; carries the data.
        timeout_s: how long a transfer or a vote may take.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout_s: float, name: str) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self.backend = backend
        self.timeout_s = timeout_s
        self._name = name
        self._parts: dict[tuple[int, ...], CommGroup] = {}
        self._epochs_alone = itertools.count()  # several ranks agree on theirs when they meet
        self._connection = self._connect()
        _groups.add(self)

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> CommGroup:
        """A group over the ranks of `pg` (the default group if None). Every rank of it must call this, equally often.

        Args:
            pg: an initialised process group; its back end carries the data.
            timeout_s: seconds a transfer or a vote may take before `TransferTimeout`.

        Raises:
            ConfigError: torch.distributed is not initialised, this rank is not in `pg`, or `timeout_s` is not positive.
            TransferTimeout: not every rank of `pg` called this within `timeout_s`.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised. Call torch.distributed.init_process_group first.")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, not {timeout_s}.")
        if cast(object, pg) == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(f"rank {dist.get_rank()} is not in the process group. Call this on its ranks only.")
        return cls._numbered(dist.get_process_group_ranks(pg), dist.get_backend(pg), timeout_s)

    @classmethod
    def _numbered(cls, ranks: Sequence[int], backend: str, timeout_s: float) -> CommGroup:
        """A new group under a name that these ranks have not used before."""
        key = "-".join(map(str, ranks))
        store, count = job_store(), f"ubatch/{key}/made/{dist.get_rank()}"
        number = store.add(count, 1)
        try:
            return cls(ranks, backend, timeout_s, f"ubatch/{key}/{number}")
        except BaseException:
            with suppress(dist.DistError):
                store.add(count, -1)
            raise

    def part(self, ranks: Sequence[int]) -> CommGroup:
        """A group of some of these ranks, with its own transports. The same ranks always give the same group.

        Every one of `ranks` must call this, in the same order where there are several parts. It does not vote by
        itself, but with this group: a failure in a step of this group breaks both, and `reset()` here makes both usable
        again.

        Args:
            ranks: global ranks, including this one, in the order of the part.

        Raises:
            ConfigError: a rank is not in this group, or this rank is missing.
            TransferTimeout: not all of these ranks called this within the time-out.
        """
        key = tuple(ranks)
        if not set(key) <= set(self.ranks) or len(set(key)) < len(key) or self.ranks[self.rank] not in key:
            raise ConfigError(
                f"rank {self.ranks[self.rank]} asked for a part {list(key)} of the ranks {list(self.ranks)}: they must "
                "be different ones of these, and it must be one of them."
            )
        if key not in self._parts:
            self._parts[key] = self._numbered(key, self.backend, self.timeout_s)
        return self._parts[key]

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group that carries the data; another one after `reset()`."""
        return self._connection.pg

    @property
    def broken(self) -> str | None:
        """Why nothing runs on this group any more, or None."""
        return self._connection.broken

    def stream_ordered(self, device: torch.device) -> bool:
        """Whether collectives of tensors on `device` run in the order of its streams, as NCCL's do (gloo's block the
        host), and so can be captured in a graph.
        """
        return self._connection.is_stream_ordered(device)

    def usable_connection(self) -> Connection:
        """The connection to launch on.

        Raises:
            GroupBroken: a rank failed since the last `reset()`.
        """
        self._connection.check_usable()
        return self._connection

    def vote(self, offer: Offer) -> Decision:
        """Exchange offers with all ranks and return the common decision: one small all-gather on the CPU.

        Raises:
            GroupBroken: a rank has failed since the last `reset()`.
            LaunchOrderError: see `ubatch.ranks.launch_order`.
            PeerFailed, TransferTimeout: see `Connection.wait_for_works`.
        """
        if self.size == 1:
            return decide([offer])
        connection = self.usable_connection()
        order = connection.order
        numbers = [*encode_offer(offer), *(order.ballot() if order is not None else [0] * BALLOT_WIDTH)]
        ballots = connection.gather(_BALLOT.pack(*numbers), "vote")
        rows = [_BALLOT.unpack(each) for each in ballots]
        if not check_ballots([row[OFFER_WIDTH:] for row in rows]):
            told = first_difference(connection.orders(self.timeout_s))
            connection.fail("the ranks launched in different orders.")
            raise LaunchOrderError(f"since the last vote, {told}" if told is not None else _UNTOLD)
        if order is not None:
            order.launches.clear()
        return decide([decode_offer(row[:OFFER_WIDTH]) for row in rows], self.rank)

    def least(self, number: float) -> float:
        """The smallest number that any rank gives, for a value that all must agree on, such as free memory.

        Args:
            number: this rank's number.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: as a vote.
        """
        if self.size == 1:
            return number
        gathered = self.usable_connection().gather(_NUMBER.pack(number), "least")
        return float(min(_NUMBER.unpack(each)[0] for each in gathered))

    def same(self, number: float) -> bool:
        """Whether all ranks give the same number, such as a hash. Every rank must call it.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: as a vote.
        """
        return self.least(number) == -self.least(-number)

    def on_one_machine(self) -> bool:
        """Whether all ranks run on one machine. Every rank must call it.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: as a vote.
        """
        return self.same(fingerprint(machine_name()))

    def step(self) -> AbstractContextManager[None]:
        """A `with` block for one step that all ranks do together, its vote included. An error in it breaks the group on
        every rank.

        Other groups that the step uses break with it. `OverlapDeclined` breaks nothing, because all ranks are still in
        step.

        Raises:
            GroupBroken: the group broke and the code in the block swallowed the error; the step's result is invalid.
        """
        return _Step(self)

    def reset(self) -> None:
        """Make the group usable again after a failure. Every rank must call it; waits until all have.

        Its parts are reset with it. Other groups that steps used must be reset separately.

        Raises:
            TransferTimeout: not every rank called it within `timeout_s`. Call it again, on every rank.
            GroupBroken: the rendezvous store is gone, so the ranks cannot meet any more.
        """
        self._connection.retire()
        self._connection = self._connect()
        for part in self._parts.values():
            part.reset()
        for group in list(_groups):  # a failed rank told its peers on every group that it used, before it called this
            with suppress(dist.DistError):
                group._connection.adopt_failure()

    def recover(self, what: str) -> None:
        """Give up a part of a step, on every rank, and make the group and all others used in it usable again.

        Every rank must call this: the failed rank tells the others, whose waits for it then fail.

        Args:
            what: what happened on this rank.

        Raises:
            TransferTimeout, GroupBroken: as `reset`.
        """
        connection = self._connection
        connection.fail(f"rank {connection.rank} gave up a part of its step after {what.splitlines()[0][:500]}.")
        used = {group for group in _groups if connection.used(group._connection)}
        self.reset()
        for group in sorted(used - {self, *self._parts.values()}, key=lambda each: each._name):
            group.reset()

    def _connect(self) -> Connection:
        store = job_store()
        try:
            epoch = self._meet(store.part(self._name)) if self.size > 1 else next(self._epochs_alone)
            return Connection(self.ranks, self.backend, self.timeout_s, f"{self._name}/{epoch}", store)
        except dist.DistNetworkError as error:
            raise GroupBroken("the rendezvous store is gone, and with it its host. Start the job anew.") from error
        except RuntimeError as error:
            raise TransferTimeout(f"the ranks {list(self.ranks)} met, but could not connect: {error}") from error

    def _meet(self, store: JobStore) -> int:
        """Wait until every rank has called `reset()`; returns the number of the new epoch."""
        me, everyone = self.ranks[self.rank], frozenset(self.ranks)

        def come(epoch: int, here: frozenset[int]) -> tuple[int, frozenset[int]]:
            return (epoch, here | {me}) if here | {me} != everyone else (epoch + 1, frozenset())

        def give_up(epoch: int, here: frozenset[int]) -> tuple[int, frozenset[int]]:
            return (epoch, here - {me}) if epoch == joined else (epoch, here)

        joined, here = _update(store, come)
        if me not in here:
            return joined
        try:
            patience = Patience(self.timeout_s, everyone - {me})
            while not patience.over():
                epoch, here = store.parsed("meeting", store.get("meeting"), _meeting_of)
                if epoch > joined:
                    return epoch
                time.sleep(_POLL_S)
        except BaseException:  # Ctrl-C
            with suppress(dist.DistError, ForgedValue):
                _update(store, give_up)
            raise
        epoch, here = _update(store, give_up)
        if epoch > joined:
            return epoch
        raise TransferTimeout(
            f"ranks {sorted(everyone - here - {me})} of {list(self.ranks)} did not come within {self.timeout_s} s. "
            "Every rank must call from_process_group(), and reset() after a failure."
        )


class _Step(AbstractContextManager[None]):
    """A step of a group, in a `with` block. Not a generator: one that Ctrl-C leaves open would end late, elsewhere."""

    def __init__(self, group: CommGroup) -> None:
        self._group = group
        self._leading = group._connection.leading()

    def __enter__(self) -> None:
        self._leading.__enter__()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if error is not None:
                self._failed(error)
                return
            try:
                self._group._connection.check_usable()  # a new connection if the step itself has reset the group
            except BaseException as late:
                self._failed(late)
                raise
        finally:
            self._leading.__exit__(None, None, None)

    def _failed(self, error: BaseException) -> None:
        connection = self._group._connection
        # torch ends a recomputation early by an error.
        in_step = isinstance(error, OverlapDeclined | _StopRecomputationError)
        if len(connection.ranks) > 1 and not in_step:
            what = f"{type(error).__name__}: {describe(error, str)}".splitlines()[0][:500]
            connection.fail(f"rank {connection.rank} failed with {what}.")
            if connection.order is not None and not isinstance(error, LaunchOrderError):
                told = first_difference(connection.orders(_PATIENCE_S), ended=False)
                if told is not None:
                    note(error, f"since the last vote, {told}")


def _meeting_of(text: str) -> tuple[int, frozenset[int]]:
    epoch, here = text.split(":")
    return int(epoch), frozenset(map(int, filter(None, here.split(","))))


def _update(
    store: JobStore, change: Callable[[int, frozenset[int]], tuple[int, frozenset[int]]]
) -> tuple[int, frozenset[int]]:
    """Apply `change` to `(epoch, ranks here)` in one atomic step; returns the outcome."""
    seen = store.compare_set("meeting", "", "0:")
    while True:
        outcome = change(*store.parsed("meeting", seen, _meeting_of))
        wanted = f"{outcome[0]}:{','.join(map(str, sorted(outcome[1])))}"
        if wanted == seen:
            return outcome
        now = store.compare_set("meeting", seen, wanted)
        if now == wanted:
            return outcome
        seen = now


_groups: weakref.WeakSet[CommGroup] = weakref.WeakSet()


def check_group(group: object, subject: str = "group must be") -> None:
    """Refuse what is no `CommGroup`, such as a process group of torch. `subject` begins the message."""
    if not isinstance(group, CommGroup):
        raise ConfigError(
            f"{subject} a CommGroup, not {type(group).__name__}. Make one: CommGroup.from_process_group(pg)."
        )
