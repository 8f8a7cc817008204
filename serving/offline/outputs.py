"""What `LLM` and `AsyncLLM` return: vLLM's names and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from model_runner import FAULTS, FinishReason, TokenLogprobs
from serving.requests import DraftCounts
from serving.text.tokenizer import Vocabulary


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, under the model's own distribution.

    Attributes:
        logprob: its natural logarithm.
        rank: 1 is the most likely token.
        decoded_token: the token's text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenTable: TypeAlias = dict[int, Logprob]
"""Token -> its log-probability; the sampled token (of a prompt: the prompt's own) comes first, then the likeliest."""


@dataclass
class CompletionOutput:
    """One output of a prompt.

    Attributes:
        index: its place among the prompt's outputs.
        text: detokenised, without the stop string or stop token; empty without a tokenizer, or with `detokenize=False`.
        token_ids: the generated tokens, the stop token included.
        cumulative_logprob: sum of the tokens' log-probabilities; None if `logprobs` did not ask for them.
        logprobs: one table per token, if `logprobs` asked for them; else None.
        finish_reason: `stop`, `length`, `abort`, or a failure: `error` (the logits are not finite) or `no_token_left`
            (the sampling parameters forbid every token); `error` then describes it. None while it runs.
        stop_reason: the stop string or stop token that ended the text; None if neither did, or the tokenizer's own end
            token.
        lora_request: always None.
        drafts: tokens guessed ahead, and how many of them were right.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenTable] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def error(self) -> str | None:
        """Why generation failed; None if it did not."""
        return None if self.finish_reason is None else FAULTS.get(FinishReason(self.finish_reason))

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """When things happened to a request.

    Attributes:
        num_generation_tokens: tokens of all outputs.
        arrival_time: when it was made, in seconds since 1970.
        first_token_ts: when its first token came, in seconds of a monotonic clock; 0 before.
        last_token_ts: the same of its last token.
        first_token_latency: seconds from its arrival to its first token; 0 before.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """A prompt and its outputs.

    Attributes:
        request_id: unique among the requests of an `LLM`.
        prompt: the prompt's text; None if it was given as tokens.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: one table per prompt token (None for the first) if `prompt_logprobs` asks for them; else None.
        outputs: `n` of them; while a request streams, those that have something new.
        finished: whether all outputs have ended.
        metrics: when things happened.
        lora_request, encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: always None.
        num_cached_tokens: prompt tokens whose keys and values were in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenTable | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None


def token_table(entry: TokenLogprobs, num_top: int, vocabulary: Vocabulary | None) -> TokenTable:
    """The token and the `num_top` likeliest ones."""

    def described(token: int, logprob: float, rank: int) -> Logprob:
        text = None if vocabulary is None else vocabulary.piece(token).decode(errors="replace")
        return Logprob(logprob, rank, text)

    table = {entry.token: described(entry.token, entry.logprob, entry.rank)}
    for rank, (token, logprob) in enumerate(entry.top[:num_top], start=1):
        if token not in table:
            table[token] = described(token, logprob, rank)
    return table


def token_tables(
    entries: Sequence[TokenLogprobs | None], num_top: int, vocabulary: Vocabulary | None
) -> list[TokenTable | None]:
    """The tables of several tokens; None for one without a log-probability, the first of a prompt."""
    return [None if entry is None else token_table(entry, num_top, vocabulary) for entry in entries]
