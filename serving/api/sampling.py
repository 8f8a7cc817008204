"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

from dataclasses import fields, replace

from model_runner import SamplingParams
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import GenerationRequest
from serving.api.service import Service
from ubatch.errors import shown

_MAX_DIGITS = 20
"""Most digits of a token id: Python refuses to parse integers of thousands of digits."""


_OPENAI = {"temperature": 1.0}
"""OpenAI's defaults, where they are not those of `SamplingParams`."""
_MADE = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "logit_bias", "stop_token_ids", "allowed_token_ids"}
"""Parameters that are made from a request's fields, where these are not the values themselves."""
_TAKEN = [each.name for each in fields(SamplingParams) if each.name in GenerationRequest.model_fields.keys() - _MADE]


def sampling_params(
    service: Service,
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    limits: SamplingParams,
) -> list[SamplingParams]:
    """The parameters of each of the request's `n` outputs; output i has the request's seed + i.

    `limits` has the request's grammar (`serving.api.structured`), and its allowed and forbidden tokens
    (`serving.api.allowed_tokens`).
    """
    _check_top(service, request)
    vocab_size = service.engine.info.vocab_size
    own = {name: value for name in _TAKEN if (value := getattr(request, name)) is not None}
    stop_token_ids = tuple(request.stop_token_ids or ())
    service.check_token_ids(stop_token_ids, "stop_token_ids")
    params = SamplingParams(
        **{**_OPENAI, **service.defaults, **own, "max_tokens": max_tokens},
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=limits.allowed_token_ids,
        bad_token_sequences=limits.bad_token_sequences,
        grammar=limits.grammar,
    )
    seed = service.fresh_seed() if request.seed is None else request.seed
    return [params if seed is None else replace(params, seed=seed + output) for output in range(request.n or 1)]


def _check_top(service: Service, request: GenerationRequest) -> None:
    for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
        asked = getattr(request, name, None)
        if asked is not None and asked is not True and asked > service.max_logprobs:
            message = f"{name}: {asked} likeliest tokens; this server returns at most {service.max_logprobs}."
            raise ApiError(400, message, param=name)


def _logit_bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias: list[tuple[int, float]] = []
    for key, value in given.items():
        if not (len(key) <= _MAX_DIGITS and key.isdecimal() and str(int(key)) == key and int(key) < vocab_size):
            message = f"logit_bias: {shown(key)} is not a token id from 0 to {vocab_size - 1}."
            raise ApiError(400, message, param="logit_bias")
        bias.append((int(key), value))
    return tuple(bias)
