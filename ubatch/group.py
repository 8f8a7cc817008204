"""A set of ranks that share collectives, and what happens when one of them fails.

The group owns a data group, a small CPU group for the vote, and a corner of the rendezvous store:

    failed     the first failure: "rank: what"       written by the rank that failed, read by all that wait
    suspect    somebody lost a connection            starts a roll call
    roll/R     rank R is alive                       who does not answer the roll call is dead

A rank never waits blindly: every wait is cut into slices, and between two slices it looks into the store. When
a rank fails, the others may already have launched collectives for it, and the transport would pair this step's
tensors with the next step's. So after a failure nothing runs on the group until every rank calls `reset()`, which
makes new data and vote groups (new connections, a new corner of the store).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ubatch.errors import ConfigError, GroupBroken, PeerFailed, TransferTimeout
from ubatch.transfer import Work
from ubatch.vote import OFFER_WIDTH, Decision, Offer, decide, decode_offer, encode_offer

__all__ = ["CommGroup"]

_SLICE = timedelta(milliseconds=200)
_TRANSPORT_SLACK = 4
"""The transport's own time-out is this much longer than ours, so that ours, which names the peer, fires first."""


class CommGroup:
    """Ranks that share collectives. Make one with `from_process_group`, on every rank of it.

    Attributes:
        ranks: global ranks, in group order.
        rank: this process's place among them.
        size: how many there are.
        timeout_s: how long a transfer or a vote may take.
        pg: the data group.
    """

    def __init__(self, ranks: Sequence[int], backend: str, timeout_s: float, name: str) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self.timeout_s = timeout_s
        self._backend = backend
        self._name = name
        self._epoch = 0
        self._broken: str | None = None
        self._retired: list[Any] = []
        self._connect()

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> CommGroup:
        """A group over the ranks of `pg` (the default group if None). Every rank of it must call this, equally often.

        Args:
            pg: an initialised process group; its back end carries the data.
            timeout_s: seconds a transfer or a vote may take before `TransferTimeout`.

        Raises:
            ConfigError: torch.distributed is not initialised, or the time-out is not positive.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised. Call torch.distributed.init_process_group first.")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, not {timeout_s}.")
        ranks = dist.get_process_group_ranks(pg if pg is not None else dist.group.WORLD)
        if dist.get_rank() not in ranks:
            raise ConfigError(f"rank {dist.get_rank()} is not in the process group (ranks {ranks}).")
        key = "-".join(map(str, ranks))
        _instances[key] = _instances.get(key, 0) + 1
        return cls(ranks, dist.get_backend(pg), timeout_s, f"ubatch/{key}/{_instances[key]}")

    @property
    def broken(self) -> str | None:
        """Why nothing runs on this group any more, or None."""
        return self._broken

    def vote(self, offer: Offer) -> Decision:
        """Offer what this rank would do, and learn what all do: one small all-reduce on the CPU.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: see `wait_for_works`.
        """
        if self.size == 1:
            return decide([offer])
        self.check_usable()
        ballot = torch.zeros(self.size, OFFER_WIDTH, dtype=torch.int64)
        ballot[self.rank] = torch.tensor(encode_offer(offer), dtype=torch.int64)
        work = dist.all_reduce(ballot, group=self._vote_pg, async_op=True)
        self.wait_for_works((work,), "vote")
        return decide([decode_offer(row) for row in ballot.tolist()], self.rank)

    def check_usable(self) -> None:
        """Refuse to launch on a group that is out of step.

        Raises:
            GroupBroken: a rank failed since the last `reset()`.
        """
        if self._broken is not None:
            raise GroupBroken(f"the group of ranks {list(self.ranks)} is out of step: {self._broken} Call reset().")

    def wait_for_works(self, works: Sequence[Work], name: str) -> None:
        """Wait for a transport's works, looking out for failed peers.

        On CUDA this orders streams and returns; on a CPU it blocks without using the CPU.

        Raises:
            PeerFailed: a rank reported an error, or died.
            TransferTimeout: not over within `timeout_s`.
        """
        deadline = time.monotonic() + self.timeout_s
        for work in works:
            while True:
                try:
                    if self._backend == "nccl":
                        work.wait()
                    else:
                        work.wait(_SLICE)
                    break
                except RuntimeError as error:
                    if work.is_completed():
                        raise self._connection_lost(name, error) from error
                self._look_out(name)
                if time.monotonic() > deadline:
                    self._broken = f"transfer {name!r} took longer than {self.timeout_s} s."
                    raise TransferTimeout(
                        f"{self._broken} No peer of ranks {list(self.ranks)} reported a failure. If the step really is "
                        "that slow, raise timeout_s; else a rank does not take part in it."
                    )

    def post_failure(self, error: BaseException) -> None:
        """Tell the peers that this rank's step failed; nothing more runs here until `reset()`."""
        if self.size == 1 or self._broken is not None:
            return
        what = f"{type(error).__name__}: {error}".splitlines()[0][:500]
        self._broken = f"this rank failed with {what}."
        try:
            if not self._store.check(["failed"]):
                self._store.set("failed", f"{self.rank}\n{what}")
        except RuntimeError:
            return  # the store died with its host; the peers learn it the same way

    def reset(self) -> None:
        """Make the group usable again after a failure. Every rank must call it; waits until all have.

        Raises:
            TransferTimeout: not every rank called it within `timeout_s`.
        """
        self._retired += [self.pg, self._vote_pg]  # works may still hold them; their destructors would wait
        self._epoch += 1
        try:
            self._connect()
        except RuntimeError as error:
            self._broken = "reset() did not meet every rank."
            raise TransferTimeout(f"{self._broken} Call it on every one of ranks {list(self.ranks)}.") from error
        self._broken = None

    def _connect(self) -> None:
        patience = timedelta(seconds=self.timeout_s)
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"{self._name}/{self._epoch}", store)
        if self.size > 1:
            self._store.set(f"here/{self.rank}", b"1")
            self._store.wait([f"here/{rank}" for rank in range(self.size)], patience)
        transport_timeout = patience * _TRANSPORT_SLACK
        ranks = list(self.ranks)
        self.pg = dist.new_group(ranks, transport_timeout, self._backend, use_local_synchronization=True)
        self._vote_pg = dist.new_group(ranks, transport_timeout, "gloo", use_local_synchronization=True)

    def _look_out(self, name: str) -> None:
        """Raise if a peer reported a failure, or if a roll call finds one dead."""
        try:
            if self._store.check(["failed"]):
                rank, what = self._store.get("failed").decode().split("\n", 1)
                self._broken = f"rank {rank} failed with {what}."
                raise PeerFailed(int(rank), f"{self._broken} (while this rank waited for {name!r}) Call reset().")
            if self._store.check(["suspect"]):
                raise self._roll_call(name)
        except dist.DistNetworkError as error:
            raise self._store_lost(name) from error

    def _connection_lost(self, name: str, error: RuntimeError) -> Exception:
        try:
            self._store.set("suspect", str(self.rank))
        except RuntimeError:
            return self._store_lost(name)
        try:
            return self._roll_call(name)
        except PeerFailed as failed:
            return failed
        except RuntimeError:
            return self._store_lost(name)

    def _roll_call(self, name: str) -> Exception:
        """Who does not answer is dead. Gives live peers time for one slice of waiting, with a margin."""
        self._store.set(f"roll/{self.rank}", b"1")
        until = time.monotonic() + min(5.0, self.timeout_s / 2)
        missing = list(range(self.size))
        while missing and time.monotonic() < until:
            if self._store.check(["failed"]):
                self._look_out(name)
            missing = [rank for rank in missing if not self._store.check([f"roll/{rank}"])]
            time.sleep(0.05)
        dead = missing[0] if missing else (self.rank + 1) % self.size
        self._broken = f"rank {dead} " + ("died." if missing else "closed its connection.")
        return PeerFailed(dead, f"{self._broken} (while this rank waited for {name!r})")

    def _store_lost(self, name: str) -> Exception:
        """The rendezvous store answers no more: its host, rank 0 of the job unless a launcher keeps it, died."""
        dead = 1 - self.rank if self.size == 2 else 0
        self._broken = f"rank {dead} died, and the rendezvous store with it."
        return PeerFailed(dead, f"{self._broken} (while this rank waited for {name!r})")


_instances: dict[str, int] = {}
