"""A node other than node 0, without the client: it starts its ranks, and supervises them until they end.

It may be started before node 0, and waits for it as long as its machine answers. Once it is connected, it never waits
for the network for longer than `node_silent_s`. It reads the store only while it joins, in a thread; then node 0
answers every heartbeat. A node 0 that is silent for too long, or whose process has ended, is lost.

If engines may be started again (`EngineOptions.restarts`), a run that has failed is followed by another one, which the
node joins as it joined the first: with ranks, a store and groups that are all new. It does so when node 0 says so, and
when node 0 cannot be reached: it may begin another run as soon as it has noticed the same. A node that is lost may be
started once more, by its launcher, and then joins, too. Whoever waits gives up after `--timeout-s`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import wait
from threading import current_thread, main_thread
from typing import Self

import torch.distributed as dist

from serving.engine.kept import KeptOfRank
from serving.engine.launch import EngineMain, LocalEngines, require_descriptors
from serving.engine.liveness import WatchedTime, node_beat_s, node_silent_s
from serving.engine.options import EngineOptions
from serving.engine.rank.process import run_engine
from serving.engine.restarts import RestartReason
from serving.engine.wire.agreement import node_identity
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Failed, NodeAlive, NodeFound, NodeHeard
from serving.engine.wire.rendezvous import (
    PATIENCE,
    NodeTaken,
    Place,
    Run,
    claim_node,
    connect_store,
    first_line,
    join_run,
    post_node,
)
from serving.engine.wire.stores import RunFolder
from serving.fork_server import CannotFork
from serving.logs import log_event
from serving.network import warn_of_loopback
from ubatch import ConfigError, UBatchError

_logger = logging.getLogger(__name__)

_GRACE_S = 10.0
"""How long the other ranks may take to end after the first one has ended, in seconds."""
_LEAVING_S = 1.0
"""How long the ranks may take to end after node 0, which tells them to end and then ends itself, in seconds."""
_LAST_WORD_S = 0.5
"""How long node 0's reason may take to come after the ranks were told to end, in seconds."""
_DECISION_S = 10.0
"""How long node 0 may take to say whether it begins another run, in seconds: it waits for reports of a failure, and for
what the nodes have found."""
_LOOK_S = 0.5
"""How often a node that waits for node 0 tries to connect, in seconds."""
_CONNECT_S = 2.0
"""How long a node tries to connect to node 0 before it tries anew, in seconds."""
_GONE_S = 1.0
"""Node 0 is gone if its process has not been connected for so many seconds."""


def run_node(options: EngineOptions, *, engine_main: EngineMain = run_engine) -> int:
    """Run the ranks of a node with `options.node_rank` above 0. Returns when they have ended.

    Node 0 tells the ranks when to end, and the node when to join another run. This function reports the deaths of its
    ranks to node 0, and notices when node 0 is gone or cannot be reached.

    Returns:
        The exit status: 0 if all ranks ended well, 1 after a failure, 128 + the signal after SIGINT or SIGTERM.

    Raises:
        ConfigError: this is node 0, which has the client; or node 0 has another cluster secret or other settings; or
            another node has the same rank.
        UBatchError: node 0 does not answer.
    """
    if options.node_rank == 0:
        raise ConfigError("node 0 has the client: start it with EngineClient.start.")
    require_descriptors(options)
    restarts = options.restarts.max_engine_restarts > 0
    warn_of_loopback(options.master_addr)
    with _Told() as told, ExitStack() as ending:
        kept = {rank: KeptOfRank() for rank in options.local_ranks} if restarts else {}
        for each in kept.values():
            ending.callback(each.close)
        status = _run_once(options, engine_main, told, kept, PATIENCE.total_seconds())
        while status is None:
            log_event(_logger, "joining node 0 again", node_rank=options.node_rank)
            status = _run_once(options, engine_main, told, kept, options.dbo.timeout_s)
        return status


def _run_once(
    options: EngineOptions, engine_main: EngineMain, told: _Told, kept: Mapping[int, KeptOfRank], patience_s: float
) -> int | None:
    """Join a run, and run its ranks until they have ended; returns the exit status, or None to join the next run.

    Args:
        patience_s: how long node 0 may take to listen, in seconds.
    """
    with ExitStack() as ending:
        _await_node_0(options, patience_s, told)
        if told.number:
            return 128 + told.number
        folder = RunFolder()
        ending.callback(folder.remove)
        place = Place(folder.path, options.master_addr, options.master_port)
        run, options = _join_next(place, options)
        link = EngineLink(run.address, node_identity(options.node_rank).decode(), run.curve)
        ending.callback(link.close)
        told.listen()
        engines = _start(partial(LocalEngines, options, place, engine_main, kept), options, link, told)
        if engines is None:
            return _told_to_end(options, link, told, options.local_ranks.start)
        ending.callback(engines.kill)
        return _Supervisor(options, engines, link, told).run()


