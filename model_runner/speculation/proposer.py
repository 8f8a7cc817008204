"""Who guesses a request's next tokens, so that one step of the model can check several of them.

    propose     drafts behind the tokens that are known, as a chain or as a tree
    observe     what a step of the target gave: hidden states of its rows, new tokens, which drafts were right
    forget      the request ended, or lost its KV

What comes out of a request never depends on the drafts, only how many steps it takes (with acceptance by rejection: its
distribution does not). A proposer may be wrong, late, or have nothing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_runner.step.input_batch import InputBatch
from model_runner.step.request import Request

__all__ = ["Draft", "Proposer", "StepObserver"]


@dataclass(frozen=True)
class Draft:
    """Guesses of what comes after a request's last token.

    Attributes:
        tokens: `D` of them; none is no guess.
        parents: of each draft the node it follows: 0 is the last known token (the root), `j + 1` is draft `j`, which
            comes before it. None is a chain: every draft follows the one before.
        probs: `[D, vocab]` float32, the distribution each draft was drawn from; None unless they were drawn, and only
            with a chain.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    probs: Tensor | None = None


class Proposer(Protocol):
    """Makes drafts. Called between steps, by the one who schedules them."""

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
        """Drafts of each request.

        Args:
            requests: whose tokens are all known.
            counts: how many drafts of each are wanted; it may get fewer.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request ended, or was retracted: its keys and values are gone, what was kept about it may go, too."""
        ...


class StepObserver(Protocol):
    """A proposer that needs what the target computed; see `ModelRunner.set_observer`."""

    def observe(
        self,
        batch: InputBatch,
        hidden: Tensor,
        tokens: Sequence[tuple[int, ...]],
        accepted_rows: Sequence[tuple[int, ...]],
    ) -> None:
        """A step that ran tokens was read; called once, in the order of the steps.

        Args:
            batch: what the step ran.
            hidden: `[T, hidden_size]` of all its rows, normalised: what `compute_logits` takes.
            tokens: the new tokens of each share; none where its prompt goes on.
            accepted_rows: of each share in a verify step the rows of its root and its accepted drafts, in order;
                else none.
        """
        ...
