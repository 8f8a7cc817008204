"""From what a user asks for to the text of a grammar for llguidance, and what may come before it: the reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model_runner import RequestError
from serving.structured.limits import MAX_TEXT_BYTES
from serving.structured.params import StructuredOutputsParams
from serving.structured.tags import structural_tag
from serving.structured.writing import ANYTHING, Grammars, check_size, parsed, schema_text


@dataclass(frozen=True)
class Preamble:
    """Text between two marks.

    Attributes:
        begin: the mark before it, without which there is none.
        end: the mark behind it.
        begun: it has begun already.
    """

    begin: str
    end: str
    begun: bool = False

    def rules(self, form: str, special: Mapping[str, int]) -> str:
        """The grammar's first rules. `special`: the added tokens by their texts; they are no part of texts."""
        number = special.get(self.end)
        if number is None:
            lines = f"before[suffix={json.dumps(self.end)}]: {ANYTHING}"
        else:
            lines = f"before: text <[{number}]>\ntext: {ANYTHING}"
        start = "begin? before" if self.begun else "(begin before)?"
        return f'start: {start} {form}\nbegin: "\\n"? {_mark(self.begin, special)}\n{lines}'


@dataclass(frozen=True)
class Messages:
    """Messages of harmony: any of analysis, and then the final one, which is the form."""

    def rules(self, form: str, special: Mapping[str, int]) -> str:
        """See `Preamble`.

        Raises:
            RequestError: the tokenizer does not have harmony's marks.
        """
        names = ("start", "channel", "message", "end")
        if missing := [name for name in names if f"<|{name}|>" not in special]:
            raise RequestError(f"the model's tokenizer has no special token <|{missing[0]}|>, which harmony needs.")
        start, channel, message, end = (_mark(f"<|{name}|>", special) for name in names)
        return (
            f'start: analysis* {channel} "final" {message} {form}\n'
            f'analysis: {channel} "analysis" {message} text {end} {start} "assistant"\ntext: {ANYTHING}'
        )


def _mark(text: str, special: Mapping[str, int]) -> str:
    number = special.get(text)
    return json.dumps(text) if number is None else f"<[{number}]>"


After = Preamble | Messages


def grammar_text(
    params: StructuredOutputsParams, after: After | None = None, *, special: Mapping[str, int] | None = None
) -> str:
    """The grammar of an output, for `SamplingParams.grammar`.

    It is not tried here: a grammar may still be too large, or fit nothing (`GrammarChecks`).

    Args:
        after: what the output may begin with.
        special: the tokenizer's added tokens by their texts.

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
    return made.text(after.rules(form, special or {}))


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
