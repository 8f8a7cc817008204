"""Adds to `/openapi.json` what FastAPI cannot derive from routes and models: this server's model names and limits."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from serving.api.allowed_tokens import MAX_ALLOWED_OF_ALL
from serving.api.http.routes import STREAMED
from serving.api.service import Service

GENERATING = ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest")


def complete_description(app: FastAPI, open_paths: Collection[str]) -> None:
    """Make the application's `/openapi.json` complete.

    Args:
        app: its `state.service` is read when the description is first requested.
        open_paths: paths that need no API key.
    """
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(described(), app.state.service, open_paths)
        return described()

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(description: dict[str, Any], service: Service, open_paths: Collection[str]) -> None:
    schemas = description["components"]["schemas"]
    models = [(chunk, "serialization") for chunk in STREAMED]
    _, chunks = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    for name, definition in chunks["$defs"].items():
        schemas.setdefault(name, definition)
    for path in open_paths & description["paths"].keys():
        for operation in description["paths"][path].values():
            operation.pop("security", None)
    for path in description["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"]["enum"] = list(service.names)
    for name in (*GENERATING, "TokenizeRequest", "DetokenizeRequest"):
        _add_limits(schemas[name]["properties"], service)


def _add_limits(properties: dict[str, Any], service: Service) -> None:
    """Add the model's names, vocabulary size and context length, and the most outputs of one request."""
    info = service.engine.info
    properties["model"]["enum"] = [None, *service.names]
    for field in ("prompt", "tokens", "stop_token_ids", "allowed_token_ids"):
        for item in _items(properties.get(field, {})):
            if item.get("type") == "integer":
                item |= {"minimum": 0, "maximum": info.vocab_size - 1}
    for kind in _kinds(properties, "array", "allowed_token_ids"):
        kind["maxItems"] = MAX_ALLOWED_OF_ALL
    for kind in _kinds(properties, "integer", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        kind["maximum"] = info.max_model_len - 1
    for kind in _kinds(properties, "integer", "seed", "top_k", "priority"):  # FastAPI rounds bounds, as floats
        kind |= {"minimum": max(int(kind["minimum"]), -(2**63)), "maximum": 2**63 - 1}
    for kind in _kinds(properties, "integer", "logprobs", "top_logprobs", "prompt_logprobs"):
        kind["maximum"] = service.max_logprobs
    for kind in _kinds(properties, "object", "logit_bias"):
        kind["propertyNames"] = {"pattern": f"^({_up_to(info.vocab_size - 1)})$"}
        kind["additionalProperties"] = {"type": "number", "minimum": -100, "maximum": 100}
    if "n" not in properties:
        return
    for kind in _kinds(properties, "array", "prompt"):
        if service.max_outputs_per_request is not None and kind["items"]["type"] != "integer":
            kind["maxItems"] = service.max_outputs_per_request
    if not service.tokenizer.encode(""):
        for text in (*_kinds(properties, "string", "prompt"), *_items(properties.get("prompt", {}))):
            if text["type"] == "string":
                text["minLength"] = 1


def _kinds(properties: dict[str, Any], kind: str, *names: str) -> Iterator[dict[str, Any]]:
    """The alternatives of some fields' schemas with type `kind`."""
    for schema in (properties.get(name, {}) for name in names):
        yield from (one for one in (*schema.get("anyOf", ()), schema) if one.get("type") == kind)


def _items(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Schemas of the items of a field's lists, nested lists included."""
    for kind in _kinds({"": schema}, "array", ""):
        yield kind["items"]
        yield from _items(kind["items"])


def _up_to(most: int) -> str:
    """A regular expression for the numbers from 0 to `most`, without leading zeros."""
    digits = str(most)
    options = [f"[1-9][0-9]{{{length - 1}}}" for length in range(1, len(digits))]
    for place, digit in enumerate(digits):
        least = 1 if place == 0 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            options.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{rest}}}")
    return "|".join(["0", *options, digits]) if most else "0"
