"""The API's side of the engines: starts them, sends requests, delivers their outputs, starts them again.

    generate  ->  router holds it, picks a rank  ->  Add to it, Wake to the others that step with it
                                                     (with tensor parallelism to their leaders, which tell followers)
    runs      ->  Outputs                        ->  router  ->  the request's stream  ->  generate yields
    runs      ->  interrupted                    ->  all streams are held
    runs      ->  serving                        ->  those that may run are sent again

A request that is sent again goes on after the tokens that have arrived here, as one that an engine has retracted does.
Its seed was drawn here when it was accepted, so it goes on as it would have. If engines fail too often
(`EngineOptions.restarts`), every stream fails with `EngineDead`.

Everything runs on one asyncio loop, and nothing blocks it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from model_runner import FinishReason, RequestError, fresh_seed
from moe import ExpertPlacement
from serving.balance import Balancer, ExpertBalance, LoadBook
from serving.engine.launch import EngineMain, require_descriptors
from serving.engine.options import EngineOptions
from serving.engine.profiles import Profiles
from serving.engine.rank.process import run_engine
from serving.engine.restarts import Pause
from serving.engine.routing import RequestStream, Router
from serving.engine.runs import EngineRuns
from serving.engine.suspects import Blame, Suspects
from serving.engine.wire import messages as wire
from serving.logs import log_event
from serving.requests import (
    EngineDead,
    EngineRestarting,
    EngineStatistics,
    PoisonousRequest,
    RequestInput,
    RequestOutput,
)
from ubatch import UBatchError

_logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_SETTLE_S = 0.002
_WELL = (FinishReason.STOP, FinishReason.LENGTH)


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
        resumed: requests that went on after a restart, each time counted.
        poisonous: requests that were ended because they killed an engine while they ran alone.
        loads: load of the experts; None for a dense model, and before the engines are ready.
        balancer: decides when experts move; None where they stay.
    """

    info: EngineInfo
    loads: LoadBook | None = None
    balancer: Balancer | None = None

    def __init__(self, options: EngineOptions, engine_main: EngineMain = run_engine) -> None:
        self.options = options
        self.resumed = self.poisonous = 0
        self._loop = asyncio.get_running_loop()
        self._router = Router(options.data_parallel_size, options.scheduler.max_num_seqs)
        self._suspects = Suspects()
        self._epoch = 0
        self._died: asyncio.Future[EngineDead] = self._loop.create_future()
        self._finished: asyncio.Future[str] = self._loop.create_future()
        self._profiles = Profiles(options)
        self._runs = EngineRuns(options, engine_main, self)
        self._closing = False
        self._load_file: asyncio.Task[None] | None = None

    # -- start and end ------------------------------------------------------------------------------------------

    @classmethod
    async def start(cls, options: EngineOptions, *, engine_main: EngineMain = run_engine) -> EngineClient:
        """Start the engines of node 0, and wait until those of all nodes are ready.

        Raises:
            ConfigError, CheckpointError: a rank cannot start with these options.
            EngineDead: a rank did not start for another reason, or a node did not join.
        """
        require_descriptors(options)
        client = cls(options, engine_main)
        try:
            await client._runs.start()
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
        self._fail_all(partial(EngineDead, "the engines were closed."))
        if self.balancer is not None:
            self.balancer.close()
        await self._runs.close(timeout_s)
        if self._load_file is not None and self.loads is not None:
            self.loads.end()
            await self._load_file
        for future in (self._died, self._finished):
            future.cancel()

    # -- requests -----------------------------------------------------------------------------------------------

    async def generate(self, request: RequestInput) -> AsyncGenerator[RequestOutput, None]:
        """Serve a request; yields its outputs, the last with a `finish_reason`. Closing the generator aborts it.

        Raises:
            RequestError, KVCacheExhausted: the request cannot be served.
            EngineRestarting: engines are started again, and it could not begin for `resume_timeout_s`.
            EngineDead: an engine died, so all engines were ended.
        """
        self._check_alive()
        request_id = request.request_id
        if request_id in self._router:
            raise RequestError(f"request {request_id!r} is being served already; give each its own request_id.")
        if not request.params.greedy and request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=fresh_seed()))
        try:
            add = wire.encode(wire.Add(request, self._epoch + 1))
            wire.decode_to_engine(add)  # its rank would fail with what cannot be decoded
        except (OverflowError, TypeError, ValueError, msgspec.DecodeError) as error:
            raise RequestError(f"request {request_id!r} has a value of a wrong type or size: {error}.") from error
        stream = self._router.hold(request)
        finished = False
        try:
            if self._may_begin(stream):
                self._begin(stream, add)
            else:
                await self._until_begun(stream)
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                self._abort(request_id)

    def _may_begin(self, stream: RequestStream) -> bool:
        return self._runs.serves and self._suspects.may_run(stream.request.request_id)

    def _begin(self, stream: RequestStream, add: bytes) -> None:
        """Send a request, as `Add` of the next epoch, to the rank that the router picks."""
        self._epoch += 1
        rank = self._router.assign(stream)
        self._send(rank, add)
        if self.options.enable_expert_parallel:
            self._send_each(wire.Wake(self._epoch), but=rank)

    async def _until_begun(self, stream: RequestStream) -> None:
        timeout_s = self.options.restarts.resume_timeout_s
        try:
            await asyncio.wait_for(stream.begun(), timeout_s)
        except TimeoutError:
            message = f"engines are started again, and this request could not begin within {timeout_s:g} s. Try again."
            raise EngineRestarting(message, retry_after_s=1.0 if self.pause is None else self.pause.left_s) from None

    def _begin_held(self) -> None:
        """Send the requests that are held and may run, in the order of their arrival."""
        for stream in self._router.held:
            if self._may_begin(stream):
                self.resumed += stream.was_sent
                self._begin(stream, wire.encode(wire.Add(stream.input, self._epoch + 1)))
        if self._runs.serves and self._suspects.allowed is None:
            self._runs.pause = None

    def _drop(self, request_id: str) -> RequestStream | None:
        """A request has ended, or is given up."""
        stream = self._router.drop(request_id)
        if self._suspects.watching and self._suspects.gone(request_id):
            self._begin_held()
        return stream

    def _abort(self, request_id: str) -> RequestStream | None:
        stream = self._drop(request_id)
        if stream is not None and stream.rank is not None and self.dead is None and not self._closing:
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
        while not self._router.all_received and self.pause is None:
            self._check_alive()
            await asyncio.sleep(_SETTLE_S)

    # -- what is seen -------------------------------------------------------------------------------------------

    @property
    def dead(self) -> EngineDead | None:
        """Why the engines have failed for good; None while they run, or are started again."""
        return self._runs.dead

    @property
    def pause(self) -> Pause | None:
        """Why new requests must wait: engines are started again, or requests are searched for one that kills them; None
        while they need not."""
        return self._runs.pause

    @property
    def statistics(self) -> Mapping[int, EngineStatistics]:
        """The last statistics of every rank; zeros before the first."""
        return self._router.statistics

    @property
    def restarts(self) -> Mapping[str, int]:
        """Reason (`RestartReason`) -> how often engines were started again."""
        return self._runs.restarts

    @property
    def balance(self) -> ExpertBalance | None:
        """The experts' load over the last steps; None for a dense model."""
        return None if self.loads is None else self.loads.balance()

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
        return self._runs.run.pids

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
        """Make every rank record its steps.

        Raises:
            EngineDead, EngineRestarting: engines died, or are started again.
        """
        self._check_serving()
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
            EngineDead, EngineRestarting: an engine died meanwhile.
        """
        self._check_serving()
        return await self._profiles.stop(folder, self._send_each)

    # -- the wire -----------------------------------------------------------------------------------------------

    def _send(self, dp_rank: int, message: bytes) -> None:
        """Send to the leader process of a data-parallel rank."""
        self._runs.run.post(self.options.leader(dp_rank), message)

    def _send_each(self, message: wire.ToEngine, but: int | None = None) -> None:
        """Send to every data-parallel rank."""
        for dp_rank in range(self.options.data_parallel_size):
            if dp_rank != but:
                self._send(dp_rank, wire.encode(message))

    def heard(self, message: wire.FromEngine) -> None:
        """See `runs.Owner`."""
        match message:
            case wire.Outputs() | wire.Loads() | wire.Moved() | wire.Refused() if not self._runs.serves:
                pass  # of a run that has failed: what it says is generated again
            case wire.Outputs():
                self._router.deliver(message)
                if self._suspects.watching:
                    self._watch(message.outputs)
            case wire.Loads(rank, steps):
                if self.loads is not None:
                    self.loads.add(rank, steps, message.counts(self.loads.experts))
                if self.balancer is not None:
                    self.balancer.counted(rank, steps)
            case wire.Moved(_, number, layers, num_bytes, over, failure):
                if self.balancer is not None:
                    self.balancer.moved(number, layers, num_bytes, failure, over=over)
            case wire.Refused(_, request_id, kind, text, param):
                stream = self._abort(request_id)  # it may run: only its output was too long
                if stream is not None:
                    stream.fail(lambda: wire.make_error(kind, text, param) or UBatchError(text))
            case wire.ProfileWritten():
                self._profiles.written(message)
            case wire.Finished(_, result):
                if not self._finished.done():
                    self._finished.set_result(result)

    def _watch(self, outputs: Sequence[RequestOutput]) -> None:
        """See who makes progress, so that others may run again."""
        told = [self._suspects.progressed(output.request_id, len(output.token_ids)) for output in outputs]
        for output in outputs:
            if output.finish_reason is not None:
                told.append(self._suspects.gone(output.request_id, well=output.finish_reason in _WELL))
        if any(told):
            self._begin_held()

    def _open_loads(self) -> None:
        """Begin a book of the experts' load; engines that were started again go on with it."""
        first, options = self._runs.run.ready[0], self.options
        placement = first.placement(options.step_size)
        if self.loads is None and placement is not None:
            self.loads = LoadBook(placement, options.expert_load_out, options.eplb_config.window_size)
            self._load_file = asyncio.create_task(self.loads.keep())
            if options.enable_eplb:
                link = None if options.emulated_link is None else options.emulated_link[1] * 1e6
                how = first.expert_bytes, link, options.nnodes
                self.balancer = Balancer(options.eplb_config, self.loads, self._move, *how)
        elif self.balancer is not None:
            self.balancer.restarted()

    def _move(self, number: int, placement: ExpertPlacement, layers: Sequence[int]) -> None:
        """Tell all ranks to move experts, and wake them: they move while they have nothing else to do, too."""
        self._epoch += 1
        self._send_each(wire.Rearrange.of(number, placement, layers))
        self._send_each(wire.Wake(self._epoch))

    def _make_info(self) -> EngineInfo:
        ready = [self._runs.run.ready[rank] for rank in sorted(self._runs.run.ready)]
        memory = "\n".join(f"{self.options.describe_rank(each.rank)}: {each.memory}" for each in ready)
        leaders = map(self.options.leader, range(self.options.data_parallel_size))
        blocks = tuple(self._runs.run.ready[rank].num_kv_blocks for rank in leaders)
        return EngineInfo(min(each.max_model_len for each in ready), ready[0].vocab_size, memory, blocks)

    # -- failures -----------------------------------------------------------------------------------------------

    def interrupted(self) -> None:
        """See `runs.Owner`."""
        self._router.hold_all()
        if self.balancer is not None:
            self.balancer.interrupted()
        self._profiles.fail(partial(EngineRestarting, "engines have failed, and are started again.", retry_after_s=1.0))

    def blamed(self, blame: Blame, error: EngineDead) -> bool:
        """See `runs.Owner`."""
        verdict = self._suspects.failed(blame.requests, inside=blame.inside, alive=self._router.requests)
        for request_id in verdict.guilty:
            self._end_poisonous(request_id, error)
        return verdict.searching

    def serving(self) -> None:
        """See `runs.Owner`."""
        self.info = self._make_info()
        self._open_loads()
        self._begin_held()

    def given_up(self, error: EngineDead) -> None:
        """See `runs.Owner`."""
        self._fail_all(partial(deepcopy, error))  # an error raised twice would have both tracebacks
        self._died.set_result(error)

    def _end_poisonous(self, request_id: str, error: EngineDead) -> None:
        """End a request that has killed an engine while it ran alone."""
        self.poisonous += 1
        log_event(_logger, "request ended: it kills engines", level=logging.ERROR, request=request_id)
        stream = self._router.drop(request_id)
        if stream is not None:
            message = f"request {request_id!r} has killed the engine each time that it ran, also alone: {error}"
            stream.fail(partial(PoisonousRequest, message))

    def _fail_all(self, error: Callable[[], EngineDead]) -> None:
        """Raise an error in every call that waits, of its own."""
        self._router.fail_all(error)
        self._profiles.fail(error)

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise deepcopy(self.dead)
        if self._closing:
            raise EngineDead("the engines were closed.")

    def _check_serving(self) -> None:
        self._check_alive()
        if self.pause is not None:
            raise EngineRestarting("engines have failed, and are started again. Try later.", retry_after_s=1.0)
