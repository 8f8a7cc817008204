"""How to generate for one request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from model_runner.errors import RequestError

__all__ = ["SamplingParams"]

_MAX_LOGPROBS = 20
_MAX_BIAS = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """How to generate for one request. Names and meanings are vLLM's; the default is greedy.

    Penalties, bias and `min_tokens` change the logits; then come temperature, top-k, top-p and min-p, in this order.

    Attributes:
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_k: sample from the k most likely tokens only; 0 or -1 from all.
        top_p: sample from the smallest set of most likely tokens that together have this probability; 1 from all.
        seed: makes sampling repeatable; None is a fresh seed per request.
        max_tokens: tokens to generate at most.
        stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens.
        ignore_eos: go on after the model's end-of-sequence tokens.
        min_p: leave out tokens less likely than this share of the most likely one, 0 to 1.
        presence_penalty: taken off the logit of every token that is in the output already, -2 to 2.
        frequency_penalty: the same for every time it is there, -2 to 2.
        repetition_penalty: logits of tokens that are in prompt or output are divided by it, negative ones multiplied.
        logit_bias: (token, number added to its logit, -100 to 100).
        min_tokens: no token that would end the output comes before so many others.
        logprobs: report the chosen tokens' log-probabilities, and those of so many most likely ones, 0 to 20.
        prompt_logprobs: the same for the prompt's tokens.

    Raises:
        RequestError: at construction, for any value that cannot work.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be 0 (greedy) or positive, not {self.temperature}.")
        if self.top_k < -1:
            raise RequestError(f"top_k must be at least 1, or 0 or -1 for all tokens, not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be from 0 to 1, not {self.min_p}.")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}.")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), not {self.min_tokens}.")
        self._check_penalties()
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not 0 <= value <= _MAX_LOGPROBS:
                raise RequestError(f"{name} must be from 0 to {_MAX_LOGPROBS}, not {value}.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", tuple((token, bias) for token, bias in self.logit_bias))

    def _check_penalties(self) -> None:
        penalties = (("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty))
        for name, value in penalties:
            if not -2 <= value <= 2:
                raise RequestError(f"{name} must be from -2 to 2, not {value}.")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(f"repetition_penalty must be positive (1 is none), not {self.repetition_penalty}.")
        for token, bias in self.logit_bias:
            if token < 0:
                raise RequestError(f"logit_bias has token {token}; a token is 0 or more.")
            if not -_MAX_BIAS <= bias <= _MAX_BIAS:
                raise RequestError(f"logit_bias of token {token} must be from -100 to 100, not {bias}.")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a bias for tokens, or stop tokens, that the model does not have.

        Raises:
            RequestError: there is one.
        """
        biased = (token for token, _ in self.logit_bias)
        for name, tokens in (("logit_bias", biased), ("stop_token_ids", self.stop_token_ids)):
            wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise RequestError(f"{name} has token {wrong}; the vocabulary is 0 to {vocab_size - 1}.")

    def ending_tokens(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The tokens that end the output, given the model's end-of-sequence tokens."""
        return self.stop_token_ids if self.ignore_eos else (*self.stop_token_ids, *eos_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether top-k or top-p leaves out any token."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def penalised(self) -> bool:
        """Whether the tokens before change the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the tokens before, beyond the logits; the overlap loop delays it then."""
        return self.penalised or self.min_tokens > 0

    @cached_property
    def adjusts(self) -> bool:
        """Whether anything changes the logits before temperature."""
        return self.needs_history or bool(self.logit_bias)

    @cached_property
    def plain(self) -> bool:
        """Whether the argmax of the logits is all that is asked for: the fast path."""
        return self.greedy and not self.adjusts and self.logprobs is None and self.prompt_logprobs is None
