"""A rank's process: it reads messages from one socket, runs steps, and sends their outputs.

    loop      handle received messages, send a heartbeat | step | send outputs and statistics
    pause     block on the socket until there is work; wake up now and then to send a heartbeat

With tensor parallelism only the leader of a group receives the client's messages; it forwards them (`lockstep`).

A single rank pauses when it has no work. Ranks that share experts step together as long as any of them has work (the
others without tokens), and pause together. The vote of a step tells all ranks at the same step that all are idle. But a
request may be on its way to one of them, and one rank must not step while the others sleep. So every request has a
number, its *epoch*. Its rank gets the epoch with the request, the others get it in `Wake`. After an all-idle step the
ranks compare their last epochs in one small all-reduce. They pause only if all epochs are equal and no rank has work.
The client sends the next epoch to all ranks, so all wake up.

Ranks with another job than to serve (`ubatch tune`) have a loop of their own in such a process (`run_rank`).

The process ends after `Shutdown`, after an error, or when the process that started it has ended. It ignores Ctrl-C and
SIGTERM: they often reach every process of a group while the process that started the engines still drains them.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from tqdm import tqdm

from attention import KVCacheExhausted
from model_runner import CheckpointError, ModelRunner, RequestError
from serving.engine.kept import InStep, SharedMemory, StepRecord, read_steps
from serving.engine.options import EngineOptions
from serving.engine.rank.build import describe_memory, describe_transport, make_core, make_runner, warm_up
from serving.engine.rank.core import EngineCore
from serving.engine.rank.listeners import refuse_strangers
from serving.engine.rank.lockstep import Link, join_turns
from serving.engine.rank.tracing import TEMPORARY, profile_file
from serving.engine.wire import messages as wire
from serving.engine.wire.agreement import rank_identity
from serving.engine.wire.link import EngineLink
from serving.engine.wire.rendezvous import Place, Run, connect_store, init_ranks, join_run
from serving.logs import configure_logging, log_event
from serving.processes import Orphaned, check_parent
from serving.ranks import pin_rank
from serving.requests import RequestOutput
from ubatch import CommGroup, ConfigError, GroupBroken, PeerFailed, TransferTimeout, UBatchError
from ubatch.process import Heart, stop_hearts
from ubatch.ranks import put_sockets_in, taking_long

_logger = logging.getLogger(__name__)

_LOOK_OUT_S = 1.0
"""How often a pausing rank checks its parent and sends a heartbeat, in seconds; more often if the time-out is short."""
_BEATS_PER_TIMEOUT = 4
_REPORT_S = 0.2
"""How often a rank whose steps give no output sends its statistics, in seconds."""
_MOVE_S = 0.001
"""How long a rank that only moves experts waits from step to step, in seconds."""
_GRAMMAR_S = 0.005
"""How long a rank that has nothing but requests without their grammar waits before it reads messages, in seconds."""


RankWork: TypeAlias = Callable[[Run, EngineLink], None]
"""What a rank's process does once it has joined the run: called with the run, and its connection to the client, which
it closes at the end."""


def run_engine(options: EngineOptions, rank: int, place: Place) -> None:
    """Main function of a rank's process. It exits with status 0 after `Shutdown`, with 1 after an error."""
    run_rank(options, rank, place, partial(_serve, options, rank, place))


