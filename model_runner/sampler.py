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

__all__ = ["SamplingParams", "sample"]


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


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[random.Random]) -> list[int]:
    """One token per row.

    Args:
        logits: `[rows, vocab]`, floating.
        params: one per row.
        generators: one per row; rows that are sampled each draw one number.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    rows = [row for row, param in enumerate(params) if not param.greedy]
    if rows:
        chosen = logits if len(rows) == len(tokens) else logits[rows]
        draws = [generators[row].random() for row in rows]
        for row, token in zip(rows, _draw(chosen, [params[row] for row in rows], draws), strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """Where each draw (0 to 1) falls in its row's truncated distribution, most likely tokens first."""
    vocab = logits.shape[-1]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # Without truncation the order does not matter, and sorting a large vocabulary is the most expensive step.
    limits = [param.top_k if param.top_k > 0 else vocab for param in params]
    width = min(max(limits), vocab)
    order: Tensor | None = None
    if width < vocab:
        logits, order = logits.topk(width, dim=-1)
    elif any(param.top_p < 1 or param.top_k > 0 for param in params):
        logits, order = logits.sort(dim=-1, descending=True)
    scaled = logits.double() / column([param.temperature for param in params])
    if order is not None:
        beyond = torch.arange(width, device=logits.device) >= column(limits)
        scaled = scaled.masked_fill(beyond, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if order is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= column([param.top_p for param in params]), 0.0)
        probabilities[:, 0] = scaled.softmax(dim=-1)[:, 0]  # a tiny top_p keeps at least the most likely token
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, column(draws) * total, right=True).clamp_(max=width - 1)
    if order is not None:
        place = order.gather(1, place)
    tokens: list[int] = place.flatten().tolist()
    return tokens
