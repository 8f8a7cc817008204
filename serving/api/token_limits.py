"""Which tokens a request allows and forbids: its `allowed_token_ids` and `bad_words`, made ready once for all."""

from __future__ import annotations

from model_runner import SamplingParams
from serving.api.errors import ApiError
from serving.api.prompts import check_token_ids
from serving.api.request_models import GenerationRequest
from serving.api.service import Service
from serving.bad_words import bad_token_sequences

__all__ = ["MAX_ALLOWED_OF_ALL", "token_limits"]

MAX_ALLOWED_OF_ALL = 2**20
"""Allowed tokens of a body, over all its outputs: each takes the list to its engine, which reads it between steps."""


async def token_limits(service: Service, body: GenerationRequest, num_prompts: int, size: int) -> SamplingParams:
    """Sampling parameters with nothing but the body's limits of tokens, checked.

    Args:
        service: whose tokenizer and vocabulary.
        body: the request.
        num_prompts: of it.
        size: bytes of it.

    Raises:
        RequestError, ApiError, QueueFull: they cannot work.
    """
    allowed, words, name = body.allowed_token_ids, body.bad_words or (), "allowed_token_ids"
    if allowed is not None:
        vocab_size, outputs = service.engine.info.vocab_size, num_prompts * (body.n or 1)
        check_token_ids(allowed, vocab_size, name)
        if len(allowed) > vocab_size:
            raise ApiError(400, f"{name} has {len(allowed)} ids; the model has {vocab_size} tokens.", param=name)
        if len(allowed) * outputs > MAX_ALLOWED_OF_ALL:
            message = (
                f"{name} has {len(allowed)} ids for each of {outputs} outputs; at most {MAX_ALLOWED_OF_ALL} are taken "
                f"over all outputs. Ask for fewer outputs, or forbid tokens with bad_words."
            )
            raise ApiError(400, message, param=name)
    bad = await service.long_work.run(lambda: bad_token_sequences(service.tokenizer, words), size) if words else ()
    return SamplingParams(allowed_token_ids=None if allowed is None else tuple(allowed), bad_token_sequences=bad)
