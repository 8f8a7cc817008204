"""How a row of logits is sampled: its random number, and the changes before temperature, such as penalties and masks.

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

A grammar says which tokens may come next in an output, as masks of one bit per token:

    advance    a request's grammar takes in the tokens that were generated since
    fill       the masks of all rows that have a grammar, of all requests at once: the row after the output so far, and
               one per node of the drafts
    forbid     the masks go to the device in one copy, and are applied to the logits of all their rows at once

A grammar is a function of its text and the output. Nothing in it depends on the batch, and a request that was retracted
keeps it. What a grammar is and how its text is read is the caller's matter (`serving.structured` has one).

A mask is `[words]` int32: bit `t % 32` of word `t // 32` says whether token `t` is allowed.

Random numbers depend only on a seed and an index. A request's output token `i` uses number `i` of its seed. So the
number does not depend on the rest of the batch, on the order of sampling, or on repetitions after a retraction. A
generator with a state could not guarantee that. Source: SplitMix64, the output function of Steele, Lea and Flood, 2014.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from model_runner.errors import RequestError
from model_runner.kernels import small_ops
from model_runner.sampling.sampling_params import SamplingParams
from ubatch.kernels import runs_in_c
from ubatch.streams import to_device


class TokenGrammar(Protocol):
    """The state of one output's grammar.

    Attributes:
        num_tokens: output tokens that it has taken in.
        failure: why it cannot go on; empty while it can. It then allows no token.
        masks: fills the masks of this grammar, and of all that have the same one.
    """

    @property
    def num_tokens(self) -> int: ...

    @property
    def failure(self) -> str: ...

    @property
    def masks(self) -> MaskFiller: ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the output's next tokens. A token that it does not allow is a failure."""

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow one after the other; the state does not change."""


class GrammarRows(NamedTuple):
    """The rows of one request.

    Attributes:
        first: index of its root's mask; those of its drafts follow.
        drafts: the drafts that follow the output.
        parents: see `ScheduledRequest.parents`.
    """

    grammar: TokenGrammar
    first: int
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None


class MaskFiller(Protocol):
    """Fills masks of many grammars at once.

    Attributes:
        words: length of a mask; enough for the model's vocabulary.
    """

    @property
    def words(self) -> int: ...

    def fill(self, requests: Sequence[GrammarRows], masks: Tensor) -> None:
        """Write the masks of these requests.

        Args:
            masks: `[M, words]` int32 on the host, dense, zeros. What follows a refused draft, and all rows of a grammar
                that has failed, stay 0.
        """


class StepMasks(NamedTuple):
    """The masks of a step's rows.

    Attributes:
        masks: `[M, words]` int32, on the host.
        greedy: row -> its mask, of rows that take the most likely token that their grammar allows. The others have a
            `SamplingRow`, with its mask.
    """

    masks: Tensor
    greedy: Mapping[int, int]


def fill_masks(requests: Sequence[GrammarRows]) -> Tensor:
    """The masks of these requests, at least one: `[M, words]` int32 on the host."""
    last, filler = requests[-1], requests[0].grammar.masks
    masks = torch.zeros(last.first + 1 + len(last.drafts), filler.words, dtype=torch.int32)
    filler.fill(requests, masks)
    return masks


def forbid(logits: Tensor, rows: Tensor | None, masks: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Args:
        logits: `[R, vocab]` float32, dense.
        rows: `[n]` int64, the rows of these masks; None for all, in their order.
        masks: `[n, words]` int32, dense, on the device of the logits.
    """
    if runs_in_c(logits):
        small_ops.forbid(logits, rows, masks)
    else:
        forbid_reference(logits, rows, masks)


def forbid_reference(logits: Tensor, rows: Tensor | None, masks: Tensor) -> None:
    """See `forbid`."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=masks.device)
    forbidden = (masks.view(torch.uint8)[:, :, None] & bits == 0).flatten(1)[:, : logits.shape[1]]
    if rows is None:
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
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
        masks: `[M, words]` int32 on the host, of the rows with a grammar; see `model_runner.sampling.rows`.

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


def uniform(seed: int, index: int) -> float:
    """Number `index` of `seed`: 53 random bits, at least 0 and below 1.

    Args:
        seed: any integer; only the lowest 64 bits are used.
        index: 0 or more.
    """
    # The seed is mixed first, so that sequences of neighbouring seeds do not overlap.
    return (_mix(_mix(seed & _WORD) + (index + 1) * _GOLDEN & _WORD) >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A random 64-bit seed from the operating system."""
    return int.from_bytes(os.urandom(8), "little")


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
