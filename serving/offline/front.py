"""From what a caller gives, prompts and parameters, to what an engine is asked: shared by `LLM` and `AsyncLLM`.

read      the prompt's form: text or tokens           `prompts`
plan      the parameters, checked; once per object    words and forms become tokens and a grammar
job       the prompt's tokens, and a request per output, each with its seed and what the context leaves it
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import model_runner
from model_runner import RequestError
from serving.engine.client import EngineInfo
from serving.generation_config import request_defaults
from serving.offline.engine_args import EngineArgs
from serving.offline.outputs import Job, RunningOutput
from serving.offline.prompts import Prompt, ReadPrompt, read_prompt
from serving.offline.sampling_params import NO_LIMIT, SamplingParams
from serving.requests import RequestInput
from serving.structured import GrammarChecks, StructuredOutputsParams
from serving.text.detokenizer import TextStream
from serving.text.tokenizer import Vocabulary
from serving.text.words import bad_token_sequences
from ubatch import ConfigError
from ubatch.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyParams: TypeAlias = SamplingParams | model_runner.SamplingParams
_TOKENIZATION = ("add_special_tokens", "truncate_prompt_tokens")


@dataclass(frozen=True)
class FrontOptions:
    """Options that no engine sees. See `EngineArgs`.

    Attributes:
        profile_folder: where `stop_profile` writes if its caller does not say; None for a new folder.
    """

    skip_tokenizer_init: bool = False
    seed: int | None = 0
    max_logprobs: int = EngineArgs.max_logprobs
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    profile_folder: Path | None = None


@dataclass(frozen=True)
class Former:
    """The engine's parameters, with arguments that `LLM.generate` had before: fields of `text`."""

    params: model_runner.SamplingParams
    text: SamplingParams


@dataclass(frozen=True)
class Plan:
    """Parameters that were checked, for any number of prompts.

    Attributes:
        given: the user's; None if the engine's own were given.
        engines: the engine's, before a prompt is known.
    """

    given: SamplingParams | None
    engines: model_runner.SamplingParams


