"""State shared by all routes: engine, tokenizer, model names, checks before a request is accepted; work in threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from serving.api.schema.errors import ApiError, engine_dead, shutting_down
from serving.metrics import RequestMetrics, make_registry
from serving.requests import QueueFull
from serving.structured import GrammarChecks
from serving.turns.parsers import TurnSettings
from ubatch.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from serving.engine.client import EngineClient

_SEED_BITS = 62  # those of a request's outputs are counted up from its own, within 64 bits


@dataclass
class Service:
    """The parts and settings of a server.

    Attributes:
        names: the model's names; answers to requests without a name have the first.
        root: the checkpoint, as it was named at the start; None if nobody says.
        defaults: the checkpoint's sampling parameters, for those that a request leaves out.
        observer: is told of every output: that it was requested, its tokens, its drafts, and its end.
        max_waiting_requests: how many requests may wait for a rank; None for no limit.
        max_outputs_per_request: how many outputs one body may ask for, over all its prompts; None for no limit.
        profiles: `/start_profile` is allowed.
        log_requests: log each request's outputs; see `serving.api.request_log`.
        max_log_len: most token ids logged of a prompt; None for all.
        turns: how tool calls and reasoning are read from the text of chats.
        max_logprobs: most likely tokens that a request may ask for at each position.
        tokens_as_ids: log-probabilities name tokens by their ids, where a request does not say.
        force_usage: every stream ends with the usage.
        response_role: role of a chat's answers.
        template_kwargs: variables of the chat template that requests may override.
        seed: of the seeds of requests that have none; None for random ones.
        comment_s: how often a stream gets a comment while engines are started again, in seconds.
        draining: the server is shutting down: new requests are refused.
        long_work: runs in threads what would block the event loop.
        grammars: tries the grammars of structured outputs.
        created: when the server was started, in seconds since 1970.
        entrance: lock held from the check of the queue until the engine counts the new requests.
    """

    engine: EngineClient
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    observer: RequestMetrics = field(default_factory=lambda: make_registry("", dict)[1])
    max_waiting_requests: int | None = None
    max_outputs_per_request: int | None = None
    root: str | None = None
    profiles: bool = False
    log_requests: bool = False
    max_log_len: int | None = None
    turns: TurnSettings = field(default_factory=TurnSettings)
    max_logprobs: int = 20
    tokens_as_ids: bool = False
    force_usage: bool = False
    response_role: str = "assistant"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    comment_s: float = 10.0
    draining: bool = False
    long_work: LongWork = field(init=False)
    grammars: GrammarChecks = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    entrance: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.long_work = LongWork(lambda: self.draining)
        self.grammars = GrammarChecks(lambda: self.tokenizer)
        self._seeds = None if self.seed is None else Random(self.seed)

    def model_name(self, name: str | None) -> str:
        """The model name of a request; the first one if it gives none."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(map(repr, self.names))
            message = f"The model {shown(name)} does not exist; this server has {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids outside the model's vocabulary."""
        vocab_size = self.engine.info.vocab_size
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < vocab_size:
                message = f"{param}: {shown(token)} is not a token id from 0 to {vocab_size - 1}."
                raise ApiError(400, message, param=param)

    def fresh_seed(self) -> int | None:
        """The seed of a request that has none: the next one of `seed`, or None."""
        return None if self._seeds is None else self._seeds.getrandbits(_SEED_BITS)

    def default_max_tokens(self, left: int, otherwise: int) -> int:
        """Tokens of an output whose request does not limit them: the checkpoint's `max_new_tokens`, if it has them, but
        at least 1 and at most the `left` ones of the context."""
        return max(1, min(left, self.defaults.get("max_tokens", otherwise)))

    @property
    def paused(self) -> bool:
        """Whether engines are started again."""
        return self.engine.pause is not None

    def admit(self) -> None:
        """Check that one more request can be accepted. While engines are started again it can: it waits.

        Raises:
            ApiError: 503, the engine is dead or the server is shutting down.
            QueueFull: too many requests wait already.
        """
        if self.engine.dead is not None:
            raise engine_dead(self.engine.dead)
        if self.draining:
            raise shutting_down()
        self.check_queue()

    def check_queue(self) -> None:
        """Check that one more request may wait. Hold `entrance` until the engine counts it, or too many may pass."""
        limit = self.max_waiting_requests
        if limit is None:
            return
        waiting = self.engine.num_waiting  # a property that counts over all requests: read it once
        if waiting >= limit:
            raise QueueFull(f"{waiting} requests wait already, and at most {limit} may. Try again later.")


SHORT_BYTES = 20_000  # a larger body takes milliseconds, so its work runs in a thread
WAITING_BYTES = 64 * 2**20  # most bytes of bodies in the queue
THREADS = 2
DRAINING_SEEN_S = 0.05

Result = TypeVar("Result")


@dataclass(eq=False)
class _Job:
    pieces: deque[Callable[[], Any]]
    size: int
    results: list[Any] = field(default_factory=list)
    done: Future[list[Any]] = field(default_factory=Future)

    @property
    def left(self) -> int:
        """Bytes still to be processed, estimated."""
        return self.size * len(self.pieces) // max(1, len(self.pieces) + len(self.results))


class LongWork:
    """Runs the work of large bodies, which would block the event loop, in two threads, first come, first served.

    Such as tokenizing a long text. The work of small bodies runs at once.

    Work in several pieces goes back to the end of the queue after each piece.

    Work that has not begun is dropped when its client leaves or the server drains. Work that has begun cannot be
    stopped; then neither the request nor the end of the process waits for it.
    """

    def __init__(self, draining: Callable[[], bool]) -> None:
        self._draining = draining
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._threads = 0

    async def run(self, work: Callable[[], Result], size: int) -> Result:
        """Run `work`; returns its result, or raises its error.

        Args:
            work: called once, or never if it is dropped.
            size: bytes of the request's body.

        Raises:
            QueueFull: more than `WAITING_BYTES` would wait.
            ApiError: 503, the server is about to end.
        """
        (result,) = await self.run_pieces((work,), size)
        return result

    async def run_pieces(self, pieces: Sequence[Callable[[], Result]], size: int) -> list[Result]:
        """As `run`, for several pieces of one body's work; returns the result of each."""
        if size < SHORT_BYTES:
            return [piece() for piece in pieces]
        job = _Job(deque(pieces), size)
        self._enqueue(job)
        try:
            done = asyncio.wrap_future(job.done)
            while not done.done():
                if self._draining():
                    raise shutting_down()
                await asyncio.wait((done,), timeout=DRAINING_SEEN_S)
            return done.result()
        finally:
            self._drop(job)

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            waiting = sum(each.left for each in self._waiting)
            if waiting and waiting + job.size > WAITING_BYTES:
                raise QueueFull(f"{waiting} bytes of long prompts wait to be tokenized already. Try again later.")
            self._waiting.append(job)
            if self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="long work", daemon=True).start()

    def _drop(self, job: _Job) -> None:
        job.done.cancel()
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            if job.done.cancelled():
                continue
            try:
                job.results.append(job.pieces.popleft()())
            except BaseException as error:  # raised where the result is awaited
                self._end(job, error)
                continue
            if job.pieces:
                with self._lock:
                    self._waiting.append(job)
            else:
                self._end(job, None)

    @staticmethod
    def _end(job: _Job, error: BaseException | None) -> None:
        if not job.done.set_running_or_notify_cancel():
            return  # its request was dropped
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(job.results)

    def _next(self) -> _Job | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._threads -= 1
            return None
