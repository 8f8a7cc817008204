"""Steps made up of their shape alone, for what happens before and after a batch."""

from collections.abc import Sequence
from typing import Any

from model_runner import Step
from ubatch import Decision, ForwardMode


def shaped_step(query_lens: Sequence[int], mode: ForwardMode, prefix_lens: Sequence[int] = (), **fields: Any) -> Step:
    """A step of requests with so many tokens each, behind so many cached ones."""
    return Step(shares=(), mode=mode, query_lens=query_lens, prefix_lens=prefix_lens, **fields)


def decided_step(decision: Decision, **fields: Any) -> Step:
    """A step of an idle rank, on which the ranks have decided."""
    return Step(shares=(), mode=ForwardMode.IDLE, query_lens=(), decision=decision, **fields)
