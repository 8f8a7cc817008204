"""When an output ends."""

from __future__ import annotations

from collections.abc import Sequence

from model_runner import FinishReason
from serving.scheduler.request import TrackedRequest

__all__ = ["ending"]


def ending(request: TrackedRequest, tokens: Sequence[int], start: int) -> tuple[int, FinishReason | None]:
    """How many of a step's tokens belong to the output, and why it ends with them, if it does.

    A token that ends the output belongs to it, and is the last one.

    Args:
        request: whose.
        tokens: the new ones, in order.
        start: the place of the first among the request's tokens.
    """
    fewest = request.num_prompt_tokens + request.params.min_tokens
    for count, token in enumerate(tokens, 1):
        if token in request.ends and start + count >= fewest:
            return count, FinishReason.STOP
        if start + count >= request.limit:
            return count, FinishReason.LENGTH
    return len(tokens), None
