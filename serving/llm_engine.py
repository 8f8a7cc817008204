"""Requests are added while others run: from asyncio (`AsyncLLM`), or by a caller who runs the steps (`LLMEngine`).

Both are vLLM's classes of these names. `AsyncLLM.generate` yields an output while it is generated. Its engines' client
runs in a thread with an event loop of its own. So an `AsyncLLM` can be made before the loop of its caller runs, and be
used from several loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.balance import ExpertBalance
from serving.engine.offline import EngineThread, OfflineEngine, RequestFailed, make_offline_engine
from serving.offline.engine_args import EngineArgs
from serving.offline.front import AnyParams, check_request
from serving.offline.not_offered import not_offered
from serving.offline.opening import close_when_forgotten, opened, profile_path
from serving.offline.outputs import Job, Metric, RequestOutput, read_metrics
from serving.offline.prompts import Prompt
from serving.offline.sampling_params import SamplingParams
from serving.requests import EngineDead, EngineStatistics
from serving.requests import RequestOutput as Step
from ubatch import UBatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_News = tuple[int, Step] | Exception | None
"""An output's index and what a step gave it; or why nothing more comes, None if `AsyncLLM.abort` was called."""


class AsyncLLM:
    """A model that generates for many callers at once. Call `shutdown` at the end.

    Its ranks are processes, which import the main module again: a script must keep its code behind
    `if __name__ == "__main__":`.

    Args:
        engine_args: the options, as of `LLM`.

    Attributes:
        options: the engines' options.

    Raises:
        ConfigError, CheckpointError, EngineDead: see `LLM`.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        found = opened(**vars(engine_args))
        self.options, self._front, self._profile_folder = found.options, found.front, found.profile_folder
        self._one_at_a_time = threading.Lock()  # a tokenizer is not thread-safe
        self._running: dict[str, _Stream] = {}
        self._engine = EngineThread(self.options)
        self._closing = close_when_forgotten(self, self._engine.close)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Make one from `EngineArgs`; blocks until the engines are ready."""
        return cls(engine_args)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: AnyParams | None,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for a prompt, and yield what `sampling_params.output_kind` asks for: all so far, what is new, or
        one output at the end. The last one is `finished`. Closing the generator aborts the request.

        Args:
            prompt: a text, a list of tokens, or a dict with `prompt` or `prompt_token_ids`.
            sampling_params: `get_default_sampling_params()` for None.
            request_id: unique among the requests that run.
            lora_request, priority, tokenization_kwargs: see `LLM.generate`.

        Raises:
            RequestError, KVCacheExhausted: it cannot be served, or the request_id is in use.
            EngineDead: a rank died, or `shutdown` was called.
            EngineRestarting: ranks are started again, and it could not begin within `resume_timeout_s`.
            PoisonousRequest: the request has killed a rank while it ran alone (`max_engine_restarts`).
        """
        check_request(request_id, self._running, lora_request)
        stream = self._running[request_id] = _Stream()
        try:
            job = await asyncio.to_thread(
                self._make_job, prompt, sampling_params, request_id, priority, tokenization_kwargs
            )
            stream.begin(self._engine, job)
            while not job.finished:
                if output := await stream.next(job):
                    yield output
        finally:
            stream.end()
            del self._running[request_id]

    def _make_job(
        self, prompt: Prompt, params: AnyParams | None, request_id: str, priority: int, tokenization: Any
    ) -> Job:
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            self._front.grammar(params.structured_outputs)  # it may take a second, and others need the tokenizer
        with self._one_at_a_time:
            return self._front.streamed_job(
                request_id, prompt, params, self._engine.info, priority=priority, tokenization=tokenization
            )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; each yields what it has, with the finish reason `abort`. Others are ignored."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            if (stream := self._running.get(each)) is not None:
                stream.put(None)

    # -- what is seen -------------------------------------------------------------------------------------------

    async def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """See `LLM.get_tokenizer`."""
        return self._front.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM.get_default_sampling_params`."""
        return self._front.default_params()

    @property
    def statistics(self) -> Mapping[int, EngineStatistics]:
        """Every rank's state and totals, as last reported."""
        return dict(self._engine.client.statistics)

    def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        return read_metrics(self.statistics)

    def expert_balance(self) -> ExpertBalance | None:
        """See `LLM.expert_balance`."""
        return self._engine.balance() if self._closing.alive else None

    @property
    def errored(self) -> bool:
        """Whether a rank has died."""
        return self._engine.client.dead is not None

    @property
    def dead_error(self) -> EngineDead | None:
        """Why the engines have failed; None while they run."""
        return self._engine.client.dead

    @property
    def is_running(self) -> bool:
        """Whether requests can be served."""
        return self._closing.alive and not self.errored

    async def check_health(self) -> None:
        """Check that requests can be served.

        Raises:
            EngineDead: a rank has died, or `shutdown` was called.
        """
        if self.dead_error is not None:
            raise EngineDead(str(self.dead_error))
        if not self._closing.alive:
            raise EngineDead("the engines were closed.")

    async def start_profile(self) -> None:
        """See `LLM.start_profile`."""
        await asyncio.to_thread(lambda: self._engine.call(self._engine.client.start_profile()))

    async def stop_profile(self, folder: str | Path | None = None) -> list[Path]:
        """See `LLM.stop_profile`."""
        path = profile_path(folder or self._profile_folder)
        return await asyncio.to_thread(lambda: self._engine.call(self._engine.client.stop_profile(path)))

    # -- its end ------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the ranks' processes; requests that run raise `EngineDead`."""
        self._closing()

    if not TYPE_CHECKING:  # for editors the names that are not offered are not there
        __getattr__ = not_offered


