"""A request's `allowed_token_ids` and `bad_words`, checked and tokenized once for all of its outputs."""

from __future__ import annotations

from collections.abc import Sequence

from model_runner import SamplingParams
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import GenerationRequest
from serving.api.service import Service
from serving.text.bad_words import bad_token_sequences

MAX_ALLOWED_OF_ALL = 2**20
"""Most allowed token ids in a body's list, and most distinct ones times its outputs. Every output's request carries the
list to the engine, which decodes it between steps."""


async def allowed_tokens(service: Service, body: GenerationRequest, num_prompts: int, size: int) -> SamplingParams:
    """Sampling parameters with only the allowed and forbidden tokens of a body of `size` bytes set, checked.

    Raises:
        RequestError, ApiError: a limit is invalid.
        QueueFull: too many long bodies wait to be tokenized.
    """
    vocab_size = service.engine.info.vocab_size

    def make() -> SamplingParams:
        allowed, words = body.allowed_token_ids, body.bad_words or ()
        if allowed is not None:
            _check_allowed(service, allowed, num_prompts * (body.n or 1))
        bad = bad_token_sequences(service.tokenizer, words, vocab_size) if words else ()
        return SamplingParams(allowed_token_ids=allowed, bad_token_sequences=bad)

    return await service.long_work.run(make, size)


def _check_allowed(service: Service, allowed: Sequence[int], outputs: int) -> None:
    name = "allowed_token_ids"
    if len(allowed) > MAX_ALLOWED_OF_ALL:
        raise ApiError(400, f"{name} has {len(allowed)} ids; at most {MAX_ALLOWED_OF_ALL} are taken.", param=name)
    service.check_token_ids(allowed, name)
    count = len(set(allowed))
    if count * outputs > MAX_ALLOWED_OF_ALL:
        message = (
            f"{name} has {count} different ids for each of {outputs} outputs; at most {MAX_ALLOWED_OF_ALL} are taken "
            f"over all outputs. Ask for fewer outputs, or forbid tokens with bad_words."
        )
        raise ApiError(400, message, param=name)
