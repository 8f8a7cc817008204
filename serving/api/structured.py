"""The form that a body asks for, as a grammar for its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_runner import RequestError
from serving.api.schema.errors import ApiError
from serving.api.schema.request_models import GenerationRequest
from serving.api.schema.structured_fields import ResponseFormat

if TYPE_CHECKING:
    from serving.api.service import Service
    from serving.structured import StructuredOutputsParams


async def output_grammar(
    service: Service,
    body: GenerationRequest,
    *,
    forced: StructuredOutputsParams | None = None,
    after: str | None = None,
) -> str | None:
    """The grammar of a body's outputs, once it was tried; None if it asks for no form.

    Args:
        forced: a form that other fields ask for (`tool_choice`); it goes before the body's own.
        after: the output may begin with any text up to this one, such as the end of the reasoning.

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
        return await service.grammars.grammar(asked, after)
    except RequestError as error:
        param = _PLACES.get((field, error.param or ""), field)
        raise RequestError(f"{param}: {error}", param=param) from error


def asked_form(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form that the body's fields ask for, if any; not checked yet.

    Raises:
        RequestError, ApiError: it asks for none rightly, or for several.
    """
    from serving.structured import StructuredOutputsParams

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
    from serving.structured import StructuredOutputsParams

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


_PLACES = {
    ("response_format", "json"): "response_format.json_schema.schema",
    **{
        ("structured_outputs", name): f"structured_outputs.{name}"
        for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern")
    },
}
"""(a body's field, the parameter that it became) -> what to call it in a message."""
