"""The interface of proposers: they guess a request's next tokens, so that one step of the model can check several.

    propose     drafts after the known tokens, as a chain or as a tree
    observe     the results of a target's step: hidden states of its rows, new tokens, accepted drafts
    forget      the request has ended, or lost its KV

Drafts never change a request's output, only the number of its steps (with acceptance by rejection, they do not change
the output's distribution). A proposer may be wrong, late, or make no drafts.

The simplest drafts are by prompt lookup: the tokens that followed an earlier occurrence of the last tokens.
`NgramProposer` looks for the longest run of last tokens, from `shortest` to `longest`, that occurs earlier in the
sequence; among several the most recent. The tokens after it are the draft. If these reach the end of the sequence, the
draft continues with its own tokens, so a repeating sequence is drafted to any length. An index per sequence maps each
run of `shortest` tokens to its occurrences, and is extended once per token; longer runs are found by comparing
backwards from these. Rescanning would read the whole context at every step.

Source of prompt lookup: prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_runner.step.request import Request
from model_runner.step.step import Step


@dataclass(frozen=True)
class Draft:
    """Draft tokens after a request's last token.

    Attributes:
        tokens: `D` draft tokens; may be empty.
        parents: for each draft the node it follows: 0 is the last known token (the root), `j + 1` is draft `j`, an
            earlier one. None is a chain: every draft follows the previous one.
        probs: `[D, vocab]` float32, the distribution each draft was drawn from; None if they were not drawn. Chains
            only.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    probs: Tensor | None = None


class Proposer(Protocol):
    """Makes drafts. The scheduler calls it between steps."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Drafts of each request.

        Args:
            requests: requests without pending tokens.
            counts: most drafts of each request; the proposer may make fewer.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended or was retracted: its keys and values are gone."""
        ...


class StepObserver(Protocol):
    """A proposer that needs the target's hidden states; see `ModelRunner.set_observer`."""

    def observe(
        self, step: Step, hidden: Tensor, tokens: Sequence[tuple[int, ...]], accepted_rows: Sequence[tuple[int, ...]]
    ) -> None:
        """Called once per step with tokens when its result is read, in the order of the steps.

        Args:
            step: the step.
            hidden: `[T, hidden_size]` of all its rows, normalised: the input of `compute_logits`.
            tokens: the new tokens of each share; none for a prompt chunk that does not end its prompt.
            accepted_rows: in a verify step, for each share the rows of its root and its accepted drafts, in order;
                else empty.
        """
        ...


class NgramProposer:
    """Drafts by prompt lookup, a chain for every request; it does not use the model. See `Proposer`.

    Args:
        shortest: tokens of the shortest run to look up, at least 1.
        longest: tokens of the longest run to look up.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indices: dict[Request, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """For each request as many drafts as wanted, or none if no earlier run is found."""
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = NgramIndex(self._shortest, self._longest)
            drafts.append(Draft(tuple(index.draft(request.token_ids, count))))
        return drafts

    def forget(self, request: Request) -> None:
        """Drop the index of a request that has ended."""
        self._indices.pop(request, None)


class NgramIndex:
    """Index of the runs of one growing sequence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous = array("q")  # start of a run -> start of its previous occurrence, or -1

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Draft `count` tokens; none if no earlier run is found.

        Args:
            tokens: the sequence; between calls it may only grow.
            count: number of drafts.
        """
        if count < 1 or len(tokens) <= self._shortest:
            return []
        self._take_in(tokens)
        follows = self._find(tokens)
        if follows is None:
            return []
        draft = list(tokens[follows : follows + count])
        while len(draft) < count:
            draft.append(draft[len(draft) - (len(tokens) - follows)])
        return draft

    def _take_in(self, tokens: Sequence[int]) -> None:
        """Index the runs that end before the last token; the run that ends at it is the one to look up."""
        first, stop = len(self._previous), len(tokens) - self._shortest
        runs = zip(*(tokens[first + shift : stop + shift] for shift in range(self._shortest)), strict=True)
        for start, run in enumerate(runs, first):
            self._previous.append(self._latest.get(run, -1))
            self._latest[run] = start

    def _find(self, tokens: Sequence[int]) -> int | None:
        """The index after the best earlier occurrence of the last tokens."""
        begin = len(tokens) - self._shortest
        start = self._latest.get(tuple(tokens[begin:]), -1)
        best, best_extra, most = None, -1, self._longest - self._shortest
        while start >= 0:
            extra = 0  # tokens before the run that are equal too
            while extra < most and extra < start and tokens[start - 1 - extra] == tokens[begin - 1 - extra]:
                extra += 1
            if extra > best_extra:
                best, best_extra = start + self._shortest, extra
                if extra == most:
                    break
            start = self._previous[start]
        return best
