"""Changes to a row's logits before temperature: penalties, bias, and forbidden tokens.

    grammar      -inf for tokens that the grammar does not allow
    allowed      -inf for all other tokens
    bad          -inf for tokens that would complete a bad sequence
    min_tokens   -inf for tokens that would end the output too early
    bias         added
    repetition   over prompt and output: positive logits are divided, negative ones multiplied
    frequency    over the output: subtracted once for every occurrence of a token
    presence     over the output: subtracted once if a token occurs at all

The order is vLLM's, so a bias is divided by the repetition penalty, too.

Only the affected tokens are read and written, by flat index `row * vocab + token`: a history is much shorter than a
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.sampling.grammar import forbid
from model_runner.sampling.sampling_params import SamplingParams
from ubatch.streams import to_device

_NO_TOKENS = torch.empty(0, dtype=torch.int64)
_NO_BIASES = torch.empty(0)
_NO_MASKS = torch.empty(0, 0, dtype=torch.int32)


@dataclass(frozen=True)
class SamplingRow:
    """How one row of logits is sampled.

    Attributes:
        params: the request's parameters.
        draw: the uniform random number of this output token, 0 to 1.
        prompt: the different tokens of the prompt, int64 on the host; used only by penalties.
        output: the output tokens before this one; used only by penalties.
        forbidden: tokens forbidden at this position, besides those that are always forbidden
            (`SamplingParams.never_mask`).
        mask: index of its mask, if it has a grammar.
    """

    params: SamplingParams
    draw: float = 0.0
    prompt: Tensor = _NO_TOKENS
    output: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    mask: int | None = None


def adjust_logits(logits: Tensor, rows: Sequence[SamplingRow], masks: Tensor | None = None) -> Tensor:
    """Apply forbidden tokens, bias and penalties; returns float32: a copy, or changed in place if already float32.

    Args:
        logits: `[R, vocab]`.
        masks: `[M, words]` int32 on the host, of the rows with a grammar; see `model_runner.sampling.grammar`.

    Raises:
        RequestError: a token is outside the vocabulary.
    """
    logits = logits.float().contiguous()
    vocab, flat = logits.shape[-1], logits.view(-1)
    constrained, bits = _own_masks(rows, masks)
    penalties = _penalties(rows, vocab) if any(row.params.penalised for row in rows) else ()
    masked = [index for index, row in enumerate(rows) if row.params.masked]
    never_masks = [rows[index].params.never_mask(vocab, logits.device) for index in masked]
    never = _flat({row: torch.tensor(each.forbidden) for row, each in enumerate(rows) if each.forbidden}, vocab)
    biases = {row: each.params.bias_tensors for row, each in enumerate(rows) if each.params.logit_bias}
    biased = _flat({row: tokens for row, (tokens, _) in biases.items()}, vocab)
    added = torch.cat([_NO_BIASES, *(own for _, own in biases.values())])
    # All data from the host goes to the device in one copy.
    where = torch.tensor(masked, dtype=torch.int64)
    host = (where, never, biased, added, constrained, bits, *penalties)
    where, never, biased, added, constrained, bits, *moved = to_device(host, logits.device)
    if bits.numel():
        forbid(logits, None if len(constrained) == len(rows) else constrained, bits)
    if never_masks:
        kept = logits.index_select(0, where).masked_fill_(torch.stack(never_masks), -torch.inf)
        logits.index_copy_(0, where, kept)
    if never.numel():
        flat.index_fill_(0, never, -torch.inf)
    if biased.numel():
        flat.index_add_(0, biased, added)
    if moved:
        seen, said, repetition, taken = moved
        values = flat[seen]
        flat[seen] = torch.where(values > 0, values / repetition, values * repetition)
        flat[said] -= taken
    return logits


def _own_masks(rows: Sequence[SamplingRow], masks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows with a grammar, `[n]` int64, and their masks, `[n, words]`."""
    if masks is None:
        return _NO_TOKENS, _NO_MASKS
    found = [(row, each.mask) for row, each in enumerate(rows) if each.mask is not None]
    where, own = torch.tensor(found, dtype=torch.int64).view(-1, 2).unbind(1)
    in_order = len(found) == len(masks) and own.equal(torch.arange(len(masks)))
    return where.contiguous(), masks if in_order else masks.index_select(0, own)


def _penalties(rows: Sequence[SamplingRow], vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat indices of tokens in prompt or output (`seen`) and of tokens in the output (`said`), then the repetition
    penalties of the former, and the amounts to subtract from the latter.
    """
    owners = torch.repeat_interleave(torch.tensor([len(row.output) for row in rows]))
    written = torch.tensor([token for row in rows for token in row.output], dtype=torch.int64)
    said, counts = (owners * vocab + written).unique(return_counts=True)
    given = [row.prompt + index * vocab for index, row in enumerate(rows) if row.params.repetition_penalty != 1]
    seen = torch.cat((said, *given)).unique()

    repetition = torch.tensor([row.params.repetition_penalty for row in rows])[seen // vocab]
    frequency = torch.tensor([row.params.frequency_penalty for row in rows])[said // vocab]
    presence = torch.tensor([row.params.presence_penalty for row in rows])[said // vocab]
    return seen, said, repetition, frequency * counts + presence


def _flat(tokens: Mapping[int, Tensor], vocab: int) -> Tensor:
    """The flat indices of some rows' tokens."""
    highest = max((int(own.max()) for own in tokens.values()), default=0)
    if highest >= vocab:
        raise RequestError(f"token {highest} of a logit bias or stop list; the vocabulary is 0 to {vocab - 1}.")
    return torch.cat([_NO_TOKENS, *(own + row * vocab for row, own in tokens.items())])
