"""From a request's fields to the engine's sampling parameters, and to the grammar of the form that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from model_runner import RequestError, SamplingParams
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import GenerationRequest, ResponseFormat
from serving.api.service import Service
from serving.structured import After, StructuredOutputsParams
from serving.text.words import bad_token_sequences
from ubatch.errors import shown

_MAX_DIGITS = 20
"""Most digits of a token id: Python refuses to parse integers of thousands of digits."""
MAX_ALLOWED_OF_ALL = 2**20
"""Most allowed token ids in a body's list, and most distinct ones times its outputs. Every output's request carries the
list to the engine, which decodes it between steps."""
_OPENAI = {"temperature": 1.0}
"""OpenAI's defaults, where they are not those of `SamplingParams`."""
_MADE = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "logit_bias", "stop_token_ids", "allowed_token_ids"}
"""Parameters that are made from a request's fields, where these are not the values themselves."""
_TAKEN = [each.name for each in fields(SamplingParams) if each.name in GenerationRequest.model_fields.keys() - _MADE]
_PLACES = {
    ("response_format", "json"): "response_format.json_schema.schema",
    **{
        ("structured_outputs", name): f"structured_outputs.{name}"
        for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern")
    },
}
"""(a body's field, the parameter that it became) -> what to call it in a message."""


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

    `limits` has the request's grammar (`output_grammar`), and its allowed and forbidden tokens (`allowed_tokens`).
    """
    _check_top(service, request)
    vocab_size = service.engine.info.vocab_size
    own = {name: value for name in _TAKEN if (value := getattr(request, name)) is not None}
    stop_token_ids = tuple(request.stop_token_ids or ())
    service.check_token_ids(stop_token_ids, "stop_token_ids")
    params = replace(
        limits,
        **{**_OPENAI, **service.defaults, **own, "max_tokens": max_tokens},
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
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


async def output_grammar(
    service: Service,
    body: GenerationRequest,
    *,
    forced: StructuredOutputsParams | None = None,
    after: After | None = None,
) -> str | None:
    """The grammar of a body's outputs, once it was tried; None if it asks for no form.

    Args:
        forced: a form that other fields ask for (`tool_choice`); it goes before the body's own.
        after: what the output may begin with: the reasoning.

    Raises:
        RequestError, ApiError: the form is not valid, or cannot be enforced.
        QueueFull: too many grammars wait to be tried.
    """
    asked = asked_form(body)
    field = "structured_outputs" if body.response_format is None else "response_format"
    if forced is not None:
        field, asked = "tools", forced
    if asked is None:
        return None
    try:
        grammar = await service.grammars.grammar(asked, after)
        service.observer.grammar("taken")
        return grammar
    except RequestError as error:
        service.observer.grammar("refused")
        param = _PLACES.get((field, error.param or ""), field)
        raise RequestError(f"{param}: {error}", param=param) from error


def asked_form(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form that the body's fields ask for, if any; not checked yet.

    Raises:
        RequestError, ApiError: it asks for none rightly, or for several.
    """
    given = {} if body.structured_outputs is None else body.structured_outputs.model_dump(by_alias=True)
    given = {name: value for name, value in given.items() if value is not None}
    wanted = body.response_format
    if not given:
        return None if wanted is None else _form(wanted)
    if wanted is not None and wanted.type != "text":
        message = "response_format and structured_outputs both say what the output must be; send one of them."
        raise ApiError(400, message, param="structured_outputs")
    return StructuredOutputsParams(**given)


def _form(wanted: ResponseFormat) -> StructuredOutputsParams | None:
    tags = {name: getattr(wanted, name) for name in ("structures", "triggers", "format")}
    tags = {name: value for name, value in tags.items() if value is not None}
    for name, kind in (("json_schema", "json_schema"), *((name, "structural_tag") for name in tags)):
        if getattr(wanted, name) is not None and wanted.type != kind:
            message = f"response_format has {name}, which is only for the type {kind!r}, not {wanted.type!r}."
            raise ApiError(400, message, param=f"response_format.{name}")
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            if wanted.json_schema is None:
                raise ApiError(400, "response_format.json_schema is missing.", param="response_format.json_schema")
            return StructuredOutputsParams(json=wanted.json_schema.schema_)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=tags)