class _Stream:
    """The news of one request, from the engines' thread to the loop that waits for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[_News] = asyncio.Queue()
        self._begun: list[Future[None]] = []

    def put(self, news: _News) -> None:
        """Add news, from any thread."""
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    def begin(self, engine: EngineThread, job: Job) -> None:
        """Begin the job's requests."""
        for index, request in enumerate(job.requests):
            deliver = partial(self._deliver, index)
            self._begun.append(engine.begin(request, deliver))

    def _deliver(self, index: int, what: Step | Exception) -> None:
        self.put(what if isinstance(what, Exception) else (index, what))

    async def next(self, job: Job) -> RequestOutput | None:
        """Wait for news, and take all there are; returns what is to be yielded, if anything is.

        Raises:
            UBatchError: the request failed.
        """
        changed: set[int] = set()
        news: _News = await self._news.get()
        while True:
            match news:
                case Exception():
                    raise news
                case None:
                    job.abort()
                    changed.update(range(len(job.outputs)))
                case index, step:
                    if job.outputs[index].finish_reason is None:
                        changed.add(index)
                        if not job.take(index, step):
                            self._begun[index].cancel()
            if job.finished or self._news.empty():
                break
            news = self._news.get_nowait()
        told = job.to_yield(changed)
        return job.result(told) if told else None

    def end(self) -> None:
        """Abort what still runs."""
        for each in self._begun:
            each.cancel()


class LLMEngine:
    """A model whose steps the caller runs. `LLM.generate` does the same for prompts that are all known.

    Args:
        engine_args: the options, as of `LLM`.

    Raises:
        ConfigError, CheckpointError, EngineDead: see `LLM`.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        found = opened(**vars(engine_args))
        self._front, self._engine = found.front, make_offline_engine(found.options)
        self._closing = close_when_forgotten(self, self._engine.close)
        self._jobs: dict[str, Job] = {}
        self._places: dict[str, tuple[Job, int]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Make one from `EngineArgs`."""
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: AnyParams | None = None,
        *,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        """Add a request; `step` gives its outputs, as `params.output_kind` asks for them.

        Args:
            request_id: unique among the requests that run.
            prompt, params, lora_request, tokenization_kwargs, priority: see `AsyncLLM.generate`.

        Raises:
            RequestError, KVCacheExhausted: it cannot be served, or the request_id is in use.
        """
        check_request(request_id, self._jobs, lora_request)
        engine = self._running()
        job = self._front.streamed_job(
            request_id, prompt, params, engine.info, priority=priority, tokenization=tokenization_kwargs
        )
        try:
            for index, request in enumerate(job.requests):
                engine.add(request)
                self._places[request.request_id] = (job, index)
        except Exception:
            self._drop(job)
            raise
        self._jobs[request_id] = job

    def step(self) -> list[RequestOutput]:
        """Run one step, or on ranks in processes of their own wait for the next; returns the requests' news.

        Raises:
            RequestError, KVCacheExhausted: a request cannot be served.
            EngineDead: a rank died.
        """
        engine = self._running()
        changed: dict[str, set[int]] = {}
        for step in self._step(engine) if self._jobs else ():
            if step.request_id not in self._places:
                continue  # it was aborted
            job, index = self._places[step.request_id]
            changed.setdefault(job.request_id, set()).add(index)
            if not job.take(index, step):
                del self._places[step.request_id]
                engine.abort(step.request_id)
        results = []
        for request_id, indices in changed.items():
            job = self._jobs[request_id]
            if told := job.to_yield(indices):
                results.append(job.result(told))
            if job.finished:
                del self._jobs[request_id]
        return results

    def _step(self, engine: OfflineEngine) -> Sequence[Step]:
        try:
            return engine.step()
        except RequestFailed as failed:
            request_id = str(failed)
            if request_id in self._places:
                job, _ = self._places[request_id]
                del self._jobs[job.request_id]
                self._drop(job)
            raise failed.__cause__ or failed from None

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; they give nothing more. Others are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            if (job := self._jobs.pop(request_id, None)) is not None:
                self._drop(job)

    def _drop(self, job: Job) -> None:
        for request in job.requests:
            if self._places.pop(request.request_id, None) is not None:
                self._running().abort(request.request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether requests run."""
        return bool(self._jobs)

    def get_num_unfinished_requests(self) -> int:
        """How many requests run."""
        return len(self._jobs)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """See `LLM.get_tokenizer`."""
        return self._front.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """See `LLM.get_metrics`."""
        return read_metrics(self._engine.statistics()) if self._closing.alive else []

    def expert_balance(self) -> ExpertBalance | None:
        """See `LLM.expert_balance`."""
        return self._engine.balance() if self._closing.alive else None

    def close(self) -> None:
        """Free the model, and end the ranks' processes."""
        self._closing()

    def _running(self) -> OfflineEngine:
        if not self._closing.alive:
            raise UBatchError("this LLMEngine was closed.")
        return self._engine

    if not TYPE_CHECKING:  # for editors the names that are not offered are not there
        __getattr__ = not_offered
