"""From logits to the next token: greedy, or sampled with temperature, top-k and top-p, every request with its own seed.

A sampled request draws one uniform number per token from its own generator, and the token is where that number falls
in the cumulative distribution. So what a request gets depends on its seed and logits only, not on who shares its batch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.errors import RequestError

__all__ = ["SamplingParams", "TokenLogprobs", "sample"]


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a token was, and which others were.

    Attributes:
        token: its id.
        logprob: its natural log-probability under the model's own distribution (temperature 1, no penalties).
        rank: 1 is the most likely token.
        top: the most likely tokens and their log-probabilities, most likely first; as many as were asked for.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplingParams:
    """How to generate for one request. Names and meanings are vLLM's; the default is greedy.

    Attributes:
        temperature: 0 takes the most likely token; 1 samples from the model's distribution.
        top_k: sample from the k most likely tokens only; 0 or -1 from all.
        top_p: sample from the smallest set of most likely tokens that together have this probability; 1 from all.
        seed: makes sampling repeatable; None is a fresh seed per request.
        max_tokens: tokens to generate at most.
        stop_token_ids: tokens that end the output, besides the model's own end-of-sequence tokens.
        ignore_eos: go on after the model's end-of-sequence tokens.

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

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature must be 0 (greedy) or positive, not {self.temperature}.")
        if self.top_k < -1:
            raise RequestError(f"top_k must be at least 1, or 0 or -1 for all tokens, not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}.")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether top-k or top-p leaves out any token."""
        return self.top_k > 0 or self.top_p < 1


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[random.Random]) -> list[int]:
    """One token per row.

    Args:
        logits: `[rows, vocab]`, floating.
        params: one per row.
        generators: one per row; rows that are sampled each draw one number.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    sampled = [row for row, param in enumerate(params) if not param.greedy]
    for truncated in (False, True):
        rows = [row for row in sampled if params[row].truncated is truncated]
        if rows:
            chosen = _Rows(
                logits if len(rows) == len(tokens) else logits[rows],
                [params[row] for row in rows],
                [generators[row].random() for row in rows],
            )
            for row, token in zip(rows, chosen.truncated() if truncated else chosen.whole(), strict=True):
                tokens[row] = token
    return tokens


@dataclass(frozen=True)
class _Rows:
    """Rows that are sampled: their logits, parameters and draws (0 to 1)."""

    logits: Tensor
    params: Sequence[SamplingParams]
    draws: Sequence[float]

    def whole(self) -> list[int]:
        """Where the draws fall among all tokens, in the vocabulary's order: without sorting, which costs the most."""
        return self._fall(self._scaled(self.logits).softmax(dim=-1)).flatten().tolist()

    def truncated(self) -> list[int]:
        """Where the draws fall among the tokens that top-k and top-p leave, most likely first."""
        vocab = self.logits.shape[-1]
        limits = [min(param.top_k, vocab) if param.top_k > 0 else vocab for param in self.params]
        ranked, order = self.logits.topk(max(limits), dim=-1)
        beyond = torch.arange(max(limits), device=ranked.device) >= self._column(limits)
        probabilities = self._scaled(ranked).masked_fill_(beyond, -torch.inf).softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        before[:, 0] = 0  # exactly, so that a tiny top_p keeps the most likely token
        probabilities.masked_fill_(before >= self._column([param.top_p for param in self.params]), 0)
        return order.gather(1, self._fall(probabilities)).flatten().tolist()

    def _fall(self, probabilities: Tensor) -> Tensor:
        """`[rows, 1]`, where each row's draw falls in its cumulative distribution, which need not sum to 1."""
        cumulative = probabilities.cumsum(dim=-1)
        total = cumulative[:, -1:]
        place = torch.searchsorted(cumulative, self._column(self.draws) * total, right=True)
        # A draw next to 1 may round up to the total: the last token that has any probability.
        return torch.minimum(place, (cumulative < total).sum(dim=-1, keepdim=True))

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits.double() / self._column([param.temperature for param in self.params])

    def _column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.logits.device)[:, None]
