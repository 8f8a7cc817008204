"""Offline use: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

from tqdm import tqdm

from model_runner import FAULTS, FinishReason, RequestError, SamplingParams, TokenLogprobs
from serving.engine.offline import OfflineEngine, make_offline_engine
from serving.logs import log_event
from serving.options import Settings, chosen_dtype, fetch_checkpoints, notes, resolve_keywords, to_engine_options
from serving.options.flags.server_flags import Server
from serving.options.flags.turn_flags import Turns
from serving.requests import DraftCounts, EngineStatistics, RequestInput, RequestOutput
from serving.text.bad_words import bad_token_sequences
from serving.text.detokenizer import TextStream
from serving.text.tokenizer import load_tokenizer
from ubatch import ConfigError, UBatchError
from ubatch.errors import shown

_logger = logging.getLogger(__name__)

_OF_SERVER = frozenset((*Server.model_fields, *Turns.model_fields)) - {"log_level"}

Prompt: TypeAlias = str | Sequence[int]


@dataclass(frozen=True)
class CompletionResult:
    """The output generated for a prompt.

    Attributes:
        text: detokenised, without the stop string or stop token; empty without a tokenizer.
        token_ids: the generated tokens, the stop token included.
        finish_reason: `stop`, `length`, or a failure: `error` (the logits are not finite) or `no_token_left` (the
            sampling parameters forbid every token). The property `error` then describes it.
        stop_reason: the stop string or stop token that ended the text; None if neither did.
        logprobs: one per token if `SamplingParams.logprobs` asks for them; else empty.
        drafts: tokens guessed ahead, and how many of them were right.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def error(self) -> str | None:
        """Why generation failed; None if it did not."""
        return FAULTS.get(self.finish_reason)


