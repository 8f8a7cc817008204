"""Code shared by completions and chat completions: the answer, whole or streamed, is built from the same deltas."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from model_runner import SamplingParams
from serving.api.generation import Delta, Output, run_outputs
from serving.api.logprobs import JsonLists, TokenNames, prompt_logprobs
from serving.api.request_log import log_outputs
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import GenerationRequest
from serving.api.service import Service
from serving.api.sse import DONE, event
from serving.requests import DraftCounts
from serving.text.tokenizer import Vocabulary

MAX_LOGPROBS = 1_000_000
"""Most log-probabilities of one answer. Each needs some 100 bytes until the answer is sent, and twice that while it is
encoded."""
NEVER_FILLED = ("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics")
"""Fields of vLLM's whole answers that are always null here."""
NOT_ENDED = dict.fromkeys(("finish_reason", "stop_reason", "matched_stop"))
"""Why an output ended, before it has."""
SCORED_AT_ONCE = 256  # prompt tokens whose log-probabilities are encoded as JSON in one go


def check_common(body: GenerationRequest) -> None:
    """Refuse fields that contradict each other."""
    if body.stream_options is not None and not body.stream:
        message = "stream_options is only for streams; set stream to true or leave it out."
        raise ApiError(400, message, param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs are not sent in streams; leave stream out.", param="prompt_logprobs")
    if body.best_of not in (None, 1, body.n or 1):
        message = f"best_of must be 1 or n ({body.n or 1}), not {body.best_of}: all outputs are returned."
        raise ApiError(400, message, param="best_of")


def check_outputs(service: Service, num_prompts: int, n: int | None) -> None:
    """Refuse a body that asks for more outputs than one request may have."""
    limit, outputs = service.max_outputs_per_request, num_prompts * (n or 1)
    if limit is not None and outputs > limit:
        message = (
            f"The request asks for {outputs} outputs ({num_prompts} prompts, n={n or 1}); at most {limit} are made."
        )
        raise ApiError(400, message, param="prompt" if num_prompts > limit else "n")


def check_logprobs(of_prompts: int, params: Iterable[SamplingParams], body: GenerationRequest, *, kept: bool) -> None:
    """Refuse a body that asks for more log-probabilities than one answer may have.

    Args:
        of_prompts: log-probabilities of prompt tokens in the answer.
        params: of every output.
        kept: those of outputs are kept for the answer's end; otherwise a stream sends them one by one.
    """
    of_outputs = 0
    if kept:
        of_outputs = sum(each.max_tokens * (each.logprobs + 1) for each in params if each.logprobs is not None)
    if of_prompts + of_outputs > MAX_LOGPROBS:
        scored = of_prompts > of_outputs
        instead = "top tokens (prompt_logprobs, logprobs)" if scored else "top tokens, set max_tokens lower"
        message = (
            f"The answer would have up to {of_prompts + of_outputs} log-probabilities ({of_prompts} of prompts, "
            f"{of_outputs} of outputs); at most {MAX_LOGPROBS} are returned. Ask for fewer {instead}, or send less in "
            f"one request."
        )
        raise ApiError(400, message, param="prompt_logprobs" if body.prompt_logprobs and scored else "logprobs")


@dataclass
class Gathered:
    """What one output has produced so far, collected for an answer that is not streamed.

    Attributes:
        finish_reason, matched_stop: those of the last delta, once the output has ended.
    """

    logprobs: JsonLists
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: str | int | None = None


class Answer(ABC):
    """An answer while it is generated. A prompt's log-probabilities come with its first output, and serve all."""

    kind: str
    chunk_kind: str
    lists: tuple[str, ...]  # names of the lists in a choice's `logprobs`
    done: bytes = DONE  # ends a stream
    num_opening = 0  # how many of an output's events come before any of its tokens

    def __init__(self, service: Service, body: GenerationRequest, answer_id: str, outputs: Sequence[Output]) -> None:
        if service.log_requests:
            log_outputs(answer_id, outputs, service.max_log_len)
        options = body.stream_options
        self._service = service
        self._body: GenerationRequest = body
        as_ids = body.return_tokens_as_token_ids
        self._names = TokenNames(Vocabulary.of(service.tokenizer), service.tokens_as_ids if as_ids is None else as_ids)
        self._begun: set[int] = set()  # outputs whose first event was sent
        self._outputs = outputs
        self._scores_prompts = any(output.request.params.prompt_logprobs is not None for output in outputs)
        self._scored: dict[int, JsonLists] = {}  # prompt -> its log-probabilities
        self._include_usage = service.force_usage or (options is not None and options.include_usage)
        self._continuous_usage = options is not None and options.include_usage and options.continuous_usage_stats
        self._about: dict[str, Any] = {
            "id": answer_id,
            "created": int(time.time()),
            "model": service.model_name(body.model),
        }
        self._eos_token_id = service.tokenizer.eos_token_id

    @abstractmethod
    def _chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The stream's choices for a delta, each sent in its own event; empty if the delta has nothing to send."""

    @abstractmethod
    def _whole(self, gathered: Sequence[Gathered]) -> dict[str, Any]:
        """The whole answer as a JSON object, from the collected outputs."""

    @abstractmethod
    def _logprobs_of(self, delta: Delta) -> Mapping[str, Sequence[Any]]:
        """List name -> entries for a delta's tokens. Called once per delta, in order."""

    def _num_reasoning_tokens(self, output: Output) -> int:
        """Tokens of an output's reasoning so far."""
        return 0

    def _with_choices(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The whole answer, with what both kinds have."""
        about = {**self._about, "object": self.kind}
        return {**about, "choices": choices, "usage": self._usage(), **dict.fromkeys(NEVER_FILLED)}

    def _first_chunk(self) -> dict[str, Any]:
        """Fields that only the first event of a stream has."""
        return {}

    async def collect(self) -> bytes:
        """The whole answer, as JSON."""
        gathered = [Gathered(JsonLists(self.lists)) for _ in self._outputs]
        async with aclosing(self._deltas()) as arriving:
            async for delta in arriving:
                known = gathered[delta.output.index]
                known.text.append(delta.text)
                known.finish_reason, known.matched_stop = delta.finish_reason, delta.matched_stop
                if self._body.return_token_ids:
                    known.token_ids += delta.token_ids
                if delta.logprobs:
                    known.logprobs.add(self._logprobs_of(delta))
        # Encoding may take long. It is no `long_work`: that is dropped on shutdown, and this answer must still be sent.
        return await asyncio.to_thread(lambda: msgspec.json.encode(self._whole(gathered)))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer's events, without `done`."""
        about, first = {**self._about, "object": self.chunk_kind}, self._first_chunk()
        async with aclosing(self._deltas()) as arriving:
            async for delta in arriving:
                num_opening = 0 if delta.output.index in self._begun else self.num_opening
                for place, choice in enumerate(self._chunk_choices(delta)):
                    chunk, first = {**about, "choices": [choice], **first}, {}
                    if self._include_usage:
                        chunk["usage"] = self._so_far(delta.output, place < num_opening)
                    yield event(chunk)
        if self._include_usage:
            yield event({**about, "choices": [], "usage": self._usage()})

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas of all outputs. A prompt's are held back until its log-probabilities have come, if it is scored."""
        held: dict[int, list[Delta]] = defaultdict(list)
        async with aclosing(run_outputs(self._service, self._outputs)) as arriving:
            async for delta in arriving:
                prompt = delta.output.prompt
                if self._scores_prompts and prompt not in self._scored:
                    if delta.prompt_logprobs is None:  # they come with the prompt's first output
                        held[prompt].append(delta)
                        continue
                    self._scored[prompt] = await asyncio.to_thread(self._score, delta)
                yield delta
                for other in held.pop(prompt, ()):
                    yield other

    def _score(self, delta: Delta) -> JsonLists:
        """The answer's log-probabilities of a prompt, from the first delta of its first output."""
        lists, entries = JsonLists(["prompt_logprobs"]), delta.prompt_logprobs or ()
        if (num_top := self._body.prompt_logprobs) is not None:
            for first in range(0, len(entries), SCORED_AT_ONCE):
                some = entries[first : first + SCORED_AT_ONCE]
                lists.add({"prompt_logprobs": prompt_logprobs(self._names.vocabulary, some, num_top)})
        return lists

    def _begins(self, index: int) -> bool:
        """Whether this is the output's first event; also marks the output as begun."""
        begins = index not in self._begun
        self._begun.add(index)
        return begins

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The choice's token ids, null unless requested."""
        return {"token_ids": list(token_ids) if self._body.return_token_ids else None}

    def _end(self, part: Delta | Gathered) -> dict[str, Any]:
        """Why the output ended; all null before.

        `matched_stop`, as in SGLang, is the stop string or stop token that ended it. `stop_reason`, as in vLLM, is the
        same, but null for the tokenizer's own end of sequence.
        """
        matched = part.matched_stop
        usual = matched == self._eos_token_id and not self._body.ignore_eos
        stop_reason = None if usual else matched
        return {"finish_reason": part.finish_reason, "stop_reason": stop_reason, "matched_stop": matched}

    def _prompt_token_ids(self, output: Output) -> dict[str, Any]:
        """The prompt's token ids, null unless requested."""
        return {"prompt_token_ids": list(output.request.token_ids) if self._body.return_token_ids else None}

    def _prompt_logprobs(self, output: Output) -> Mapping[str, Any]:
        """The prompt's log-probabilities, null unless requested."""
        return {"prompt_logprobs": None} if self._body.prompt_logprobs is None else self._scored[output.prompt].raw()

    def _so_far(self, output: Output, opening: bool) -> dict[str, Any] | None:
        """The usage in an output's event: as in vLLM and SGLang of this output alone, null unless requested."""
        return self._usage([output], opening=opening) if self._continuous_usage else None

    def _usage(self, outputs: Sequence[Output] | None = None, *, opening: bool = False) -> dict[str, Any]:
        """Token counts so far. A prompt counts once; its cached tokens are those of its first output.

        Args:
            outputs: the outputs that count; None for all.
            opening: before any of their tokens.
        """
        outputs = self._outputs if outputs is None else outputs
        firsts = {output.prompt: output for output in reversed(outputs)}.values()
        generated = () if opening else outputs
        prompt_tokens = sum(len(output.request.token_ids) for output in firsts)
        completion_tokens = sum(output.num_tokens for output in generated)
        drafts = sum((output.drafts for output in generated), DraftCounts())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": drafts.accepted,
                "rejected_prediction_tokens": drafts.drafted - drafts.accepted,
                "reasoning_tokens": sum(map(self._num_reasoning_tokens, generated)),
            },
        }
