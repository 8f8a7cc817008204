"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

from model_runner import SamplingParams
from serving.api.schema.errors import ApiError, shown
from serving.api.schema.request_models import GenerationRequest
from serving.api.schema.token_ids import check_token_ids
from ubatch import ConfigError

__all__ = ["SamplingDefaults", "sampling_params"]

_MAX_DIGITS = 20
"""Most digits of a token id: Python refuses to parse integers of thousands of digits."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Default sampling parameters: the checkpoint's where it has them, otherwise OpenAI's.

    Attributes:
        temperature: see `SamplingParams`, as for the others.
        top_k: 0 for all tokens.
        top_p: 1 for all tokens.
        min_p: 0 for all tokens.
        repetition_penalty: 1 for none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_checkpoint(cls, model: Path) -> SamplingDefaults:
        """The defaults in the folder's `generation_config.json`, read as vLLM does (`do_sample` is ignored).

        Raises:
            ConfigError: the file cannot be read, or has a value that cannot work.
        """
        file = model / "generation_config.json"
        if not file.is_file():
            return cls()
        try:
            found = json.loads(file.read_text())
            own = {item.name: found[item.name] for item in fields(cls) if found.get(item.name) is not None}
            defaults = cls(**own)
            SamplingParams(**own)
        except (OSError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be used: {error}") from error
        return defaults


def sampling_params(
    request: GenerationRequest,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    limits: SamplingParams,
    vocab_size: int,
) -> list[SamplingParams]:
    """The parameters of each of the request's `n` outputs; output i has the request's seed + i.

    `limits` has the request's allowed and forbidden tokens (`serving.api.token_limits`).

    Raises:
        RequestError, ApiError: for values that cannot work.
    """
    own = {item.name: getattr(request, item.name) for item in fields(defaults)}
    merged = replace(defaults, **{name: value for name, value in own.items() if value is not None})
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_token_ids(stop_token_ids, vocab_size, "stop_token_ids")
    params = SamplingParams(
        temperature=merged.temperature,
        top_k=merged.top_k,
        top_p=merged.top_p,
        min_p=merged.min_p,
        repetition_penalty=merged.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        allowed_token_ids=limits.allowed_token_ids,
        bad_token_sequences=limits.bad_token_sequences,
    )
    seed = request.seed
    return [params if seed is None else replace(params, seed=seed + output) for output in range(request.n or 1)]


def _logit_bias(given: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias: list[tuple[int, float]] = []
    for key, value in given.items():
        if not (len(key) <= _MAX_DIGITS and key.isdecimal() and str(int(key)) == key and int(key) < vocab_size):
            message = f"logit_bias: {shown(key)} is not a token id from 0 to {vocab_size - 1}."
            raise ApiError(400, message, param="logit_bias")
        bias.append((int(key), value))
    return tuple(bias)