class Front:
    """Makes jobs for one model. A tokenizer is not thread-safe, so neither is this.

    Args:
        model: the checkpoint's folder.
        tokenizer: None without one.
        priorities: the engines run requests by their priority.
    """

    def __init__(self, model: Path, tokenizer: Any, options: FrontOptions, *, priorities: bool) -> None:
        self.tokenizer = tokenizer
        names = ("generation_config", "override_generation_config")
        given = str(options.generation_config), options.override_generation_config
        self.defaults = request_defaults(model, *given, names=names)
        self._vocabulary = None if tokenizer is None else Vocabulary.of(tokenizer)
        self._grammars = None if tokenizer is None else GrammarChecks(lambda: tokenizer)
        self._max_logprobs = options.max_logprobs
        self._priorities = priorities
        self._streamed = itertools.count()
        self._fresh_seed = None if options.seed is None else partial(random.Random(options.seed).getrandbits, 63)

    def default_params(self) -> SamplingParams:
        """The checkpoint's sampling parameters, and `SamplingParams`' for the rest."""
        return SamplingParams(**self.defaults)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer.

        Raises:
            ConfigError: `skip_tokenizer_init` left it out.
        """
        if self.tokenizer is None:
            raise ConfigError("there is no tokenizer: skip_tokenizer_init left it out.")
        tokenizer: PreTrainedTokenizerBase = self.tokenizer
        return tokenizer

    # -- parameters ---------------------------------------------------------------------------------------------

    def plans(self, params: Any, count: int, info: EngineInfo) -> list[Plan]:
        """A plan for each of `count` prompts, from parameters for all, or one each; None is `default_params`.

        Raises:
            RequestError: they cannot be used, or are not as many.
        """
        if params is None:
            params = self.default_params()
        if isinstance(params, AnyParams | Former):
            return [self._plan(params, info)] * count
        try:
            several = list(params)
        except TypeError:
            several = [params]
        for kind in {type(each) for each in several if not isinstance(each, AnyParams | Former)}:
            raise RequestError(f"sampling_params must be SamplingParams, or one each, not a {kind.__name__}.")
        if len(several) != count:
            message = f"{len(several)} sampling parameters for {count} prompts; give one for all or one each."
            raise RequestError(message)
        known = {id(each): self._plan(each, info) for each in {id(each): each for each in several}.values()}
        return [known[id(each)] for each in several]

    def _plan(self, params: AnyParams | Former, info: EngineInfo) -> Plan:
        if isinstance(params, model_runner.SamplingParams):
            self._check_logprobs(params)
            return Plan(None, params)
        given = params.text if isinstance(params, Former) else replace(params)  # what changes later does not count
        engines = params.params if isinstance(params, Former) else given.engine_params()
        self._check_logprobs(engines)
        if given.stop and self.tokenizer is None:
            raise ConfigError("stop strings need the tokenizer, which skip_tokenizer_init left out.")
        engines = self._without_bad_words(engines, given, info)
        form = given.structured_outputs
        return Plan(given, engines if form is None else replace(engines, grammar=self.grammar(form)))

    def grammar(self, form: StructuredOutputsParams) -> str:
        """The grammar of a form of outputs, once it was tried. What was tried is remembered; any thread may call it.

        Raises:
            RequestError: it is not valid, or cannot be enforced within the limits.
        """
        if self._grammars is None:
            raise ConfigError("structured outputs need the tokenizer, which skip_tokenizer_init left out.")
        try:
            return self._grammars.grammar_now(form)
        except RequestError as error:
            where = f"structured_outputs.{error.param}"
            raise RequestError(f"{where}: {error}", param=where) from error

    def _check_logprobs(self, params: model_runner.SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self._max_logprobs:
                message = f"{name} is {count}, and max_logprobs of the LLM is {self._max_logprobs}. Ask for fewer."
                raise RequestError(message, param=name)

    def _without_bad_words(
        self, engines: model_runner.SamplingParams, given: SamplingParams, info: EngineInfo
    ) -> model_runner.SamplingParams:
        if not given.words:
            return engines
        if self.tokenizer is None:
            raise ConfigError("bad words need the tokenizer, which skip_tokenizer_init left out.")
        bad = bad_token_sequences(self.tokenizer, given.words, info.vocab_size)
        try:
            return replace(engines, bad_token_sequences=engines.bad_token_sequences + bad)
        except RequestError as error:
            raise RequestError(f"with the tokens of bad_words: {error}", param=error.param) from error

    # -- prompts ------------------------------------------------------------------------------------------------

    def tokens(self, prompt: ReadPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """A prompt's tokens."""
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if self.tokenizer is None:
            raise ConfigError("give prompts as tokens: skip_tokenizer_init left the tokenizer out.")
        tokens: list[int] = self.tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)
        return tokens

    def job(
        self,
        request_id: str,
        prompt: ReadPrompt,
        plan: Plan,
        info: EngineInfo,
        *,
        priority: int = 0,
        group: str = "",
        streams: bool = False,
        engine_id: str | None = None,
        tokenization: Mapping[str, Any] | None = None,
    ) -> Job:
        """The job of a prompt.

        Args:
            group: see `RequestInput`.
            engine_id: the engine's name for the request; by default the same.
            streams: its outputs are looked at while they are generated.
            tokenization: `add_special_tokens` and `truncate_prompt_tokens`, as vLLM's `tokenization_kwargs`.

        Raises:
            RequestError: it cannot be served.
        """
        if priority and not self._priorities:
            message = f"priority {priority} needs LLM(scheduling_policy='priority'); without it requests run in turn."
            raise RequestError(message, param="priority")
        special, most = _tokenization(tokenization or {})
        given = plan.given
        token_ids = self.tokens(prompt, add_special_tokens=special)
        if given is not None and most is None:
            most = given.truncate_prompt_tokens
        if most is not None:
            token_ids = _truncated(token_ids, most, plan.engines, info.max_model_len)
        count = 1 if given is None else given.n
        outputs = []
        for index, params in enumerate(self._params(plan, count, info.max_model_len - len(token_ids))):
            name = engine_id or request_id
            name = f"{name}-{index}" if count > 1 else name
            request = RequestInput(name, token_ids, params, priority, group)
            stopping = given is not None and bool(given.stop)
            text = self._text(token_ids, given, params)
            outputs.append(RunningOutput(index, request, text, not (stopping or streams), self._silent_stop(params)))
        job = Job(request_id, prompt.text, token_ids, outputs, self._vocabulary)
        if streams and given is not None:
            job.kind, job.interval = given.output_kind, given.stream_interval or 1
        return job

    def streamed_job(
        self,
        request_id: str,
        prompt: Prompt,
        params: AnyParams | None,
        info: EngineInfo,
        *,
        priority: int,
        tokenization: Mapping[str, Any] | None,
    ) -> Job:
        """The job of one prompt, whose outputs are looked at while they are generated.

        Raises:
            RequestError: it cannot be served.
        """
        (plan,) = self.plans(params, 1, info)
        return self.job(
            request_id,
            read_prompt(prompt),
            plan,
            info,
            priority=priority,
            streams=True,
            engine_id=f"{request_id}#{next(self._streamed)}",  # one that was aborted may still end
            tokenization=tokenization,
        )

    def _params(self, plan: Plan, count: int, room: int) -> list[model_runner.SamplingParams]:
        """The engine's parameters of each output. The prompt is scored once."""
        base = plan.engines
        changes: dict[str, Any] = {}
        if plan.given is not None and base.max_tokens > room > 0:
            changes = {"max_tokens": room, "min_tokens": min(base.min_tokens, room)}
        if base.max_tokens == NO_LIMIT and not changes:  # the prompt alone is too long, which the engine says
            changes = {"max_tokens": max(1, base.min_tokens)}
        several = []
        for index in range(count):
            own = dict(changes)
            if base.seed is None and not base.greedy and self._fresh_seed is not None:
                own["seed"] = self._fresh_seed()
            elif base.seed is not None and not base.greedy and index:
                own["seed"] = base.seed + index
            if index and base.prompt_logprobs is not None:
                own["prompt_logprobs"] = None
            several.append(replace(base, **own) if own else base)
        return several

    def _text(
        self, token_ids: Sequence[int], given: SamplingParams | None, params: model_runner.SamplingParams
    ) -> TextStream | None:
        if self.tokenizer is None or (given is not None and not given.detokenize):
            return None
        if given is None:
            return TextStream(self.tokenizer, prompt=token_ids)
        return TextStream(
            self.tokenizer,
            prompt=token_ids,
            stop=given.stop_strings,
            include_stop_str_in_output=given.include_stop_str_in_output,
            skip_special_tokens=given.skip_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _silent_stop(self, params: model_runner.SamplingParams) -> int | None:
        """The token that ends an output without being its `stop_reason`, as in vLLM."""
        return None if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_id


def check_request(request_id: Any, running: Container[str], lora_request: object) -> None:
    """Check a request's own name, and that it asks for no adapter.

    Args:
        running: the names of the requests that run.

    Raises:
        RequestError: it is no name, or is in use.
    """
    refuse_adapters(lora_request)
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a text, not {shown(request_id)}.", param="request_id")
    if request_id in running:
        raise RequestError(f"request {shown(request_id)} runs already; give each its own id.", param="request_id")


def refuse_adapters(lora_request: object) -> None:
    """Refuse a `lora_request`, or several."""
    if lora_request is not None and lora_request != []:
        raise RequestError("lora_request is not supported: there are no LoRA adapters.", param="lora_request")


def _tokenization(given: Mapping[str, Any]) -> tuple[bool, int | None]:
    """`add_special_tokens` and `truncate_prompt_tokens` of vLLM's `tokenization_kwargs`."""
    for name in given.keys() - set(_TOKENIZATION):
        message = f"tokenization_kwargs may have {' and '.join(_TOKENIZATION)}, not {shown(name)}."
        raise RequestError(message, param="tokenization_kwargs")
    special = given.get("add_special_tokens", True)
    if not isinstance(special, bool):
        message = f"add_special_tokens must be True or False, not {shown(special)}."
        raise RequestError(message, param="tokenization_kwargs")
    return special, SamplingParams(truncate_prompt_tokens=given.get("truncate_prompt_tokens")).truncate_prompt_tokens


def _truncated(token_ids: list[int], most: int, engines: model_runner.SamplingParams, context: int) -> list[int]:
    """The last `most` tokens of a prompt; -1 leaves room for the output in the context."""
    if most == -1:
        most = max(1, context - (1 if engines.max_tokens == NO_LIMIT else engines.max_tokens))
    return token_ids[-most:]
