"""The requests of `ubatch bench faults`: half of them streamed, half sampled, each with something that a restart could
break."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serving.workbench.bench.faults.answers import Answer, Asked

_STOP_CHARACTERS = 6
_SCHEMA: Mapping[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}
_ENDLESS: Mapping[str, Any] = {"ignore_eos": True}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": _ENDLESS,
    "stop string": _ENDLESS,
    "logprobs": {**_ENDLESS, "logprobs": 3},
    "two outputs": {**_ENDLESS, "n": 2},
    "penalties": {**_ENDLESS, "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "min_tokens": {},
    "json schema": {"structured_outputs": {"json": _SCHEMA}},
    "truncated": {**_ENDLESS, "top_k": 40, "top_p": 0.9},
}
"""Name -> fields. The stop string and the stop token come from the first answers (`with_stops`)."""


def make_requests(pool: Sequence[int], count: int, max_tokens: int, seed: int = 0) -> list[Asked]:
    """The requests, the same for the same arguments; `pool` has tokens that are plain text.

    Request i is streamed if i is odd, sampled if bit 1 is set, and of kind i // 4; every fourth round of kinds has no
    seed, and asks for log-probabilities, by which it can be checked.
    """
    rng, kinds, made = random.Random(seed), list(KINDS), []
    for index in range(count):
        kind = kinds[index // 4 % len(kinds)]
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, **KINDS[kind]}
        if index & 2:
            fields["temperature"] = 0.8
            unseeded = (index // (4 * len(kinds)) + index // 4) % 4 == 3
            fields |= {"logprobs": 1} if unseeded else {"seed": rng.getrandbits(31)}
        prompt = tuple(rng.choices(pool, k=rng.randint(8, 64)))
        made.append(Asked(kind, prompt, bool(index & 1), fields))
    return made


def with_stops(requests: Sequence[Asked], answers: Sequence[Answer]) -> list[Asked]:
    """The requests, with the stop string or stop token of those that get one, taken from their answers without it: a
    string that ends two thirds of the way, and a token that comes early, but may end the output only after that."""
    return [_with_stop(*pair) for pair in zip(requests, answers, strict=True)]


def _with_stop(asked: Asked, answer: Answer) -> Asked:
    text, tokens = answer.choices[0].text, answer.choices[0].tokens
    more: dict[str, Any] = {}
    if asked.kind == "stop string" and len(text) > _STOP_CHARACTERS:
        begin = len(text) * 2 // 3
        more = {"stop": [text[begin : begin + _STOP_CHARACTERS]]}
    elif asked.kind == "min_tokens" and tokens:
        more = {"stop_token_ids": [tokens[len(tokens) // 4]], "min_tokens": asked.fields["max_tokens"] * 3 // 4}
    return replace(asked, fields={**asked.fields, **more})
