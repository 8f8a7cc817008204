"""One run of the engines: from the start of their processes to the first failure, or to the end.

    open      a private folder with store and socket, the ranks' processes, and a `Liveness` that watches them
    ready     every rank has said so
    failed    `Liveness` has found out which rank has failed, and why
    end       the processes are gone, and so is the folder

Nothing of a run is used again: the next one has a store, a socket and groups of its own, so that no message of an
engine that was given up reaches it. `RunHost` is what node 0 provides for it: folder, store, socket, and who may
connect.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from socket import socket as Socket

import msgspec
import torch.distributed as dist
import zmq
import zmq.asyncio

from serving.engine.kept import KeptOfRank
from serving.engine.launch import EngineMain, LocalEngines
from serving.engine.liveness import Liveness
from serving.engine.options import EngineOptions
from serving.engine.wire import messages as wire
from serving.engine.wire.agreement import is_of_this_run, node_identity, rank_identity
from serving.engine.wire.link import CurveGate, Seldom
from serving.engine.wire.rendezvous import Place, Run, Store, announce_network, check_node, host_store
from serving.engine.wire.secret import CurveKeys, read_secret
from serving.engine.wire.stores import RunFolder
from serving.network import admit_no_more, numeric_address
from ubatch import ConfigError, UBatchError

_logger = logging.getLogger(__name__)

_TELLING_S, _LOOK_S = 3.0, 0.02
"""How long other nodes may take to tell what their ranks were doing, and how often to look, in seconds. A node's
supervisor reads messages every two seconds at the latest."""
_LOOK_FOR_NODES_S = 0.2


class RunFailed(UBatchError):
    """A rank failed before all were ready.

    Attributes:
        failed: which one, and why.
    """

    def __init__(self, failed: wire.Failed) -> None:
        super().__init__(failed.text)
        self.failed = failed


class EngineRun:
    """The engines of one run, on one asyncio loop. Nothing blocks it.

    Args:
        heard: called with every message that is no sign of life.
        failed: called once, if a rank fails after all were ready.
        rejoins_s: how long other nodes may take to join again, in seconds; None for a first start.

    Attributes:
        ready: rank -> its `Ready`, once it has sent it.
        over: whether a rank has failed.
        told: what other nodes have found of their ranks, by rank.
    """

    def __init__(
        self,
        options: EngineOptions,
        heard: Callable[[wire.FromEngine], object],
        failed: Callable[[wire.Failed], object],
        *,
        rejoins_s: float | None = None,
    ) -> None:
        self._options, self._heard, self._report_failure = options, heard, failed
        self.host = RunHost(options)
        self.socket = self.host.socket
        self.ready: dict[int, wire.Ready] = {}
        self.over = False
        self.told: dict[int, wire.RankFound] = {}
        self._nodes_told: set[int] = set()
        self.all_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.liveness = Liveness(options, self._failed, rejoins_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._posted: dict[int, list[bytes]] = {}
        self._unread = Seldom(_logger, "not a message")
        self._strange = Seldom(_logger, "a message of no rank or node of this run")
        self._starting: asyncio.Future[LocalEngines] | None = None
        self._abandoned = threading.Event()
        self._engines: LocalEngines | None = None
        self._watched: dict[int, int] = {}
        self._ending: asyncio.Task[None] | None = None

    async def start(self, main: EngineMain, kept: Mapping[int, KeptOfRank]) -> None:
        """Start the engines of node 0, and wait until those of all nodes are ready. Call `end` after an error, too.

        Raises:
            ConfigError: this machine cannot do it.
            RunFailed: a rank did not start, or a node did not join.
        """
        loop = asyncio.get_running_loop()
        place = self.host.open(self.liveness.heard_node, self.liveness.report)
        self._tasks += [asyncio.create_task(work) for work in (self.receive(), self.liveness.watch())]
        # In a thread: the process that forks them may have to be started, and imports for seconds.
        start = asyncio.to_thread(LocalEngines, self._options, place, main, kept, self._abandoned)
        self._starting = asyncio.ensure_future(start)
        self._engines = engines = await asyncio.shield(self._starting)
        self._watched = dict(engines.sentinels)
        for rank, sentinel in self._watched.items():
            loop.add_reader(sentinel, self._exited, engines, rank, sentinel)
        await self.all_ready

    async def end(self, timeout_s: float, failure: str = "", *, again: bool = False) -> None:
        """End the processes, and close everything. A second call waits for what the first one has begun.

        Args:
            timeout_s: how long they may take before they are killed, in seconds.
            failure: why; told to the other nodes, whose ranks then end without being failures of their own.
            again: another run follows, which they may join.

        Raises:
            UBatchError: a process was killed and does not end.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(timeout_s, failure, again))
        await asyncio.shield(self._ending)

    async def _end(self, timeout_s: float, failure: str, again: bool) -> None:
        self.liveness.close()
        self._abandoned.set()
        if failure:
            self._tell_nodes(wire.NodeHeard(failure, again))  # before their ranks are told to end
        for rank in self.ready:  # not only leaders: a follower's leader may be dead
            self.post(rank, wire.encode(wire.Shutdown()))
        self._send_posted()
        for sentinel in self._watched.values():
            asyncio.get_running_loop().remove_reader(sentinel)
        try:
            if self._starting is not None:
                (engines,) = await asyncio.gather(self._starting, return_exceptions=True)
                if isinstance(engines, LocalEngines):
                    if timeout_s:
                        await asyncio.to_thread(engines.join, timeout_s)
                    await asyncio.to_thread(engines.kill)
        finally:
            await self._close()

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.all_ready.cancel()
        self.host.close()

    def found(self) -> Mapping[int, wire.RankFound]:
        """What ranks were doing when they ended, or do now, as far as is known; to be asked before `end`."""
        return {**self.told, **({} if self._engines is None else self._engines.found())}

    async def ask_found(self, failure: str) -> Mapping[int, wire.RankFound]:
        """The same, once the other nodes have told it, too; they have some seconds.

        Args:
            failure: as for `end`.
        """
        self._tell_nodes(wire.NodeHeard(failure, deciding=True))
        self._nodes_told.clear()
        deadline = time.monotonic() + _TELLING_S
        while len(self._nodes_told) < self._options.nnodes - 1 and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        return self.found()

    def _tell_nodes(self, message: wire.NodeHeard) -> None:
        for node_rank in range(1, self._options.nnodes):
            self._answer(node_identity(node_rank), wire.encode(message))

    @property
    def pids(self) -> Mapping[int, int | None]:
        """Rank -> process id, for this node's processes."""
        return {} if self._engines is None else self._engines.pids

    # -- the wire -----------------------------------------------------------------------------------------------

    def post(self, rank: int, message: bytes) -> None:
        """Queue a message. All of one turn of the event loop are sent together, so their requests start together."""
        if not self._posted:
            asyncio.get_running_loop().call_soon(self._send_posted)
        self._posted.setdefault(rank, []).append(message)

    def _send_posted(self) -> None:
        """Send the queued messages. Errors are ignored: if an engine is gone, its death is noticed elsewhere."""
        posted, self._posted = self._posted, {}
        for rank, messages in posted.items():
            self._answer(rank_identity(rank), *messages)

    def _answer(self, to: bytes, *messages: bytes) -> None:
        sent = asyncio.ensure_future(self.socket.send_multipart([to, *messages]))
        sent.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def receive(self) -> None:
        """Handle messages, until cancelled."""
        while True:
            frames = await self.socket.recv_multipart()
            try:
                message = wire.decode_from_engine(frames[-1])
            except msgspec.DecodeError as error:
                self._unread.happened(error=error)
                continue
            if is_of_this_run(self._options, frames[0], message):
                self._handle(message)
            else:
                kind = type(message).__name__
                self._strange.happened(sender=frames[0].decode(errors="replace"), kind=kind)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Alive():
                self.liveness.heard(message)
            case wire.NodeAlive(node_rank):
                self.liveness.heard_node(node_rank)
                self._answer(node_identity(node_rank), wire.encode(wire.NodeHeard()))
            case wire.NodeFound(node_rank, ranks):
                self._nodes_told.add(node_rank)
                self.told.update(ranks)
            case wire.Failed():
                self.liveness.report(message)
            case wire.Ready(rank):
                self.ready[rank] = message
                if self.ready.keys() == set(range(self._options.world_size)) and not self.all_ready.done():
                    self.liveness.begin()
                    self.host.admit_no_more()
                    self.all_ready.set_result(None)
            case _:
                self._heard(message)

    # -- failures -----------------------------------------------------------------------------------------------

    def _exited(self, engines: LocalEngines, rank: int, sentinel: int) -> None:
        """The process of a rank ended."""
        asyncio.get_running_loop().remove_reader(sentinel)
        del self._watched[rank]
        self.liveness.report(engines.ended(rank))

    def _failed(self, failed: wire.Failed) -> None:
        self.over = True
        if not self.all_ready.done():
            self.all_ready.set_exception(RunFailed(failed))
        else:
            self._report_failure(failed)


