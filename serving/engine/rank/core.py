"""An engine's loop: schedule, launch, sample, process; plain, or with the next step scheduled while one runs.

    plain        schedule N | launch N | sample N | wait, process N | schedule N+1 | ...

    overlapped   host     schedule N+1 | process N | schedule N+2 | process N+1 | ...
                 device   ---- step N ----- | ---- step N+1 ----- | ---- step N+2 ...

In the overlapped loop step N+1 is launched before the host knows the tokens of step N: the device takes them from its
own memory (the runner's FutureMap). Sampling that depends on those tokens on the host (penalties, `min_tokens`, bad
sequences) waits until step N is processed; the forward of step N+1 runs meanwhile. A request that ended in step N is
still in step N+1; its result there is dropped. `model_runner.step.streams` says what runs on which stream.

A request with a grammar is held back until its grammar is made, which takes a thread some milliseconds (`grammars`):

    add      its grammar is begun; nothing waits for it
    ready    the requests whose grammar is made
    admit    put one of these into the queue

Ranks in lock-step must admit it before the same step, so it is their leader that asks `ready`.
"""

import concurrent.futures
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol, TypeAlias

from model_runner import RequestError, Step, StepOutput, TokenGrammar
from model_runner.balance import Mover
from serving.engine.kept import StepRecord
from serving.engine.rank.tracing import LoadReporter, StepTracer
from serving.requests import STEP_TOKENS, EngineStatistics, Observed, RequestInput, RequestOutput
from serving.scheduler import Scheduler
from ubatch import Trace, UBatchError
from ubatch.process import beat

_EMPTY_STEPS = 1000
"""This many steps in a row without tokens, though requests wait and no step is in flight, are a scheduler's fault."""
_BEAT_S = 0.5
"""How often a rank that waits for a grammar sends a heartbeat, in seconds."""

_request_id = attrgetter("request.request_id")
"""Of a request's share of a step."""

GrammarMaker: TypeAlias = Callable[[], TokenGrammar]
"""Makes a new grammar, that has taken in nothing, at each call."""


class LaunchedStep(Protocol):
    """A step that the device works on (`model_runner.PendingStep` is one).

    Attributes:
        step: what was launched, with the ranks' decision.
    """

    step: Step

    def sample(self) -> None:
        """Sample the step's tokens; called once."""

    def result(self) -> StepOutput:
        """Wait for the step; returns its tokens."""


class Executor(Protocol):
    """What runs steps (`model_runner.ModelRunner` is one)."""

    def launch(self, step: Step, /) -> LaunchedStep:
        """Start the forward of a step."""

    def restart_clock(self) -> None:
        """Start the step timer again: the time since the last launch was idle time, not a step's."""


class Grammars(Protocol):
    """What makes grammars (`serving.structured.matcher` has it)."""

    def begin(self, text: str) -> Future[GrammarMaker]:
        """Begin to make a grammar, without waiting. The result makes one for each request.

        The future raises RequestError if the text is no grammar, or grammars cannot be made here.
        """

    def close(self) -> None:
        """Make no more grammars: those that have not been begun are given up, so that the process can end."""


@dataclass(frozen=True)
class HeldRequest:
    """A request that waits for its grammar."""

    request: RequestInput
    grammar: Future[GrammarMaker]

    def wait(self) -> TokenGrammar:
        """Its grammar; waits for it, with heartbeats."""
        while not self.grammar.done():
            concurrent.futures.wait([self.grammar], _BEAT_S)
            beat()
        return self.grammar.result()()


