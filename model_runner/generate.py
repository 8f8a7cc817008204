"""Offline generation: all prompts in, all outputs back.

Prompts are admitted in order while the KV cache has room for their longest output, so nothing is ever retracted. New
prompts run first, together; then all running requests decode one token per step. With several ranks every rank calls
`generate` with its own prompts (possibly none); a rank that is done runs idle steps until all are done.
"""

import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from attention import KVCacheExhausted
from model_runner.errors import RequestError
from model_runner.runner import ModelRunner
from model_runner.sampling.sampling_params import SamplingParams
from model_runner.step.logprobs import TokenLogprobs
from model_runner.step.request import Request, ScheduledRequest


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    """a stop or end-of-sequence token, which is the output's last"""
    LENGTH = "length"
    """`max_tokens` were generated"""
    ABORT = "abort"
    """the request was aborted before its end"""
    ERROR = "error"
    """the logits were not finite; earlier tokens are valid"""
    NO_TOKEN_LEFT = "no_token_left"
    """the sampling parameters allow no next token; earlier tokens are valid"""
    GRAMMAR = "grammar"
    """the grammar cannot be followed any further; earlier tokens obey it"""


FAULTS = {
    FinishReason.ERROR: "the model's logits, or the hidden states of its prompt, are not finite numbers (nan or "
    "infinity): the checkpoint, or the precision it is computed in, does not hold for these tokens.",
    FinishReason.NO_TOKEN_LEFT: "the request's parameters leave no token to go on with: each that allowed_token_ids, "
    "or its structured output, allows would complete one of its bad_words, or end the output before min_tokens. Allow "
    "more tokens, or forbid fewer.",
    FinishReason.GRAMMAR: "its structured output cannot be followed any further: at this place the grammar is too "
    "complex for the limits of a step, or the tokenizer has no token that may come next. Simplify the schema, regular "
    "expression or grammar.",
}
"""Explanations of these finish reasons, for the user."""