class RunHost:
    """Makes a new folder; `open` begins a run.

    Attributes:
        socket: receives the messages of all ranks and nodes, and sends to them by their identity.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._folder = RunFolder()
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self._gate: CurveGate | None = None
        self._store: Store | None = None
        self._listener: Socket | None = None
        self._closed = False

    def open(self, joined: Callable[[int], object], failed: Callable[[wire.Failed], object]) -> Place:
        """Begin the run; returns where its processes find it.

        Args:
            joined: called on the event loop with the rank of every other node that has started.
            failed: called there if a node has another secret or other settings.

        Raises:
            ConfigError: the secret or the address cannot be used.
        """
        options, loop = self._options, asyncio.get_running_loop()
        announce_network(options)
        secret = read_secret(options.cluster_secret_file)
        store, place, self._listener = host_store(options, self._folder.path)
        self._store = store  # it listens as long as it is kept
        run = Run.open(store, secret)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        run.post_client_address(self._bind(run.curve), options)

        def tell(work: Callable[..., object], *args: object) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(work, *args)

        if options.nnodes > 1:
            args = (partial(check_node, store, secret, options), partial(tell, joined), partial(tell, failed))
            threading.Thread(target=self._check_nodes, args=args, name="nodes", daemon=True).start()
        return place

    def admit_no_more(self) -> None:
        """All ranks have opened the store: nobody else has to. NCCL opens it again, whenever a group is made."""
        if self._listener is not None and self._options.device == "cpu":
            with suppress(OSError):  # the system has no socket filters; ranks have logged that
                admit_no_more(self._listener)

    def close(self) -> None:
        """Close the sockets, and remove the folder."""
        self._closed = True
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=1000)
        self._store = None  # stops listening
        if self._listener is not None:
            self._listener.close()
        self._folder.remove()

    def _bind(self, curve: CurveKeys | None) -> str:
        if self._options.nnodes == 1:
            address = f"ipc://{self._folder.path}/client"
            self.socket.bind(address)
            return address
        if curve is not None:
            self._gate = CurveGate(self._context, self.socket, curve)
        address = numeric_address(self._options.master_addr)  # zmq listens on an address, not on a host's name
        self.socket.setsockopt(zmq.IPV6, ":" in address)
        host = f"tcp://[{address}]" if ":" in address else f"tcp://{address}"
        return f"{host}:{self.socket.bind_to_random_port(host)}"

    def _check_nodes(
        self, check: Callable[[int], bool], joined: Callable[[int], object], failed: Callable[[wire.Failed], object]
    ) -> None:
        """Wait for the other nodes, and check that each has this node's secret and settings. A thread's main function:
        the store answers over the network's interface, which may go down."""
        missing = set(range(1, self._options.nnodes))
        while missing and not self._closed:
            for node in sorted(missing):
                try:
                    if check(node):
                        missing.remove(node)
                        joined(node)
                except dist.DistError:  # this process ends
                    return
                except ConfigError as error:
                    rank = node * self._options.local_size
                    failed(wire.Failed(rank, str(error), wire.error_kind(error), "ConfigError"))
                    return
            time.sleep(_LOOK_FOR_NODES_S)