def _start(
    start: Callable[[threading.Event], LocalEngines], options: EngineOptions, link: EngineLink, told: _Told
) -> LocalEngines | None:
    """Start the ranks, which may take seconds, while node 0 waits for signs of life; None if told to end meanwhile."""
    abandoned = threading.Event()
    with futures.ThreadPoolExecutor(1) as starting:
        started = starting.submit(start, abandoned)
        while not futures.wait([started], node_beat_s(options.dbo.timeout_s)).done:
            link.send(NodeAlive(options.node_rank))
            if told.number:
                abandoned.set()
    if abandoned.is_set() and isinstance(started.exception(), CannotFork):
        return None
    return started.result()


def _await_node_0(options: EngineOptions, patience_s: float, told_to_end: _Told) -> None:
    """Wait until node 0 listens, or this node is told to end.

    Raises:
        UBatchError: its machine does not answer for `timeout_s`, or node 0 does not listen within `patience_s`.
    """
    to, timeout_s = (options.master_addr, options.master_port), options.dbo.timeout_s
    begun = answered = time.monotonic()
    told = False
    while not told_to_end.number:
        left_s = answered + timeout_s - time.monotonic()
        try:
            # Short: a packet that is lost is sent again after ever longer times, and a link may be whole again before.
            socket.create_connection(to, timeout=min(max(left_s, _LOOK_S), _CONNECT_S)).close()
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                answered = time.monotonic()
            elif time.monotonic() - answered >= timeout_s:
                raise UBatchError(
                    f"node 0 at {options.master_addr} cannot be reached: nothing has answered at port "
                    f"{options.master_port} for {timeout_s:g} s ({error}). Is the machine up, and does the network "
                    f"deliver packets both ways? A run on CPUs whose nodes are complete does not answer either: start "
                    f"all of its nodes again."
                ) from error
            if time.monotonic() - begun > patience_s:
                raise UBatchError(f"node 0 does not listen at {to[0]}:{to[1]} ({error}). Is it running?") from error
            if not told:
                log_event(_logger, "waiting for node 0", host=to[0], port=to[1], why=error)
                told = True
            time.sleep(_LOOK_S)
        else:
            return


def _join_next(place: Place, options: EngineOptions) -> tuple[Run, EngineOptions]:
    """As `_join`. If engines may be started again, the run that answers may be one that has failed: then its store ends
    within `timeout_s`, and the next one is joined."""
    until = time.monotonic() + (options.dbo.timeout_s if options.restarts.max_engine_restarts else 0.0)
    while True:
        try:
            return _join(place, options)
        except UBatchError as error:
            fits = isinstance(error, NodeTaken) or not isinstance(error, ConfigError)
            if not fits or time.monotonic() > until:
                raise
        time.sleep(_LOOK_S)


def _join(place: Place, options: EngineOptions) -> tuple[Run, EngineOptions]:
    """Join node 0's run, in a thread: on a dead link it waits for ever.

    Raises:
        ConfigError, UBatchError: as in `join_run` and `claim_node`; or node 0 does not answer in time.
    """
    joined: futures.Future[tuple[Run, EngineOptions]] = futures.Future()

    def join() -> None:
        try:
            store = connect_store(place)
            post_node(store, options)
            run, settled = join_run(store, options)
            claim_node(run, options.node_rank)
            joined.set_result((run, settled))
        except dist.DistError as error:
            what = f"node 0 at {options.master_addr} has left while this node joined it ({first_line(error)})."
            joined.set_exception(UBatchError(f"{what} Its log says why."))
        except BaseException as error:
            joined.set_exception(error)

    threading.Thread(target=join, name="join node 0", daemon=True).start()
    patience_s = node_silent_s(options.dbo.timeout_s)
    if not futures.wait([joined], patience_s).done:
        raise UBatchError(
            f"node 0 at {options.master_addr} cannot be reached: it has accepted a connection, and then has said "
            f"nothing for {patience_s:g} s. Does the same command with --node-rank 0 run there, and does the network "
            f"deliver packets both ways?"
        )
    return joined.result()