def run_rank(options: EngineOptions, rank: int, place: Place, work: RankWork) -> None:
    """Join the run, and work. After an error the client is told, and the process exits with status 1.

    A `Shutdown` explains an error: then the client is not told, and an engine that served exits with status 0.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if options.log_level is not None:
        configure_logging(options.log_level, f"rank {rank}")
    tqdm.set_lock(threading.RLock())  # its default lock is a system semaphore, which a killed process leaves behind
    put_sockets_in(place.folder)
    check_parent()  # if it is gone, so is the store, and connecting would be tried for minutes
    store = connect_store(place)
    run, _ = join_run(store, options)
    client = EngineLink(run.address, rank_identity(rank).decode(), run.curve)
    try:
        work(run, client)
    except BaseException as error:
        stop_hearts()  # a lane that still runs must not send heartbeats while this thread sends
        # other ranks may have ended on `Shutdown` before this rank read it
        ending = isinstance(error, ToldToEnd) or client.shutdown_comes()
        if not ending:
            _report_failure(client, rank, place, error)
        client.close()
        sys.stderr.flush()
        served = ending and not options.job  # a job that is told to end has not been done
        os._exit(0 if served else 1)  # skips the destructors of process groups, which would wait for stuck operations


def _serve(options: EngineOptions, rank: int, place: Place, run: Run, client: EngineLink) -> None:
    link = join_turns(client, place.folder, options, rank, check_parent)
    with _loaded(options, rank, run, client, None if place.kept is None else place.kept.weights) as (runner, core):
        if place.kept is not None:
            core.record = StepRecord(place.kept.steps)
        memory = describe_memory(runner)
        for way in describe_transport(runner):
            log_event(_logger, "transport", way=way)
        log_event(_logger, "engine ready", memory=memory, overlap_schedule=options.overlaps_schedule)
        vocab_size, num_blocks = runner.config.vocab_size, runner.allocator.num_blocks
        experts = None if core.loads is None else core.loads.experts
        slots = b"" if core.loads is None or rank else core.loads.placement.experts.tobytes()
        moving = 0 if core.mover is None else core.mover.expert_bytes
        length = options.scheduler.max_model_len
        link.send(wire.Ready(rank, length, vocab_size, memory, num_blocks, experts, slots, moving))
        Engine(options, rank, core, runner.group, link).serve()
    link.close()


class ToldToEnd(UBatchError):
    """The client sent `Shutdown` before this rank had done its job."""


@contextmanager
def _loaded(
    options: EngineOptions, rank: int, run: Run, client: EngineLink, kept: SharedMemory | None = None
) -> Iterator[tuple[ModelRunner, EngineCore]]:
    """Join the other ranks, load the model, warm it up and make its loop; all is released at the end."""
    local_rank = place_rank(options, rank)
    collective = options.step_size > 1
    with (
        tqdm(total=3, desc="engine", unit="stage", disable=None if rank == 0 else True, leave=False) as bar,
        ExitStack() as starting,
    ):
        starting.enter_context(beating(client, rank))
        bar.set_postfix_str("meet the other ranks")
        if collective:
            init_ranks(run, rank, options)
        starting.enter_context(taking_long("starting"))  # ranks load and compile at different speeds
        group = CommGroup.from_process_group(timeout_s=options.dbo.timeout_s) if collective else None
        bar.update()
        bar.set_postfix_str("load the model")
        with make_runner(options, group, device_index=local_rank, kept=kept) as runner:
            bar.update()
            bar.set_postfix_str("warm up")
            warm_up(options, runner)
            core = make_core(options, runner)
            if collective and options.device == "cpu":  # NCCL connects when it needs to
                refuse_strangers()
            bar.update()
            bar.close()
            gc.collect()
            gc.freeze()  # the collector need not walk through the model again
            starting.close()
            yield runner, core
            core.close()
    if collective:
        dist.destroy_process_group()


@contextmanager
def beating(client: EngineLink, rank: int) -> Iterator[None]:
    """Send heartbeats in the `with` block, in which the rank starts: from a thread, as nothing else could. If the
    process that started this one ends, so does this one: it may wait for a rank that is gone, too."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(_LOOK_OUT_S):
            try:
                check_parent()
            except Orphaned as error:
                log_event(_logger, "engine failed", level=logging.ERROR, error=error)
                os._exit(1)
            client.send(wire.Alive(rank, 0.0))

    thread = threading.Thread(target=beat, name="heart", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def place_rank(options: EngineOptions, rank: int) -> int:
    """Choose this process's GPU, and pin it to its cores; returns its place among the ranks of this node.

    Raises:
        ConfigError: this node has too few GPUs.
    """
    local_rank = rank - options.local_ranks.start
    size = options.local_size
    if options.device == "cuda":
        if (gpus := torch.cuda.device_count()) < size:
            raise ConfigError(f"{size} ranks on this node need as many GPUs; it has {gpus}.")
        torch.cuda.set_device(local_rank)
        pin_rank(local_rank, size, torch.device("cuda", local_rank))
    elif size > 1:
        pin_rank(local_rank, size)
    return local_rank


def _report_failure(link: EngineLink, rank: int, place: Place, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    echo = isinstance(error, PeerFailed | GroupBroken | TransferTimeout)
    if _logger.hasHandlers():
        told = isinstance(error, ConfigError | CheckpointError | Orphaned)  # the message is enough: no traceback
        _logger.error("engine failed\n%s" if not told else "engine failed: %s", error if told else text)
    in_step = InStep() if place.kept is None else read_steps(place.kept.steps)
    kind, name = wire.error_kind(error), type(error).__name__
    link.send(wire.Failed(rank, str(error), kind, name, text, echo, in_step=in_step))


class Engine:
    """Serves the requests of one rank. If the process that started it ends, it ends within a step or a second.

    Args:
        core: the loop; its steps are collective if there is a group.
    """

    def __init__(
        self, options: EngineOptions, rank: int, core: EngineCore, group: CommGroup | None, link: Link
    ) -> None:
        self.rank, self.dp_rank = rank, options.dp_rank(rank)
        self.core = core
        self._group = group
        self._link = link
        self._profile_folder = options.profile_folder
        self._beat_s = min(_LOOK_OUT_S, options.dbo.timeout_s / _BEATS_PER_TIMEOUT)
        self._heart = Heart(lambda silence_s: link.send(wire.Alive(rank, silence_s)), self._beat_s)
        self._epoch = 0
        self._received = 0
        self._reported = (0, 0.0)
        self._shutdown = False

    def serve(self) -> None:
        """Serve requests until `Shutdown` arrives."""
        self._pause()  # a step without requests could keep one rank while the other gets its first ones
        while self._take_in(wait_s=0):
            if self._group is not None:
                with self._group.step():
                    self._report(self.core.step())
                    pause = self.core.idle and self._all_may_pause(self._group)
                self._tell_moves()
            else:
                pause = not self.core.has_work
                if not pause:
                    self.core.wait(_GRAMMAR_S)
                    self._report(self.core.step())
            if pause:
                self._pause()

    def _all_may_pause(self, group: CommGroup) -> bool:
        """After an all-idle step: whether all ranks have seen the same epoch and none has work."""
        connection = group.usable_connection()
        facts = torch.tensor([self._epoch, -self._epoch, int(self.core.has_work or self._moving)])
        work = dist.all_reduce(facts, dist.ReduceOp.MAX, group=connection.vote_pg, async_op=True)
        connection.wait_for_works((work,), "pause")
        highest, lowest, busy = facts.tolist()
        return highest == -lowest and not busy

    @property
    def _moving(self) -> bool:
        return self.core.mover is not None and self.core.mover.busy

    def _tell_moves(self) -> None:
        """Tell what has become of moves; without tokens, give them some time to travel."""
        mover = self.core.mover
        if mover is None:
            return
        for news in mover.take_news():
            if self.core.loads is not None:
                self.core.loads.placement = mover.placement
            if self.rank == 0:
                self._link.send(wire.Moved(0, news.number, news.layers, news.num_bytes, news.over, news.failure))
        if self.core.idle and mover.busy:
            time.sleep(_MOVE_S)

    def _pause(self) -> None:
        """Wait, without using the CPU, for the next request of this rank or of one that steps with it."""
        self.core.scheduler.check(idle=True)
        self._report((), at_once=True)
        epoch = self._epoch
        while self._epoch == epoch and self._take_in(wait_s=self._beat_s):
            pass

    # -- messages -----------------------------------------------------------------------------------------------

    def _take_in(self, wait_s: float) -> bool:
        """Handle received messages; wait up to `wait_s` for the first. Returns False after `Shutdown`."""
        check_parent()
        self._heart.beat()
        received = self._received
        for message in self._link.receive(wait_s):
            self._handle(message)
        if ready := self.core.ready():
            for message in self._link.decide([wire.Admit(request_id) for request_id in ready]):
                self._handle(message)
        if received != self._received and not self.core.has_work:
            self._report((), at_once=True)
        return not self._shutdown

    def _handle(self, message: wire.ToEngine) -> None:
        match message:
            case wire.Add(request, epoch):
                self._epoch = epoch
                self._received += 1
                with self._refusing(request.request_id):
                    self.core.add(request)
            case wire.Admit(request_id):
                with self._refusing(request_id):
                    self.core.admit(request_id)
            case wire.Abort(request_id):
                self._received += 1
                self.core.abort(request_id)
            case wire.Wake(epoch):
                self._epoch = epoch
            case wire.Rearrange(number, layers):
                if self.core.mover is not None:
                    self.core.mover.begin(number, message.placement(self.core.mover.placement), layers)
            case wire.StartProfile():
                self.core.tracer.start_profile()
            case wire.StopProfile(name):
                folder = self._profile_folder or Path(tempfile.mkdtemp(prefix=TEMPORARY))
                path = folder / profile_file(name, self.rank)
                with taking_long("writing a profile"):
                    wrong = self.core.tracer.stop_profile(path, self.rank)
                self._link.send(wire.ProfileWritten(self.rank, str(path), wrong))
            case wire.Shutdown():
                self._shutdown = True

    @contextmanager
    def _refusing(self, request_id: str) -> Iterator[None]:
        """Tell the client if the request cannot be served."""
        record = self.core.record
        if record is not None:
            record.begin_aside([request_id])
        try:
            yield
        except (RequestError, KVCacheExhausted) as error:
            param = error.param if isinstance(error, RequestError) else None
            self._link.send(wire.Refused(self.dp_rank, request_id, wire.error_kind(error), str(error), param))
        if record is not None:
            record.end_aside()

    def _report(self, outputs: Sequence[RequestOutput], *, at_once: bool = False) -> None:
        """Send outputs and statistics. Without outputs: only with `at_once`, after a new message, or every 0.2 s.
        Before them the experts' load, if it is due, or with `at_once`."""
        for steps, counts in () if self.core.loads is None else self.core.loads.news(now=at_once):
            self._link.send(wire.Loads.of(self.rank, steps, counts))
        received, at = self._reported
        now = time.monotonic()
        if not (outputs or at_once or received != self._received or now - at > _REPORT_S):
            return
        self._reported = (self._received, now)
        self._link.send(wire.Outputs(self.dp_rank, self._received, outputs, self.core.statistics()))
