"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from model_runner import CheckpointError, RequestError, SamplingParams
from model_runner.weights import read_json
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import GenerationRequest
from serving.api.service import Service
from ubatch import ConfigError
from ubatch.errors import shown

_FILE = "generation_config.json"
_MAX_DIGITS = 20
"""Most digits of a token id: Python refuses to parse integers of thousands of digits."""


_OPENAI = {"temperature": 1.0}
"""OpenAI's defaults, where they are not those of `SamplingParams`."""
_MADE = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "logit_bias", "stop_token_ids", "allowed_token_ids"}
"""Parameters that are made from a request's fields, where these are not the values themselves."""
_TAKEN = [each.name for each in fields(SamplingParams) if each.name in GenerationRequest.model_fields.keys() - _MADE]
_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters for which a checkpoint may have its own default; besides `max_tokens`, which it calls `max_new_tokens`."""


def request_defaults(model: Path, source: str = "auto", override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The sampling parameters of requests that leave them out.

    Args:
        model: folder of the checkpoint.
        source: `--generation-config`: `auto` for the checkpoint's, `vllm` for none, or another folder.
        override: `--override-generation-config`, entries as in `generation_config.json` that go before those.

    Raises:
        ConfigError: a file cannot be read, is not there, or has a value that cannot work; or so has the override.
    """
    found: dict[str, Any] = {}
    if source == "auto":
        found = checkpoint_defaults(model)
    elif source != "vllm":
        if not (Path(source) / _FILE).is_file():
            raise ConfigError(f"--generation-config {shown(source)}: there is no {_FILE}. Give auto, vllm or a folder.")
        found = checkpoint_defaults(Path(source))
    given = override or {}
    if unknown := sorted(given.keys() - {*_DEFAULTED, "max_new_tokens"}):
        known = ", ".join((*_DEFAULTED, "max_new_tokens"))
        raise ConfigError(f"--override-generation-config has {shown(unknown[0])}; it may have {known}.")
    return found | _defaults_in(given, "--override-generation-config")


def checkpoint_defaults(model: Path) -> dict[str, Any]:
    """The sampling parameters in the folder's `generation_config.json`, read as vLLM does (`do_sample` is ignored).

    Raises:
        ConfigError: the file cannot be read, or has a value that cannot work.
    """
    file = model / _FILE
    if not file.is_file():
        return {}
    try:
        return _defaults_in(read_json(file), str(file))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _defaults_in(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = {name: found[name] for name in _DEFAULTED if found.get(name) is not None}
    if found.get("max_new_tokens") is not None:
        own["max_tokens"] = found["max_new_tokens"]
    try:
        SamplingParams(**own)
    except RequestError as error:
        reason = str(error).replace("max_tokens", "max_new_tokens")  # its name in the file
        raise ConfigError(f"{where} cannot be used: {reason}") from error
    return own


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
