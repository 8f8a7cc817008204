"""When an output ends."""

from __future__ import annotations

from collections.abc import Sequence

from model_runner import FinishReason
from serving.scheduler.request import TrackedRequest

__all__ = ["ending"]


def ending(request: TrackedRequest, tokens: Sequence[int], start: int) -> tuple[int, FinishReason | None]:
    """How many of a step's tokens belong to the output, and the finish reason if the output ends with them.

    A token that ends the output is its last token.

    Args:
        request: the request that got the tokens.
        tokens: the new tokens, in order.
        start: index of the first new token in the request's tokens.
    """
    fewest = request.num_prompt_tokens + request.params.min_tokens
    for count, token in enumerate(tokens, 1):
        if token in request.ends and start + count >= fewest:
            return count, FinishReason.STOP
        if start + count >= request.limit:
            return count, FinishReason.LENGTH
    return len(tokens), None
