"""Log-probabilities of tokens under the model's own distribution: raw logits, temperature 1, no penalties.

    sampled tokens   scored by the row that each was sampled from; only if the request needs them
    prompt tokens    row `i` of a prompt scores token `i + 1`

A prompt may run in chunks. The last row of a chunk scores the first token of the next chunk; `PromptCarry` keeps that
result until the next chunk is read.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.step.request import Request

_SLICE_NUMBERS = 1 << 24
"""Most logits to compute at a time: those of all rows of a long prompt would fill the memory."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token, and of the most likely ones.

    Attributes:
        token: its id.
        logprob: its natural log-probability under the model's own distribution (temperature 1, no penalties).
        rank: 1 is the most likely token.
        top: the most likely tokens and their log-probabilities, most likely first; the requested number.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def score_tokens(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    """Log-probabilities of one token per row, packed for one copy to the host; `read_logprobs` unpacks them.

    Args:
        logits: `[R, vocab]`.
        tokens: `[R]` int64, on the same device.

    Returns:
        `[R, 2 + 2 * num_top]` float64: log-probability, rank, the top log-probabilities, the top tokens.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > chosen).sum(dim=-1, keepdim=True) + 1
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return torch.cat((chosen.double(), rank.double(), top.values.double(), top.indices.double()), dim=-1)


def score_prompt_rows(
    hidden: Tensor, tokens: Tensor, num_top: int, compute_logits: Callable[[Tensor], Tensor], vocab_size: int
) -> Tensor:
    """`score_tokens` of many rows, a slice at a time.

    Args:
        hidden: `[R, hidden_size]`, the input of `compute_logits`.
        tokens: `[R]` int64, the token after each row.
    """
    size = max(1, _SLICE_NUMBERS // vocab_size)
    parts = zip(hidden.split(size), tokens.split(size), strict=True)
    return torch.cat([score_tokens(compute_logits(rows), wanted, num_top) for rows, wanted in parts])


def read_logprobs(tokens: Sequence[int], scores: Sequence[Sequence[float]], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Unpack the result of `score_tokens`, which must list at least `num_top` top tokens."""
    read = []
    for token, (logprob, rank, *rest) in zip(tokens, scores, strict=True):
        listed = len(rest) // 2
        top = tuple((int(other), value) for value, other in zip(rest[:num_top], rest[listed:], strict=False))
        read.append(TokenLogprobs(token, logprob, int(rank), top))
    return tuple(read)


@dataclass(frozen=True)
class PromptSpan:
    """The part of a prompt that one step runs, for a request that needs prompt log-probabilities.

    Attributes:
        share: index of the request's share in the step.
        start, stop: range of the part in the prompt.
        first_row: the row of `start` in the batch.
        targets: the tokens that the rows score, from `start + 1` on; the last may be the next chunk's first.
    """

    share: int
    request: Request
    start: int
    stop: int
    first_row: int
    targets: tuple[int, ...]


class PromptCarry:
    """For every prompt that runs in chunks, the score of the first token of its next chunk."""

    def __init__(self) -> None:
        self._launched: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()
        self._scores: weakref.WeakKeyDictionary[Request, TokenLogprobs] = weakref.WeakKeyDictionary()

    def launch(self, span: PromptSpan) -> None:
        """Record that a step with this part is launched.

        Raises:
            RequestError: the previous part did not run in this runner, so the first token has no score.
        """
        if span.start and self._launched.get(span.request) != span.start:
            raise RequestError(
                f"request {span.request.request_id!r} asks for prompt_logprobs, but its prompt starts at token "
                f"{span.start}: every prompt token must run. Do not take its prefix from a cache."
            )
        self._launched[span.request] = span.stop

    def read(self, span: PromptSpan, scored: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs | None, ...]:
        """One entry per token of the part, None for a prompt's first. Parts of a request are read in their order, each
        with the scores of its `targets`."""
        first = self._scores.pop(span.request, None) if span.start else None
        own = span.stop - span.start - 1
        if len(scored) > own:
            self._scores[span.request] = scored[own]
        return (first, *scored[:own])

    def read_step(
        self, spans: Sequence[PromptSpan], scores: Sequence[Sequence[float]]
    ) -> dict[int, tuple[TokenLogprobs | None, ...]]:
        """Index of the share -> one entry per prompt token of a step.

        Args:
            spans: in the order of the rows.
            scores: of the rows of all spans, from `score_prompt_rows`.
        """
        rows, read = iter(scores), {}
        for span in spans:
            num_top = span.request.params.prompt_logprobs or 0
            own = [next(rows) for _ in span.targets]
            read[span.share] = self.read(span, read_logprobs(span.targets, own, num_top))
        return read