@dataclass(frozen=True)
class LLMOutput:
    """A prompt and its output.

    Attributes:
        prompt: the prompt's text; None if it was given as tokens.
        prompt_token_ids: the prompt's tokens.
        outputs: always one output.
        prompt_logprobs: one per prompt token (None for the first) if `SamplingParams.prompt_logprobs` asks for
            them; else None.
        num_cached_tokens: prompt tokens whose keys and values were in the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionResult, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0


class LLM:
    """A model, ready to generate. Close it, or use it in a `with` statement.

    A single rank of one process runs in the caller's process. Several processes are spawned, and each imports the main
    module again: a script must then keep its code behind `if __name__ == "__main__":`.

    Several threads may call it: calls run one at a time, and the others wait.

    Args:
        model: folder of a Hugging Face checkpoint, or its name on the hub (then also `revision`, `download_dir`).
        data_parallel_size: number of ranks.
        tensor_parallel_size: processes per rank; they share its attention heads and dense layers.
        enable_expert_parallel: the ranks share the experts, and step together.
        enable_dbo: overlap microbatches; off by default.
        skip_tokenizer_init: load no tokenizer: prompts are tokens, and outputs have no text.
        options: any other setting of `ubatch serve`, except the HTTP server's, in snake case: `max_num_seqs`,
            `kv_cache_memory`, ...

    Raises:
        ConfigError: an unknown option, a wrong value, a contradiction, or no tokenizer.
        CheckpointError: the checkpoint cannot be loaded.
        EngineDead: a rank did not start.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        data_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        enable_dbo: bool | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> None:
        keywords = {
            "log_level": "warning",
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "enable_expert_parallel": enable_expert_parallel,
            **options,
        }
        if enable_dbo is not None:  # the caller may have set its alias, `enable_two_batch_overlap`
            keywords["enable_dbo"] = enable_dbo
        for name in sorted(set(options) & _OF_SERVER):
            raise ConfigError(f"{name} is for `ubatch serve`, and LLM has no server. Remove it.")
        settings = resolve_keywords(model, keywords)
        for note in notes(settings):
            log_event(_logger, note, level=logging.WARNING)
        for choice in chosen_dtype(settings):
            log_event(_logger, choice)
        self._open(settings, skip_tokenizer_init=skip_tokenizer_init)

    @classmethod
    def from_settings(cls, settings: Settings) -> LLM:
        """Make an `LLM` from a command's settings; the command has printed their notes already."""
        llm = cls.__new__(cls)
        llm._open(settings, skip_tokenizer_init=False)
        return llm

    def _open(self, settings: Settings, *, skip_tokenizer_init: bool) -> None:
        self.options = to_engine_options(settings)
        if self.options.node_rank > 0:
            raise ConfigError(
                "LLM runs on machine 0. On the others call `ubatch serve` or `ubatch generate` with the same settings."
            )
        self.tokenizer: Any = None if skip_tokenizer_init else load_tokenizer(self.options.model)
        fetch_checkpoints(settings)
        self._numbers = itertools.count()
        self._one_at_a_time = threading.RLock()  # re-entrant: a signal handler may call `close` during a call
        self._engine: OfflineEngine | None = make_offline_engine(self.options)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        bad_words: str | Sequence[str] | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        use_tqdm: bool = True,
    ) -> list[LLMOutput]:
        """Generate for every prompt.

        Args:
            prompts: a text or a list of tokens, or several of them.
            sampling_params: one for all prompts, or one per prompt; greedy with 16 tokens by default.
            stop: strings that end a text, once it has `min_tokens`; at most 64, of at most 1000 characters each.
            bad_words: words that are never generated, besides `bad_token_sequences`; at most 128, of at most 200
                characters each, and 4096 tokens in all.
            include_stop_str_in_output: the stop string, or the text of the stop token, is part of the text.
            skip_special_tokens: leave special tokens out of the text.
            use_tqdm: show progress if standard error is a terminal.

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError, KVCacheExhausted: a prompt cannot be served. The other prompts' outputs are lost.
            EngineDead: a rank died.
        """
        given = _prompts(prompts)
        each = _one_each(sampling_params if sampling_params is not None else SamplingParams(), len(given))
        stops, words = _strings("stop", stop), _strings("bad_words", bad_words)
        if stops and self.tokenizer is None:
            raise ConfigError("stop strings need the tokenizer, which skip_tokenizer_init left out.")
        with self._one_at_a_time:  # a tokenizer, too, is not thread-safe
            engine = self._running()
            each = self._without_bad_words(engine, each, words)
            jobs: dict[str, _Job] = {}
            for prompt, params in zip(given, each, strict=True):
                text, token_ids = None, self._encode(prompt)
                if self.tokenizer is not None:
                    text = TextStream(
                        self.tokenizer,
                        prompt=token_ids,
                        stop=stops,
                        include_stop_str_in_output=include_stop_str_in_output,
                        skip_special_tokens=skip_special_tokens,
                        min_tokens=params.min_tokens,
                    )
                request = RequestInput(f"llm-{next(self._numbers)}", token_ids, params, group="llm")
                jobs[request.request_id] = _Job(prompt, request, text, bool(stops))
            with tqdm(total=len(jobs), unit="prompt", disable=None if use_tqdm else True, leave=False) as bar:

                def on_output(output: RequestOutput) -> bool:
                    goes_on = jobs[output.request_id].take(output)
                    bar.update(not goes_on)
                    return goes_on

                engine.run([job.request for job in jobs.values()], on_output)
            return [job.result() for job in jobs.values()]

    @property
    def statistics(self) -> Mapping[int, EngineStatistics]:
        """Every rank's state and totals, as last reported; empty once closed."""
        return {} if self._engine is None else self._engine.statistics()

    @property
    def memory(self) -> str:
        """Memory of the KV caches and attention back ends, one line per process."""
        return "" if self._engine is None else self._engine.info.memory

    def start_profile(self) -> None:
        """Start recording every rank's steps.

        Raises:
            EngineDead: a rank died.
        """
        with self._one_at_a_time:
            self._running().start_profile()

    def stop_profile(self, folder: Path) -> list[Path]:
        """Stop recording; every process writes a Chrome trace, which `ubatch trace --files` shows.

        Args:
            folder: where to write. Processes on other machines write to a new temporary folder there.

        Returns:
            The files, in the order of the processes.

        Raises:
            UBatchError: no profile was started, or a file could not be written, or not in time.
            EngineDead: a rank died.
        """
        with self._one_at_a_time:
            return self._running().stop_profile(folder)

    def close(self) -> None:
        """Free the model, and end the ranks' processes."""
        with self._one_at_a_time:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> OfflineEngine:
        if self._engine is None:
            raise UBatchError("this LLM was closed.")
        return self._engine

    def _without_bad_words(
        self, engine: OfflineEngine, params: list[SamplingParams], words: Sequence[str]
    ) -> list[SamplingParams]:
        """Add the words' tokens to the bad token sequences of the sampling parameters."""
        if not words:
            return params
        if self.tokenizer is None:
            raise ConfigError("bad words need the tokenizer, which skip_tokenizer_init left out.")
        bad = bad_token_sequences(self.tokenizer, words, engine.info.vocab_size)
        try:
            changed = {id(own): replace(own, bad_token_sequences=own.bad_token_sequences + bad) for own in params}
        except RequestError as error:
            raise RequestError(f"with the tokens of bad_words: {error}", param=error.param) from error
        return [changed[id(own)] for own in params]

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            try:
                return [operator.index(token) for token in prompt]
            except TypeError as error:
                raise RequestError(f"a prompt is a text or a list of token ids, not {shown(prompt)}.") from error
        if self.tokenizer is None:
            raise ConfigError("give prompts as tokens: skip_tokenizer_init left the tokenizer out.")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is no text: it has half of a surrogate pair ({error}).") from error
        tokens: list[int] = self.tokenizer.encode(prompt)
        return tokens


