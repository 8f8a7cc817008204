"""What changes a row's logits before temperature: penalties, bias, and tokens that must not come yet.

    repetition   over prompt and output: positive logits are divided, negative ones multiplied
    frequency    over the output: taken off once for every time a token is there
    presence     over the output: taken off once if it is there at all
    bias         added
    forbidden    -inf

Only the tokens concerned are touched, by flat index `row * vocab + token`: a history is short, a vocabulary is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.sampling_params import SamplingParams
from ubatch.small_copies import to_device

__all__ = ["SamplingRow", "adjust_logits"]

_NO_TOKENS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class SamplingRow:
    """How one row of logits is sampled.

    Attributes:
        params: of its request.
        draw: the uniform number of this output token, 0 to 1.
        prompt: the different tokens of the prompt, int64 on the host; only penalties look at it.
        output: the output tokens before this one; only penalties look at it.
        forbidden: tokens that must not come now.
    """

    params: SamplingParams
    draw: float = 0.0
    prompt: Tensor = _NO_TOKENS
    output: Sequence[int] = ()
    forbidden: Sequence[int] = ()


def adjust_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The logits with penalties, bias and forbidden tokens, float32; a copy, or changed in place if they are float32.

    Args:
        logits: `[R, vocab]`.
        rows: one per row.

    Raises:
        RequestError: a token is outside the vocabulary.
    """
    logits = logits.float().contiguous()
    vocab, flat = logits.shape[-1], logits.view(-1)
    penalties = _penalties(rows, vocab) if any(row.params.penalised for row in rows) else ()
    biased = [(index, token, bias) for index, row in enumerate(rows) for token, bias in row.params.logit_bias]
    biases = _keyed(biased, vocab)
    forbidden = [(index, token, 0.0) for index, row in enumerate(rows) for token in row.forbidden]
    never, _ = _keyed(forbidden, vocab)

    if not (penalties or biased or forbidden):
        return logits
    # All that is known on the host goes to the device in one copy; there it is gathered and scattered.
    *moved, keys, added, never = to_device((*penalties, *biases, never), logits.device)
    if penalties:
        seen, said, repetition, taken = moved
        values = flat[seen]
        flat[seen] = torch.where(values > 0, values / repetition, values * repetition)
        flat[said] -= taken
    if biased:
        flat.index_add_(0, keys, added)
    if forbidden:
        flat.index_fill_(0, never, -torch.inf)
    return logits


def _penalties(rows: Sequence[SamplingRow], vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat indices of what was seen, and of what was said; divisors of the former, what the latter are lowered by."""
    owners = torch.repeat_interleave(torch.tensor([len(row.output) for row in rows]))
    written = torch.tensor([token for row in rows for token in row.output], dtype=torch.int64)
    said, counts = (owners * vocab + written).unique(return_counts=True)
    given = [row.prompt + index * vocab for index, row in enumerate(rows) if row.params.repetition_penalty != 1]
    seen = torch.cat((said, *given)).unique()

    repetition = torch.tensor([row.params.repetition_penalty for row in rows])[seen // vocab]
    frequency = torch.tensor([row.params.frequency_penalty for row in rows])[said // vocab]
    presence = torch.tensor([row.params.presence_penalty for row in rows])[said // vocab]
    return seen, said, repetition, frequency * counts + presence


def _keyed(entries: Sequence[tuple[int, int, float]], vocab: int) -> tuple[Tensor, Tensor]:
    """From (row, token, value): the flat indices, int64, and the values, float32."""
    highest = max((token for _, token, _ in entries), default=0)
    if highest >= vocab:
        raise RequestError(f"token {highest} of a logit bias or stop list; the vocabulary is 0 to {vocab - 1}.")
    keys = torch.tensor([row * vocab + token for row, token, _ in entries], dtype=torch.int64)
    return keys, torch.tensor([value for _, _, value in entries], dtype=torch.float32)
