"""`SamplingParams` as vLLM's scripts have it: its fields, its defaults, and it may be changed after it was made.

An engine's own are `model_runner.SamplingParams`: frozen, greedy by default, tokens in place of words. What a user
gives is checked when it is made and again when it is used, since it may have been changed; `engine_params` does both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import model_runner
from model_runner import RequestError, TokenIds
from serving.offline.not_offered import LOGITS, refusals, refused
from serving.structured import StructuredOutputsParams
from serving.text.words import check_bad_words, check_stop_strings
from ubatch.errors import shown

MAX_OUTPUTS = 16384
"""Most outputs of a prompt; vLLM's limit."""
NO_LIMIT = 2**62
"""`max_tokens` of the engine's parameters before a prompt is known; more than any context has."""
_ENGINES = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "ignore_eos", "min_tokens", "logprobs", "prompt_logprobs"),
)
"""Fields that go to the engine as they are."""
_SWITCHES = (
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_clone",
)


class RequestOutputKind(Enum):
    """Which outputs `AsyncLLM.generate` yields; `LLM.generate` returns the final ones."""

    CUMULATIVE = 0
    """all that was generated so far"""
    DELTA = 1
    """what is new"""
    FINAL_ONLY = 2
    """one, at the end"""


_TOP_ONLY = "log-probabilities are of the most likely tokens"


