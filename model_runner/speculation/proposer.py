"""The interface of proposers: they guess a request's next tokens, so that one step of the model can check several.

    propose     drafts after the known tokens, as a chain or as a tree
    observe     the results of a target's step: hidden states of its rows, new tokens, accepted drafts
    forget      the request has ended, or lost its KV

Drafts never change a request's output, only the number of its steps (with acceptance by rejection, they do not change
the output's distribution). A proposer may be wrong, late, or make no drafts.
"""

from __future__ import annotations

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
