"""Refuses a request on arrival if it can never be served."""

from __future__ import annotations

from collections.abc import Sequence

from attention import KVCacheExhausted
from model_runner import RequestError
from serving.requests import RequestInput


def check_input(
    given: RequestInput, *, vocab_size: int, eos_token_ids: Sequence[int], max_model_len: int, max_kv_tokens: int
) -> None:
    """Refuse a request that could never get a token.

    Raises:
        RequestError: the prompt is empty, has a token that is not an int or outside the vocabulary, or leaves no room
            for an output; or the sampling parameters forbid every first token.
        KVCacheExhausted: the prompt alone does not fit the KV cache.
    """
    name, tokens = given.request_id, given.token_ids
    if not tokens:
        raise RequestError(f"the prompt of request {name!r} is empty; give at least one token.")
    for kind in set(map(type, tokens)) - {int}:
        raise RequestError(f"the prompt of request {name!r} has a {kind.__name__}; a token is a Python int.")
    _check_vocabulary(name, "the prompt", tokens, vocab_size)
    for what, own in given.params.named_tokens():
        _check_vocabulary(name, what, own, vocab_size)
    given.params.check_choice(eos_token_ids)
    if len(tokens) + 1 > max_model_len:
        raise RequestError(
            f"the prompt of request {name!r} has {len(tokens)} tokens; with one of output that is more than "
            f"max_model_len ({max_model_len})."
        )
    if len(tokens) > max_kv_tokens:
        raise KVCacheExhausted(
            f"the prompt of request {name!r} has {len(tokens)} tokens, the whole KV cache holds {max_kv_tokens} of one "
            "request. Shorten the prompt, or raise --kv-cache-memory or --gpu-memory-utilization."
        )


def _check_vocabulary(name: str, what: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(f"{what} of request {name!r} has token {wrong}; the vocabulary is 0 to {vocab_size - 1}.")