@dataclass(slots=True)
class SamplingParams:
    """How to generate from a prompt. Names, meanings and defaults are vLLM's; so it samples, unless `temperature` is 0.

    A change of a field counts from the next use on. A field that is not offered is refused by name, unless its value
    asks for nothing: see the end of the list.

    Attributes:
        n: outputs per prompt; output i has the seed + i. One, if greedy.
        presence_penalty: subtracted from the logit of every token that is in the output already, -2 to 2.
        frequency_penalty: subtracted once per occurrence of the token in the output, -2 to 2.
        repetition_penalty: divides positive logits of tokens in prompt or output, and multiplies negative ones.
        temperature: below 1e-5 greedy; 1 samples from the model's distribution.
        top_p: sample from the smallest set of most likely tokens that together have this probability; 1 from all.
        top_k: sample from the k most likely tokens only; 0 or -1 from all.
        min_p: leave out tokens less likely than this share of the most likely one, 0 to 1.
        seed: makes sampling repeatable; None or -1 takes the next seed of the `LLM`.
        stop: strings that end a text, once it has `min_tokens`; at most 64, of at most 1000 characters each.
        stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens; 128 at most.
        ignore_eos: go on after the model's end-of-sequence tokens.
        max_tokens: most tokens to generate; None for what the context has left. It ends there in any case.
        min_tokens: before this number of tokens, stop tokens and end-of-sequence tokens are forbidden.
        logprobs: report log-probabilities of the sampled token and of this number of most likely ones, 0 to 20.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: outputs have a text; without it, tokens alone.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: no effect, as with all fast tokenizers: the tokenizer alone decides about spaces.
        include_stop_str_in_output: the stop string, or the text of the stop token, is part of the text.
        output_kind: which outputs `AsyncLLM.generate` yields.
        stream_interval: new tokens of an output that `AsyncLLM.generate` gathers before it yields; first and last come
            at once.
        skip_clone: `clone` makes a shallow copy.
        structured_outputs: the form of the output.
        logit_bias: token -> number added to its logit, -100 to 100; 1024 at most.
        allowed_token_ids: only these tokens are allowed, at least one; None allows all.
        bad_words: words that are never generated; at most 128, of at most 200 characters each.
        truncate_prompt_tokens: the last tokens of a longer prompt that are kept; -1 for what fits the context.

    Raises:
        RequestError: at construction and at use: a value has a wrong type or is out of range, values contradict each
            other, or a field is not offered.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[int] | None = refused(None, f"{_TOP_ONLY}; use prompt_logprobs")
    prompt_logprob_start: int | None = refused(
        None, "all tokens of the prompt are scored; cut the lists that come back"
    )
    logprob_token_ids: list[int] | None = refused(None, f"{_TOP_ONLY}, not of chosen ones; use logprobs")
    flat_logprobs: bool = refused(False, "log-probabilities are lists of dicts")
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: dict[str, Any] | None = refused(None, "there are no extensions that could read them", {})
    bad_words: str | list[str] | None = None
    skip_reading_prefix_cache: bool | None = refused(
        False, "all requests read the prefix cache; turn it off with LLM(enable_prefix_caching=False)"
    )
    thinking_token_budget: int | None = refused(None, "thinking has no limit of its own; use max_tokens", -1)
    repetition_detection: Any = refused(None, "repetitions do not end an output; use frequency_penalty, or max_tokens")
    routed_experts_prompt_start: int = refused(0, "outputs do not tell which experts tokens went to")
    trace_decode_token_ids: list[int] | None = refused(
        None, "tokens are sampled; to score a text, give it as a prompt with prompt_logprobs"
    )
    truncate_prompt_tokens: int | None = None
    # Of earlier releases of vLLM.
    logits_processors: list[Any] | None = refused(None, LOGITS, [], ())
    guided_decoding: Any = refused(
        None, "it is called structured_outputs: structured_outputs=StructuredOutputsParams(...)"
    )
    best_of: int | None = refused(None, "all outputs are returned; ask for n, and choose by cumulative_logprob", 1)
    use_beam_search: bool = refused(False, "there is no beam search; sample several outputs with n")

    def __post_init__(self) -> None:
        self.engine_params()

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """As the constructor, but None stands for the default, and `logit_bias` has text for keys, too, and is cut to
        its range."""
        bias = given.pop("logit_bias", None)
        if bias is not None:
            given["logit_bias"] = {
                _token(key): max(-100.0, min(100.0, _number("logit_bias", value))) for key, value in bias.items()
            }
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one; a shallow one with `skip_clone`."""
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    def engine_params(self) -> model_runner.SamplingParams:
        """Check the values, and bring them into the form that vLLM gives them: lists of strings, numbers of Python.

        Returns:
            The engine's parameters, without `bad_words` and `structured_outputs`, which need a tokenizer. `max_tokens`
            is `NO_LIMIT` for None.

        Raises:
            RequestError: a value cannot be used.
        """
        for name, rule in refusals(type(self)).items():
            if rule.matters(getattr(self, name)):
                raise RequestError(f"{name} is not supported: {rule.why}.", param=name)
        for name in _SWITCHES:
            if not isinstance(given := getattr(self, name), bool):
                raise _wrong(name, "True or False", given)
        self._check_form()
        self._check_words()
        self.n = _integer("n", self.n, 1, MAX_OUTPUTS)
        self.seed = None if self.seed == -1 and type(self.seed) is int else self.seed
        counts = self.logprobs, self.prompt_logprobs
        self.logprobs, self.prompt_logprobs = (1 if each is True else each for each in counts)  # as in vLLM
        self.skip_reading_prefix_cache = bool(self.skip_reading_prefix_cache)
        if self.stream_interval is not None:
            self.stream_interval = _integer("stream_interval", self.stream_interval, 1)
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            self.truncate_prompt_tokens = _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1)
        engines = self._make_engine_params()
        self._take_over(engines)
        return engines

    def _make_engine_params(self) -> model_runner.SamplingParams:
        self.stop_token_ids = _list("stop_token_ids", self.stop_token_ids, "token ids")
        if self.allowed_token_ids is not None and not isinstance(self.allowed_token_ids, list | TokenIds):
            self.allowed_token_ids = _list("allowed_token_ids", self.allowed_token_ids, "token ids")
        return model_runner.SamplingParams(
            **{name: getattr(self, name) for name in _ENGINES},
            allowed_token_ids=self.allowed_token_ids,
            max_tokens=NO_LIMIT if self.max_tokens is None else self.max_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            logit_bias=tuple((self.logit_bias or {}).items()),
        )

    def _take_over(self, engines: model_runner.SamplingParams) -> None:
        """Take Python's numbers, where numpy's or tensors were given, and what follows from them."""
        for name in _ENGINES:
            setattr(self, name, getattr(engines, name))
        if self.max_tokens is not None:
            self.max_tokens = engines.max_tokens
        if engines.greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                message = f"n must be 1 with temperature 0, not {self.n}: all outputs would be the same."
                raise RequestError(message, param="n")

    def _check_form(self) -> None:
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _wrong("output_kind", "a RequestOutputKind", self.output_kind)
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputsParams):
            raise _wrong("structured_outputs", "StructuredOutputsParams", form)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise _wrong("logit_bias", "a mapping from tokens to numbers", self.logit_bias)

    def _check_words(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else _list("stop", self.stop, "strings")
        check_stop_strings(self.stop)
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings are looked for in the text, which detokenize=False leaves out.", param="stop"
            )
        words = [self.bad_words] if isinstance(self.bad_words, str) else _list("bad_words", self.bad_words, "strings")
        check_bad_words(words)
        self.bad_words = words

    @property
    def stop_strings(self) -> Sequence[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def words(self) -> Sequence[str]:
        """`bad_words` as a list."""
        return [self.bad_words] if isinstance(self.bad_words, str) else self.bad_words or []

    def __repr__(self) -> str:
        shown_fields = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) not in (each.default, [])
        ]
        return f"SamplingParams({', '.join(shown_fields)})"


def _integer(name: str, given: Any, least: int, most: int | None = None) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least or (most is not None and given > most):
        raise _wrong(name, f"an integer of at least {least}" + (f" and at most {most}" if most else ""), given)
    return given


def _number(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise _wrong(name, "a number", given)
    return given


def _token(key: Any) -> int:
    try:
        return int(key)
    except (TypeError, ValueError):
        raise _wrong("a key of logit_bias", "a token id", key, param="logit_bias") from None


def _list(name: str, given: Any, what: str) -> list[Any]:
    """Several values as a list; None is none."""
    if given is None:
        return []
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        what = "a string or a list of strings" if what == "strings" else f"a list of {what}"
        raise _wrong(name, what, given)
    return list(given)


def _wrong(name: str, wanted: str, given: Any, param: str | None = None) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {shown(given)} ({type(given).__name__}).", param=param or name)
