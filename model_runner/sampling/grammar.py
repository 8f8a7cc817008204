"""Grammars: which tokens may come next in an output, as masks of one bit per token.

    advance    a request's grammar takes in the tokens that were generated since
    fill       the masks of all rows that have a grammar, of all requests at once: the row after the output so far, and
               one per node of the drafts
    forbid     the masks go to the device in one copy, and are applied to the logits of all their rows at once

A grammar is a function of its text and the output. Nothing in it depends on the batch, and a request that was retracted
keeps it. What a grammar is and how its text is read is the caller's matter (`serving.structured` has one).

A mask is `[words]` int32: bit `t % 32` of word `t // 32` says whether token `t` is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from model_runner.kernels import small_ops
from ubatch.kernels import runs_in_c


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
