"""The API's side of the engines: starts them, sends requests, delivers their outputs.

    generate  ->  router picks a rank  ->  Add to it, Wake to the others that step with it
                                           (with tensor parallelism to their leaders, which tell their followers)
    receive loop  ->  Outputs          ->  router  ->  the request's stream  ->  generate yields
    sentinels, Failed, Alive           ->  liveness        ->  every stream fails, the other engines are ended

Everything runs on one asyncio loop, and nothing blocks it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from model_runner import RequestError
from serving.engine.launch import EngineMain, LocalEngines, require_descriptors
from serving.engine.liveness import Liveness, dead_error, start_error
from serving.engine.options import EngineOptions
from serving.engine.profiles import Profiles
from serving.engine.rank.process import run_engine
from serving.engine.routing import RequestStream, Router
from serving.engine.run_host import RunHost
from serving.engine.wire import messages as wire
from serving.engine.wire.agreement import is_of_this_run, node_identity, rank_identity
from serving.engine.wire.gate import Seldom
from serving.logs import log_event
from serving.requests import EngineDead, EngineStatistics, RequestInput, RequestOutput
from ubatch import UBatchError

_logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_SETTLE_S = 0.002


@dataclass(frozen=True)
class EngineInfo:
    """What the engines serve.

    Attributes:
        memory: memory held by each process, as text, one line per process.
        num_kv_blocks: blocks of each data-parallel rank's KV cache.
    """

    max_model_len: int
    vocab_size: int
    memory: str
    num_kv_blocks: tuple[int, ...] = ()


class EngineClient:
    """The engines, as the API sees them. Made by `start`.

    Attributes:
        dead: why the engines have failed; None while they run.
    """

    info: EngineInfo

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self._host = RunHost(options)
        self._socket = self._host.socket
        self.dead: EngineDead | None = None
        self._loop = asyncio.get_running_loop()
        self._router = Router(options.data_parallel_size, options.scheduler.max_num_seqs)
        self._epoch = 0
        self._ready: dict[int, wire.Ready] = {}
        self._all_ready: asyncio.Future[None] = self._loop.create_future()
        self._died: asyncio.Future[EngineDead] = self._loop.create_future()
        self._finished: asyncio.Future[str] = self._loop.create_future()
        self._liveness = Liveness(options, self._failed)
        self._profiles = Profiles(options)
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._posted: dict[int, list[bytes]] = {}
        self._unread = Seldom(_logger, "not a message")
        self._strange = Seldom(_logger, "a message of no rank or node of this run")
        self._engines: LocalEngines | None = None

    # -- start and end ------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, options: EngineOptions, *, engine_main: EngineMain = run_engine) -> EngineClient:
        """Start the engines of node 0, and wait until those of all nodes are ready.

        Raises:
            ConfigError, CheckpointError: a rank cannot start with these options.
            EngineDead: a rank did not start for another reason, or a node did not join.
        """
        require_descriptors(options)
        client = cls(options)
        try:
            liveness = client._liveness
            place = client._host.open(liveness.heard_node, liveness.report)
            client._tasks += [asyncio.create_task(work) for work in (client._receive(), liveness.watch())]
            client._engines = engines = LocalEngines(options, place, engine_main)
            for rank, sentinel in engines.sentinels.items():
                client._loop.add_reader(sentinel, client._exited, engines, rank, sentinel)
            await client._all_ready
        except BaseException:
            await client._end(timeout_s=0.0)
            raise
        return client

    async def close(self) -> None:
        """End the engines, whatever still runs; requests in flight raise `EngineDead`."""
        if not self._closing:
            await self._end(timeout_s=_CLOSE_S)

    async def _end(self, timeout_s: float) -> None:
        self._closing = True
        self._liveness.close()
        self._fail_all(partial(EngineDead, "the engines were closed."))
        self._shut_down()
        if self._engines is not None:
            for sentinel in self._engines.sentinels.values():
                self._loop.remove_reader(sentinel)
            await _end(self._engines, timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for future in (self._all_ready, self._died, self._finished):
            future.cancel()
        self._host.close()

    # -- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: RequestInput) -> AsyncGenerator[RequestOutput, None]:
        """Serve a request; yields its outputs, the last with a `finish_reason`. Closing the generator aborts it.

        Raises:
            RequestError, KVCacheExhausted: the request cannot be served.
            EngineDead: an engine died, so all engines were ended.
        """
        self._check_alive()
        request_id = request.request_id
        if request_id in self._router:
            raise RequestError(f"request {request_id!r} is being served already; give each its own request_id.")
        try:
            add = wire.encode(wire.Add(request, self._epoch + 1))
            wire.decode_to_engine(add)  # its rank would fail with what cannot be decoded
        except (OverflowError, TypeError, ValueError, msgspec.DecodeError) as error:
            raise RequestError(f"request {request_id!r} has a value of a wrong type or size: {error}.") from error
        self._epoch += 1
        stream = self._router.add(request)
        self._send(stream.rank, add)
        if self.options.enable_expert_parallel:
            self._send_each(wire.Wake(self._epoch), but=stream.rank)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                yield output
        except UBatchError:
            finished = True
            raise
        finally:
            if not finished:
                self._abort(request_id)

    def _abort(self, request_id: str) -> RequestStream | None:
        stream = self._router.drop(request_id)
        if stream is not None and self.dead is None and not self._closing:
            self._router.aborted(stream.rank)
            self._send(stream.rank, wire.encode(wire.Abort(request_id)))
        return stream

    async def settle(self) -> None:
        """Wait until every rank has sent its last statistics; call it when no request runs. A rank that had no request
        in the last steps sends its statistics late.

        Raises:
            EngineDead: an engine died.
        """
        for dp_rank in range(self.options.data_parallel_size):
            self._router.aborted(dp_rank)
        self._send_each(wire.Abort(""))  # aborts nothing; a rank without work answers with its statistics
        while not self._router.all_received:
            self._check_alive()
            await asyncio.sleep(_SETTLE_S)

    # -- what is seen -------------------------------------------------------------------------------------------

    @property
    def statistics(self) -> Mapping[int, EngineStatistics]:
        """The last statistics of every rank; zeros before the first."""
        return self._router.statistics

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, on all ranks, including those sent but not yet received."""
        return self._router.num_waiting

    @property
    def num_outstanding(self) -> int:
        """Requests that have not ended."""
        return self._router.num_outstanding

    @property
    def pids(self) -> Mapping[int, int | None]:
        """Rank -> process id, for this node's processes."""
        return {} if self._engines is None else self._engines.pids

    async def wait_dead(self) -> EngineDead:
        """Wait until an engine dies; returns why. Cancelled when the client is closed."""
        return await asyncio.shield(self._died)

    async def result(self) -> str:
        """Wait until the ranks have done their job (`EngineOptions.job`); returns what they found.

        Raises:
            EngineDead: an engine died.
        """
        await asyncio.wait((self._finished, self._died), return_when=asyncio.FIRST_COMPLETED)
        self._check_alive()
        return self._finished.result()

    async def start_profile(self) -> None:
        """Make every rank record its steps."""
        self._check_alive()
        self._send_each(wire.StartProfile())

    async def stop_profile(self, folder: Path | None = None) -> list[Path]:
        """Stop recording; every rank writes a Chrome trace.

        Args:
            folder: where this node's files are moved to; by default each stays where its rank has written it, in
                `options.profile_folder` or a new folder.

        Returns:
            The files, in the order of the ranks.

        Raises:
            UBatchError: no profile was started, or a file could not be written, or not within 120 s.
            EngineDead: an engine died meanwhile.
        """
        self._check_alive()
        return await self._profiles.stop(folder, self._send_each)

    # -- the wire -----------------------------------------------------------------------------------------------

    def _send(self, dp_rank: int, message: bytes) -> None:
        """Send to the leader process of a data-parallel rank."""
        self._post(self.options.leader(dp_rank), message)

    def _send_each(self, message: wire.ToEngine, but: int | None = None) -> None:
        """Send to every data-parallel rank."""
        for dp_rank in range(self.options.data_parallel_size):
            if dp_rank != but:
                self._send(dp_rank, wire.encode(message))

    def _shut_down(self) -> None:
        """Send `Shutdown` to every process, not only to leaders: a follower's leader may be dead."""
        for rank in self._ready:
            self._post(rank, wire.encode(wire.Shutdown()))
        self._send_posted()

    def _post(self, rank: int, message: bytes) -> None:
        """Queue a message. All of one turn of the event loop are sent together, so their requests start together."""
        if not self._posted:
            self._loop.call_soon(self._send_posted)
        self._posted.setdefault(rank, []).append(message)

    def _send_posted(self) -> None:
        """Send the queued messages. Errors are ignored: if an engine is gone, its death is noticed elsewhere."""
        posted, self._posted = self._posted, {}
        for rank, messages in posted.items():
            self._answer(rank_identity(rank), *messages)

    def _answer(self, to: bytes, *messages: bytes) -> None:
        sent = asyncio.ensure_future(self._socket.send_multipart([to, *messages]))
        sent.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                message = wire.decode_from_engine(frames[-1])
            except msgspec.DecodeError as error:
                self._unread.happened(error=error)
                continue
            if is_of_this_run(self.options, frames[0], message):
                self._handle(message)
            else:
                kind = type(message).__name__
                self._strange.happened(sender=frames[0].decode(errors="replace"), kind=kind)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Alive():
                self._liveness.heard(message)
            case wire.Outputs():
                self._router.deliver(message)
            case wire.Refused(_, request_id, kind, text, param):
                stream = self._abort(request_id)  # it may run: only its output was too long
                if stream is not None:
                    stream.fail(lambda: wire.make_error(kind, text, param) or UBatchError(text))
            case wire.Ready(rank):
                self._ready[rank] = message
                if self._ready.keys() == set(range(self.options.world_size)) and not self._all_ready.done():
                    self.info = self._make_info()
                    self._liveness.begin()
                    self._host.admit_no_more()
                    self._all_ready.set_result(None)
            case wire.ProfileWritten():
                self._profiles.written(message)
            case wire.Finished(_, result):
                if not self._finished.done():
                    self._finished.set_result(result)
            case wire.NodeAlive(node_rank):
                self._liveness.heard_node(node_rank)
                self._answer(node_identity(node_rank), wire.encode(wire.NodeHeard()))
            case wire.Failed():
                self._liveness.report(message)

    def _make_info(self) -> EngineInfo:
        ready = [self._ready[rank] for rank in sorted(self._ready)]
        memory = "\n".join(f"{self.options.describe_rank(each.rank)}: {each.memory}" for each in ready)
        leaders = map(self.options.leader, range(self.options.data_parallel_size))
        blocks = tuple(self._ready[rank].num_kv_blocks for rank in leaders)
        return EngineInfo(min(each.max_model_len for each in ready), ready[0].vocab_size, memory, blocks)

    # -- failures -----------------------------------------------------------------------------------------------

    def _exited(self, engines: LocalEngines, rank: int, sentinel: int) -> None:
        """The process of a rank ended."""
        self._loop.remove_reader(sentinel)
        self._liveness.report(engines.ended(rank))

    def _failed(self, failed: wire.Failed) -> None:
        """The cause of a failure is known: fail all waiting calls, and end the other engines."""
        name = self.options.describe_rank(failed.rank)
        if not self._all_ready.done():
            self._all_ready.set_exception(start_error(failed, name))
            return
        self.dead = dead_error(failed, name)
        log_event(_logger, "engine dead", level=logging.ERROR, rank=failed.rank, error=self.dead)
        self._fail_all(partial(deepcopy, self.dead))  # an error raised twice would have both tracebacks
        self._died.set_result(self.dead)
        for node_rank in range(1, self.options.nnodes):  # before their ranks are told to end, which is no failure
            self._answer(node_identity(node_rank), wire.encode(wire.NodeHeard(str(self.dead))))
        self._shut_down()
        if self._engines is not None:
            self._tasks.append(asyncio.create_task(_end(self._engines, 3.0)))

    def _fail_all(self, error: Callable[[], EngineDead]) -> None:
        """Raise an error in every call that waits, of its own."""
        self._router.fail_all(error)
        self._profiles.fail(error)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise deepcopy(self.dead)
        if self._closing:
            raise EngineDead("the engines were closed.")


async def _end(engines: LocalEngines, timeout_s: float) -> None:
    if timeout_s:
        await asyncio.to_thread(engines.join, timeout_s)
    engines.kill()
