"""From what a user asks for to the text of a grammar for llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from model_runner import RequestError
from serving.structured.limits import MAX_TEXT_BYTES
from serving.structured.params import StructuredOutputsParams
from serving.structured.tags import structural_tag
from serving.structured.writing import ANYTHING, Grammars, check_size, parsed, schema_text


def grammar_text(params: StructuredOutputsParams, after: str | None = None, *, after_id: int | None = None) -> str:
    """The grammar of an output, for `SamplingParams.grammar`.

    It is not tried here: a grammar may still be too large, or fit nothing (`GrammarChecks`).

    Args:
        after: the output begins with any text up to this one, such as `</think>`; what was asked for comes then.
        after_id: the token of that text, where it is a special token, which is no part of texts.

    Raises:
        RequestError: what is asked for is not valid, too long, or cannot be enforced. `param` is the field's name, and
            the message does not repeat it.
    """
    made = Grammars()
    kind = params.kind
    try:
        form = _KINDS[kind](made, getattr(params, kind), params)
    except RequestError as error:
        raise RequestError(str(error), param=error.param or kind) from error
    if after is None:
        return made.text(f"start: {form}")
    if after_id is not None:
        return made.text(f"start: before <[{after_id}]> {form}\nbefore: {ANYTHING}")
    return made.text(f"start: before {form}\nbefore[suffix={json.dumps(after)}]: {ANYTHING}")


def _json(made: Grammars, schema: Any, params: StructuredOutputsParams) -> str:
    text = schema if isinstance(schema, str) else schema_text(schema)
    check_size(text, MAX_TEXT_BYTES, "a schema")
    return made.json_schema(parsed(text), params)


_Make = Callable[[Grammars, Any, StructuredOutputsParams], str]
_KINDS: Mapping[str, _Make] = {
    "json": _json,
    "regex": lambda made, asked, params: made.regex(asked),
    "choice": lambda made, asked, params: made.choice(asked),
    "grammar": lambda made, asked, params: made.lark(asked),
    "json_object": lambda made, asked, params: made.json_schema({"type": "object"}, params),
    "structural_tag": structural_tag,
}