class EngineCore:
    """The loop over a scheduler and an executor.

    Args:
        measure_overlap: trace some steps for the statistics; see `StepTracer`.
        decided: returns the decisions of `--enable-dbo`: kind of step -> text.
        grammars: makes the grammars of requests; None refuses these requests.
        loads: tells the load of the experts; None for a dense model.
        mover: moves experts between the ranks (`ModelRunner.mover`); None if they stay.

    Attributes:
        loads, mover: as given.
        idle: whether the last step had no token on any rank; the same on all ranks. A request may have arrived since.
        record: where the requests of the steps that run are kept, if the rank may be started again.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        overlap_schedule: bool,
        measure_overlap: bool = True,
        decided: Callable[[], Mapping[str, str]] = dict,
        grammars: Grammars | None = None,
        loads: LoadReporter | None = None,
        mover: Mover | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.overlap_schedule = overlap_schedule
        self.tracer = StepTracer(measures=measure_overlap, loads=loads)
        self._decided = decided
        self._grammars = grammars
        self.loads = loads
        self.mover = mover
        self._held: dict[str, HeldRequest] = {}
        self._given_up: dict[str, Future[GrammarMaker]] = {}  # grammars of requests that were aborted meanwhile
        self._in_flight: tuple[LaunchedStep, Trace | None] | None = None
        self._steps: Counter[str] = Counter()
        self._graph_replays = 0
        self._step_tokens = Observed(STEP_TOKENS)
        self.idle = False
        self.record: StepRecord | None = None
        self._empty_steps = 0

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, request: RequestInput) -> None:
        """Add a request; one with a grammar is held back until `admit`.

        Raises:
            RequestError, KVCacheExhausted: it can never be served.
        """
        if not self.has_work:
            self.executor.restart_clock()
        if request.request_id in self._held:
            raise RequestError(f"request {request.request_id!r} is alive already; give every request its own id.")
        if request.params.grammar is None:
            self.scheduler.add(request)
            return
        self.scheduler.check_new(request)
        if self._grammars is None:
            raise RequestError("this engine makes no grammars; remove `grammar` from the parameters.", param="grammar")
        self._held[request.request_id] = HeldRequest(request, self._grammars.begin(request.params.grammar))
        self._record_held()

    def ready(self) -> Sequence[str]:
        """The ids of requests whose grammar is made, or cannot be made."""
        if self._given_up:
            self._record_held()
        return [name for name, held in self._held.items() if held.grammar.done()] if self._held else ()

    def admit(self, request_id: str) -> None:
        """Put a held request into the queue, unless it was aborted; waits for its grammar.

        Raises:
            RequestError: its grammar cannot be made.
        """
        held = self._held.pop(request_id, None)
        if held is not None:
            self._record_held()
            self.scheduler.add(held.request, held.wait())

    def wait(self, timeout_s: float) -> None:
        """If all requests are held, wait for the first grammar, for up to `timeout_s`."""
        if self._held and self._in_flight is None and not self.scheduler.has_work:
            futures = [held.grammar for held in self._held.values()]
            concurrent.futures.wait(futures, timeout_s, concurrent.futures.FIRST_COMPLETED)

    def abort(self, request_id: str) -> bool:
        """End a request and free its KV; it gets no more outputs. Returns False if there is no such request."""
        held = self._held.pop(request_id, None)
        if held is None:
            return self.scheduler.abort(request_id)
        self._given_up[request_id] = held.grammar  # a thread may make it yet
        self._record_held()
        return True

    def _record_held(self) -> None:
        self._given_up = {name: grammar for name, grammar in self._given_up.items() if not grammar.done()}
        if self.record is not None:
            self.record.hold([*self._held, *self._given_up])

    @property
    def has_work(self) -> bool:
        """Whether this rank has requests, or a step in flight."""
        return self._in_flight is not None or self.scheduler.has_work or bool(self._held)

    # -- the loops ----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one turn of the loop; returns its outputs. With several ranks all must call it.

        A step without tokens is launched, too, because other ranks may have tokens.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken, UBatchTimeout: the step did not end; see `ModelRunner.launch`.
            KVCacheError: the scheduler's books do not balance.
            UBatchError: nothing can be scheduled, though requests wait.
        """
        return self._overlapped() if self.overlap_schedule else self._plain()

    def _plain(self) -> list[RequestOutput]:
        launched, trace = self._launch()
        launched.sample()
        return self._process(launched, trace)

    def _overlapped(self) -> list[RequestOutput]:
        previous, self._in_flight = self._in_flight, None

        # Step N+1: launch.
        launched, trace = self._launch()
        if not launched.step.delay_sampling:
            launched.sample()

        # Step N: its tokens, while the device works on step N+1.
        outputs = self._process(*previous) if previous is not None else []

        # Step N+1: what had to wait for those tokens.
        if launched.step.delay_sampling:
            launched.sample()

        # Process an empty step at once: it has nothing to overlap with, and all ranks learn now whether all are idle.
        if launched.step.shares:
            self._in_flight = launched, trace
        else:
            outputs += self._process(launched, trace)
        return outputs

    def drain(self) -> list[RequestOutput]:
        """Finish the step in flight without starting another. With several ranks all must call it."""
        previous, self._in_flight = self._in_flight, None
        return self._process(*previous) if previous is not None else []

    def _launch(self) -> tuple[LaunchedStep, Trace | None]:
        """Launch the next step; returns it, and the trace that records it."""
        self.idle = False  # until this turn has processed an empty step
        record = self.record
        drafts = record is not None and self.scheduler.drafts
        if record is not None and drafts:  # a draft network runs, or the tokens of each are searched
            record.begin_aside(self.scheduler.running)
        try:
            step = self.scheduler.schedule()
        except BaseException:
            if not self.scheduler.drafting:
                self._suspect_all()
            raise
        if record is not None:
            if drafts:
                record.end_aside()
            record.begin(list(map(_request_id, step.shares)))
        with self.tracer.step() as trace:
            launched = self.executor.launch(step)
        self.scheduler.advance(step)
        return launched, trace

    def _process(self, launched: LaunchedStep, trace: Trace | None) -> list[RequestOutput]:
        output = launched.result()
        outputs = self.scheduler.process(launched.step, output)
        if self.record is not None:
            self.record.end()
        self.idle = output.all_idle
        if not output.all_idle:
            decision = output.decision
            overlapped = "engaged" if decision.num_lanes > 1 else "engaged_single"
            outcome = overlapped if decision.engaged else str(decision.reason)
            self._steps[f"{launched.step.mode}/{outcome}"] += 1
            self._graph_replays += bool(decision.graph_mode)
            if decision.engaged:
                self.tracer.engaged(trace)
            if launched.step.shares:
                self._step_tokens.add(launched.step.num_tokens)
            if self.loads is not None:
                self.loads.stepped()
        stuck = not launched.step.shares and self._in_flight is None and self.scheduler.has_work
        self._empty_steps = self._empty_steps + 1 if stuck else 0
        if self._empty_steps >= _EMPTY_STEPS:
            self._suspect_all()
            raise UBatchError(
                f"requests wait, but {_EMPTY_STEPS} steps in a row had nothing to run: {self.statistics()}. "
                f"This is a fault in the scheduler."
            )
        return outputs

    def _suspect_all(self) -> None:
        """The scheduler has failed: it is not known for which of its requests."""
        if self.record is not None:
            self.record.begin_aside(self.scheduler.requests)

    def close(self) -> None:
        """Give up the requests whose grammar is not made; nothing may be called afterwards."""
        if self._grammars is not None:
            self._grammars.close()

    # -- what is seen -------------------------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        """The current state and the totals."""
        totals = vars(self.tracer.total)
        scheduler = self.scheduler.statistics()
        return replace(
            scheduler,
            num_waiting=scheduler.num_waiting + len(self._held),
            steps=dict(self._steps),
            graph_replays=self._graph_replays,
            step_tokens=self._step_tokens.told,
            dbo_auto=self._decided(),
            **totals,
        )
