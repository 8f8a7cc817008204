"""`LLMEngine`: requests are added while others run, and the caller runs the steps; vLLM's class of that name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from serving.balance import ExpertBalance
from serving.engine.offline import OfflineEngine, RequestFailed, make_offline_engine
from serving.offline.engine_args import EngineArgs
from serving.offline.front import AnyParams, check_request
from serving.offline.not_offered import not_offered
from serving.offline.opening import close_when_forgotten, opened_args
from serving.offline.outputs import Job, Metric, RequestOutput, read_metrics
from serving.offline.prompts import Prompt
from serving.requests import RequestOutput as Step
from ubatch import UBatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLMEngine:
    """A model whose steps the caller runs. `LLM.generate` does the same for prompts that are all known.

    Args:
        engine_args: the options, as of `LLM`.

    Raises:
        ConfigError, CheckpointError, EngineDead: see `LLM`.
    """

    def __init__(self, engine_args: EngineArgs) -> None:
        found = opened_args(engine_args)
        self._front, self._engine = found.front, make_offline_engine(found.options)
        self._closing = close_when_forgotten(self, self._engine)
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