class _Told:
    """Handles SIGINT and SIGTERM of a node. Before `listen`, and after the first signal, they end the process at once.

    In a thread other than the main one, signals are not handled.

    Attributes:
        pipe: a file descriptor that becomes readable at the first signal.
        number: number of that signal; 0 before it.
    """

    def __init__(self) -> None:
        self.pipe, self._other_end = os.pipe()
        self.number = 0
        numbers = (signal.SIGINT, signal.SIGTERM) if current_thread() is main_thread() else ()
        # Connecting blocks, and could not be interrupted otherwise.
        self._before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items() if not self.number else ():
            signal.signal(number, handler)
        os.close(self.pipe)
        os.close(self._other_end)

    def listen(self) -> None:
        """Handle signals from now on: there are engines to end cleanly."""
        for number in self._before if not self.number else ():
            signal.signal(number, self._came)

    def _came(self, number: int, _: object) -> None:
        for each in self._before:  # the next signal ends the process
            signal.signal(each, signal.SIG_DFL)
        self.number = number
        os.write(self._other_end, b"!")


class _Supervisor:
    """Watches one node's engines until all have ended."""

    def __init__(self, options: EngineOptions, engines: LocalEngines, link: EngineLink, told: _Told) -> None:
        self._options = options
        self._node_rank = options.node_rank
        self._engines = engines
        self._link = link
        self._told = told
        self._restarts = options.restarts.max_engine_restarts > 0
        self._failed = False
        self._again = False
        self._decided = False
        self._clock = WatchedTime(node_beat_s(options.dbo.timeout_s))
        self._heard = 0.0  # when node 0 was heard last

    def run(self) -> int | None:
        """The exit status; None if the node shall join another run."""
        alive = dict(self._engines.sentinels)
        deadline = float("inf")
        while alive and time.monotonic() < deadline and not self._again:
            ended = wait([*alive.values(), self._told.pipe], self._clock.every_s)
            if self._told.number:
                return _told_to_end(self._options, self._link, self._told, next(iter(alive)))
            for rank in [rank for rank, sentinel in alive.items() if sentinel in ended]:
                del alive[rank]
                self._ended(rank)
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            self._clock.look()
            if alive and (lost := self._node_0_lost()):
                well = self._engines.join(_LEAVING_S) and not any(map(self._engines.exit_status, self._engines.ranks))
                if well and not self._failed:
                    return 0
                log_event(_logger, lost, level=logging.ERROR, node_rank=self._node_rank)
                return None if self._restarts else 1
        self._await_decision()
        if self._again:
            return None
        return 1 if alive or self._failed else 0

    def _await_decision(self) -> None:
        """Wait for node 0's last word about a run whose ranks have ended here."""
        deadline = time.monotonic() + (_DECISION_S if self._failed and self._restarts else _LAST_WORD_S)
        while not self._decided and (left := deadline - time.monotonic()) > 0:
            self._hear(min(left, _LAST_WORD_S))
            if self._link.disconnected_s() > _GONE_S:
                return

    def _ended(self, rank: int) -> None:
        failed = self._engines.ended(rank)
        if self._engines.exit_status(rank) == 0:
            return
        self._failed = True
        log_event(_logger, "engine ended", level=logging.ERROR, rank=rank, how=failed.text)
        self._tell_found()
        self._link.send(failed)

    def _node_0_lost(self) -> str | None:
        """Send a heartbeat, and read the answers to earlier ones. Returns what is wrong with node 0, or None."""
        self._link.send(NodeAlive(self._node_rank))
        self._hear()
        if self._link.disconnected_s() > _GONE_S:
            return "node 0 is gone"
        if self._clock.now - self._heard > node_silent_s(self._options.dbo.timeout_s):
            return f"node 0 at {self._options.master_addr} cannot be reached"
        return None

    def _hear(self, wait_s: float = 0.0) -> None:
        """Read what node 0 says. A run that has failed there has failed here, too, though the ranks end well."""
        for message in self._link.receive(wait_s):
            self._heard = self._clock.now
            if not isinstance(message, NodeHeard) or not message.failure:
                continue
            self._again |= message.again
            self._decided |= not message.deciding
            self._tell_found()
            if not self._failed:
                self._failed = True
                log_event(_logger, "run failed", level=logging.ERROR, node_rank=self._node_rank, why=message.failure)

    def _tell_found(self) -> None:
        self._link.send(NodeFound(self._node_rank, self._engines.found()))


def _told_to_end(options: EngineOptions, link: EngineLink, told: _Told, rank: int) -> int:
    """Tell node 0; returns the exit status."""
    name = signal.Signals(told.number).name
    log_event(_logger, "told to end", node_rank=options.node_rank, signal=name)
    what = f"is lost: node {options.node_rank} was told to end ({name})"
    link.send(Failed(rank, what, reason=RestartReason.UNREACHABLE))
    return 128 + told.number
