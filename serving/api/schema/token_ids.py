"""Token ids as clients send them."""

from __future__ import annotations

from collections.abc import Sequence

from serving.api.schema.errors import ApiError
from ubatch.errors import shown

__all__ = ["check_token_ids"]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the model's vocabulary."""
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < vocab_size:
            raise ApiError(400, f"{param}: {shown(token)} is not a token id from 0 to {vocab_size - 1}.", param=param)