@dataclass(frozen=True)
class GenerationOutput:
    """The output of one prompt.

    Attributes:
        prompt_token_ids: the prompt.
        token_ids: the output, including a stop token.
        finish_reason: why it ended.
        logprobs: one per output token if `params.logprobs` is set; else empty.
        prompt_logprobs: one per prompt token (None for the first) if `params.prompt_logprobs` is set; else None.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    max_num_batched_tokens: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[GenerationOutput]:
    """Generate for every prompt. With several ranks, every rank must call it.

    Args:
        runner: the model.
        prompts: token ids of each.
        params: for all prompts, or one per prompt.
        max_num_batched_tokens: most prompt tokens per step; longer prompts run in chunks. None for no limit.
        on_token: called with (index of the prompt, token) for each new token.

    Returns:
        One output per prompt, in the prompts' order.

    Raises:
        RequestError, KVCacheExhausted: a prompt cannot be served; raised before anything runs.
        PeerFailed: another rank failed.
        UBatchError: the runner was closed.
    """
    runner.check_open()
    with runner.together():
        if max_num_batched_tokens is not None and max_num_batched_tokens < 1:
            raise RequestError(f"max_num_batched_tokens must be at least 1, not {max_num_batched_tokens}.")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts; give one for all or one each."
            )
        requests = []
        for index, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
            check_request(runner, prompt, param, index)
            requests.append(Request(index, list(prompt), param))
        job = _Job(runner, deque(enumerate(requests)), max_num_batched_tokens or sys.maxsize, on_token)
        try:
            while job.step():
                pass
        finally:
            for request in requests:
                runner.release(request)
    return [job.outputs[index] for index in range(len(requests))]


def check_request(runner: ModelRunner, token_ids: Sequence[int], params: SamplingParams, name: int | str) -> None:
    """Refuse a request that could never be served.

    Raises:
        RequestError: an empty prompt, a token outside the vocabulary, sampling parameters that leave no token to begin
            with, prompt and output longer than `max_model_len`.
        KVCacheExhausted: the request needs more than the whole KV cache.
    """
    config = runner.config
    if not token_ids:
        raise RequestError(f"prompt {name} is empty; give at least one token.")
    wrong = [token for token in token_ids if not 0 <= token < config.vocab_size]
    if wrong:
        raise RequestError(f"prompt {name} has token {wrong[0]}; the vocabulary is 0 to {config.vocab_size - 1}.")
    if params.grammar is not None:
        raise RequestError(
            f"prompt {name} has a grammar, which `generate` cannot follow; `serving.LLM` and the server can.",
            param="grammar",
        )
    params.check_vocabulary(config.vocab_size)
    params.check_choice(config.eos_token_ids)
    total, limit = len(token_ids) + params.max_tokens, runner.max_model_len
    if total > limit:
        whose = "the model's" if limit == config.max_position_embeddings else "max_model_len's"
        raise RequestError(
            f"prompt {name} has {len(token_ids)} tokens, and max_tokens is {params.max_tokens}: {total} in all, more "
            f"than {whose} {limit} positions."
        )
    needed, blocks = runner.kv_cache.spec.blocks_for(total), runner.kv_cache.num_blocks
    if needed > blocks:
        raise KVCacheExhausted(
            f"prompt {name} needs {needed} KV blocks for {total} tokens, the cache has {blocks}; raise num_kv_blocks "
            f"or kv_cache_memory (--kv-cache-memory), or lower max_tokens."
        )


@dataclass
class _Job:
    """One call of `generate`: waiting requests, running requests, and finished outputs, by index of the prompt."""

    runner: ModelRunner
    waiting: deque[tuple[int, Request]]
    budget: int
    on_token: Callable[[int, int], None] | None
    running: dict[int, Request] = field(default_factory=dict)
    outputs: dict[int, GenerationOutput] = field(default_factory=dict)
    logprobs: defaultdict[int, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: defaultdict[int, list[TokenLogprobs | None]] = field(default_factory=lambda: defaultdict(list))

    def step(self) -> bool:
        """Run one step; False when no rank had anything left to run."""
        self._admit()
        shares = self._prefills() or {index: ScheduledRequest(r, 1) for index, r in self.running.items()}
        output = self.runner.execute(tuple(shares.values()))
        for place, (index, share) in enumerate(shares.items()):
            self.logprobs[index] += output.logprobs[place]
            self.prompt_logprobs[index] += output.prompt_logprobs[place]
            token = output.tokens[place][0] if output.tokens[place] else None
            share.request.advance(share.num_tokens, token)
            if place in output.corrupted:
                self._finish(index, FinishReason.ERROR)
            elif place in output.out_of_tokens:
                self._finish(index, FinishReason.NO_TOKEN_LEFT)
            elif token is not None:
                self._take(index, share.request, token)
        return not output.all_idle

    def _admit(self) -> None:
        """Admit waiting prompts, in order, while rows and blocks for their longest possible output are free."""
        while self.waiting:
            index, request = self.waiting[0]
            try:
                self.runner.admit(request, request.num_prompt_tokens + request.params.max_tokens)
            except KVCacheExhausted:
                if not self.running:
                    raise  # nothing is running, so no blocks will be freed
                return
            self.running[index] = request
            self.waiting.popleft()

    def _prefills(self) -> dict[int, ScheduledRequest]:
        """Shares of prompts that are not in the cache yet, up to the budget; the last one may be a chunk."""
        left = self.budget
        shares: dict[int, ScheduledRequest] = {}
        for index, request in self.running.items():
            tokens = min(request.num_uncomputed_tokens, left)
            if tokens and request.num_computed_tokens < request.num_prompt_tokens:
                shares[index] = ScheduledRequest(request, tokens)
                left -= tokens
        return shares

    def _take(self, index: int, request: Request, token: int) -> None:
        """Handle a new token; finish the request if it was the last."""
        if self.on_token is not None:
            self.on_token(index, token)
        if token in request.params.ending_tokens(self.runner.config.eos_token_ids):
            self._finish(index, FinishReason.STOP)
        elif request.num_output_tokens >= request.params.max_tokens:
            self._finish(index, FinishReason.LENGTH)

    def _finish(self, index: int, reason: FinishReason) -> None:
        request = self.running.pop(index)
        prompt, output = request.token_ids[: request.num_prompt_tokens], request.output_token_ids
        of_prompt = None if request.params.prompt_logprobs is None else tuple(self.prompt_logprobs[index])
        self.outputs[index] = GenerationOutput(
            tuple(prompt), tuple(output), reason, tuple(self.logprobs[index]), of_prompt
        )
        self.runner.release(request)
