"""An engine that answers from a function: for tests of the API, without a model and without processes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model_runner import FinishReason, RequestError, TokenLogprobs
from serving.engine.restarts import Pause, RestartReason
from serving.requests import DraftCounts, EngineDead, EngineRestarting, RequestInput, RequestOutput, StartTimes

EOS = 0


@dataclass(frozen=True)
class FakeInfo:
    """What the engine can hold."""

    max_model_len: int = 1024
    vocab_size: int = 2048


def count_up(request: RequestInput) -> Sequence[int]:
    """Tokens that tell outputs apart: from the seed on, upwards."""
    first = 300 + (request.params.seed or 0)
    return range(first, first + request.params.max_tokens)


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    """Numbers that a test can foresee: the token itself is the second most likely one."""
    others = [token + 1, token, *(token + other for other in range(2, count))][:count]
    return TokenLogprobs(token, -1.5, 2, tuple((other, -1.0 - place / 2) for place, other in enumerate(others)))


@dataclass
class FakeEngine:
    """Implements what the API uses of `EngineClient`.

    Attributes:
        reply: the tokens of an output; it is cut at `max_tokens`, the end of sequence and stop tokens.
        tokens_per_step: how many come at once; all but one of them count as drafts, of which one more was wrong.
        pause_s: before every step.
        num_cached_tokens: what the first request finds in the prefix cache; later ones find their whole prompt.
        fail_after: so many tokens come, then `failure` is raised.
        hold: steps wait until this is set, if there is one.
        pause: why engines are started again, if they are; new requests then wait for `serves`, or raise `refusal`.
        restarts, resumed, poisonous: for the metrics.
        alive: requests that run.
        aborted: requests that were taken back.
        profile_failure: what `stop_profile` raises, if anything.
    """

    reply: Callable[[RequestInput], Sequence[int]] = count_up
    tokens_per_step: int = 1
    pause_s: float = 0.0
    num_cached_tokens: int = 0
    fail_after: int | None = None
    failure: Exception | FinishReason = FinishReason.ABORT
    hold: asyncio.Event | None = None
    hold_after: int = 0
    info: FakeInfo = field(default_factory=FakeInfo)
    dead: EngineDead | None = None
    pause: Pause | None = None
    serves: asyncio.Event | None = None
    refusal: EngineRestarting | None = None
    restarts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RestartReason, 0))
    resumed: int = 0
    poisonous: int = 0
    num_waiting: int = 0
    alive: dict[str, RequestInput] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    requests: list[RequestInput] = field(default_factory=list)
    profiling: bool = False
    profile_failure: Exception | None = None

    async def generate(self, request: RequestInput) -> AsyncGenerator[RequestOutput, None]:
        """Steps of the reply."""
        if self.dead is not None:
            raise self.dead
        if request.request_id in self.alive:
            raise RequestError(f"request {request.request_id} is alive already")
        self.requests.append(request)
        self.alive[request.request_id] = request
        ended = False
        try:
            if self.pause is not None and self.refusal is not None:
                raise self.refusal
            if self.pause is not None and self.serves is not None:
                await self.serves.wait()
            async for output in self._steps(request):
                ended = output.finish_reason is not None
                yield output
        finally:
            del self.alive[request.request_id]
            if not ended:
                self.aborted.append(request.request_id)

    async def start_profile(self) -> None:
        """Remembered only."""
        self.profiling = True

    async def stop_profile(self) -> list[Path]:
        """One file, that is not there."""
        if self.profile_failure is not None:
            raise self.profile_failure
        self.profiling = False
        return [Path("traces/rank0.json")]

    async def _steps(self, request: RequestInput) -> AsyncGenerator[RequestOutput, None]:
        tokens, reason, stop_token = self._tokens(request)
        params = request.params
        num_cached_tokens = self.num_cached_tokens if request is self.requests[0] else len(request.token_ids)
        for place in range(0, len(tokens), self.tokens_per_step):
            await asyncio.sleep(self.pause_s)
            if self.hold is not None and place >= self.hold_after:
                await self.hold.wait()
            if self.dead is not None:
                raise self.dead
            if self.fail_after is not None and place >= self.fail_after:
                if isinstance(self.failure, Exception):
                    raise self.failure
                yield RequestOutput(request.request_id, (), finish_reason=self.failure)
                return
            new = tokens[place : place + self.tokens_per_step]
            last = place + self.tokens_per_step >= len(tokens)
            prompt_logprobs = None
            if place == 0 and params.prompt_logprobs is not None:
                known = [logprobs_of(token, params.prompt_logprobs) for token in request.token_ids[1:]]
                prompt_logprobs = [None, *known]
            yield RequestOutput(
                request.request_id,
                new,
                logprobs=() if params.logprobs is None else [logprobs_of(token, params.logprobs) for token in new],
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason if last else None,
                stop_token=stop_token if last else None,
                num_cached_tokens=num_cached_tokens,
                drafts=DraftCounts(1, len(new), len(new) - 1) if self.tokens_per_step > 1 else DraftCounts(),
                times=StartTimes(0.25, 0.5) if place == 0 else None,
            )

    def _tokens(self, request: RequestInput) -> tuple[Sequence[int], FinishReason, int | None]:
        params = request.params
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        tokens: list[int] = []
        for token in self.reply(request):
            tokens.append(token)
            if token in ends and len(tokens) > params.min_tokens:
                return tokens, FinishReason.STOP, token
            if len(tokens) == params.max_tokens:
                break
        return tokens, FinishReason.LENGTH, None


class CrowdedEngine(FakeEngine):
    """All that has not ended waits."""

    @property
    def num_waiting(self) -> int:  # type: ignore[override]
        """As many as there are."""
        return len(self.alive)

    @num_waiting.setter
    def num_waiting(self, _: int) -> None: ...