@dataclass
class _Job:
    """A prompt, and its outputs so far."""

    prompt: Prompt
    request: RequestInput
    text: TextStream | None
    stops: bool
    outputs: list[RequestOutput] = field(default_factory=list)

    def take(self, output: RequestOutput) -> bool:
        """Add a step's output; False once the prompt needs no more tokens."""
        self.outputs.append(output)
        if self.stops and self.text is not None:
            self.text.take(output)
            return output.finish_reason is None and self.text.stopped is None
        return output.finish_reason is None

    def result(self) -> LLMOutput:
        """The finished output."""
        whole, text = RequestOutput.merged(self.outputs), self.text
        if text is not None and not self.stops:
            text.take(whole)  # all at once
        count, reason = len(whole.token_ids), whole.finish_reason or FinishReason.STOP
        stopped: str | int | None = whole.stop_token
        if text is not None and text.stopped is not None:
            stopped, count, reason = text.stopped, text.num_tokens, FinishReason.STOP
        completion = CompletionResult(
            text="" if text is None else text.text,
            token_ids=tuple(whole.token_ids[:count]),
            finish_reason=reason,
            stop_reason=stopped,
            logprobs=tuple(whole.logprobs[:count]),
            drafts=whole.drafts,
        )
        return LLMOutput(
            self.prompt if isinstance(self.prompt, str) else None,
            tuple(self.request.token_ids),
            (completion,),
            None if whole.prompt_logprobs is None else tuple(whole.prompt_logprobs),
            whole.num_cached_tokens,
        )


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _strings(name: str, given: object) -> tuple[Any, ...]:
    """One string, several or None, as a tuple of strings."""
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a string or a list of strings, not {shown(given)}.", param=name)
    return tuple(given)


def _one_each(params: SamplingParams | Iterable[SamplingParams], count: int) -> list[SamplingParams]:
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    for kind in set(map(type, each)) - {SamplingParams}:
        raise RequestError(f"sampling_params must be SamplingParams, or one each, not a {kind.__name__}.")
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling parameters for {count} prompts; give one for all or one each.")
    return each
