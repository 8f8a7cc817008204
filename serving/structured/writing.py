"""The text of a grammar while it is written: rules, and grammars of their own for JSON and for what users wrote.

A text is `{"grammars": [...]}`: the first has a rule `start` in Lark's notation, the others are what it names with `@`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from model_runner import RequestError
from serving.structured.limits import MAX_REGEX_BYTES, MAX_TEXT_BYTES
from serving.structured.params import StructuredOutputsParams
from serving.structured.patterns import in_slashes, translated
from serving.structured.schema import normalised
from ubatch.errors import shown

WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"
"""White space between JSON's tokens: one blank, or a line's end with an indentation. It is bounded: a model that may
always write more of it may never end."""
ANYTHING = "/(?s:.*)/"
_PIECE = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/)|(?P<comment>//[^\n]*|\#[^\n]*)"""
    r"""|(?P<special><[^>\s]+>)|(?P<name>[A-Za-z_][\w-]*)[ \t]*\[(?P<options>[^\]\n]*)\]""",
    re.VERBOSE,
)
_UNDONE = re.compile(r"\b(max_tokens|temperature|stop|stop_capture)\s*=")
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|start\s*(?:\[[^\]\n]*\])?\s*:(?!:=))")


@dataclass
class Grammars:
    """The grammars of a text while it is made; each method adds one and returns how a rule names it."""

    rules: list[str] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)

    def json_schema(self, schema: Any, params: StructuredOutputsParams) -> str:
        """JSON that a schema describes."""
        form, any_escapes = normalised(schema, closed=params.disable_additional_properties)
        form = {"allOf": [form]} if isinstance(form, bool) else form
        escapes = {"json_allow_general_unicode_escapes": True} if any_escapes else {"json_allowed_escapes": 'nrbtf\\"'}
        return self._other("json_schema", {**form, "x-guidance": {**escapes, **white_space(params)}})

    def regex(self, regex: Any) -> str:
        """A text that a regular expression matches as a whole."""
        if not isinstance(regex, str):
            raise RequestError(f"a regular expression is a text, not {shown(regex)}.")
        check_size(regex, MAX_REGEX_BYTES, "a regular expression")
        return self.rule(in_slashes(translated(regex)), terminal=True)

    def choice(self, choices: Any) -> str:
        """One of some texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise RequestError("choices are a list of at least one text.")
        if not all(isinstance(each, str) for each in choices):
            raise RequestError("choices are texts.")
        check_size("".join(choices), MAX_TEXT_BYTES, "choices")
        check_size(max(choices, key=len), MAX_REGEX_BYTES, "one choice")
        return self.rule(" | ".join(json.dumps(each, ensure_ascii=False) for each in choices), terminal=True)

    def lark(self, grammar: Any) -> str:
        """What a user's grammar describes."""
        if not isinstance(grammar, str):
            raise RequestError(f"a grammar is a text, not {shown(grammar)}.")
        check_size(grammar, MAX_TEXT_BYTES, "a grammar")
        return self._other("lark_grammar", lark_text(grammar))

    def rule(self, body: str, *, terminal: bool = False, options: str = "") -> str:
        """A rule of the first grammar; a terminal is matched as one piece."""
        name = f"{'R' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, start: str) -> str:
        """The whole, with the rule `start`."""
        first = {"lark_grammar": "\n".join((start, *self.rules))}
        return json.dumps({"grammars": [first, *self.others]}, ensure_ascii=False)

    def _other(self, kind: str, content: Any) -> str:
        name = f"g{len(self.others)}"
        self.others.append({"name": name, kind: content})
        return f"@{name}"


def white_space(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options of the white space between JSON's tokens."""
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = WHITESPACE
    if params.whitespace_pattern is not None:
        check_size(params.whitespace_pattern, MAX_REGEX_BYTES, "a regular expression")
        try:
            pattern = translated(params.whitespace_pattern)
        except RequestError as error:
            raise RequestError(str(error), param="whitespace_pattern") from error
    return {"whitespace_pattern": pattern}


def parsed(text: str) -> Any:
    """JSON text that a user gave in place of an object.

    Raises:
        RequestError: it is no JSON.
    """
    with _json_errors():
        return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no value of JSON")


def schema_text(schema: Any) -> str:
    """A schema as JSON.

    Raises:
        RequestError: it is no JSON, or nested too deeply.
    """
    with _json_errors():
        return json.dumps(schema, ensure_ascii=False)


@contextmanager
def _json_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise RequestError("it is nested too deeply.") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"it is no JSON: {error}.") from error


def check_size(text: str, most: int, what: str) -> None:
    """Refuse a text of too many bytes.

    Raises:
        RequestError: it has more than `most`.
    """
    size = len(text.encode(errors="surrogatepass")) if len(text) <= most else len(text)
    if size > most:
        raise RequestError(f"it has {size} bytes; {what} may have at most {most}.")


def lark_text(grammar: str) -> str:
    """A user's grammar in Lark's notation, as llguidance reads it.

    Raises:
        RequestError: it is not in Lark's or GBNF's notation, or asks for what a server does not do.
    """
    if not _LARK.search(grammar):
        grammar = _from_gbnf(grammar)
    for options in _found(grammar, "options"):
        if (undone := _UNDONE.search(options)) is not None:
            raise RequestError(
                f"the option {undone[1]} of a rule is not supported: it does not go with tokens guessed ahead. Use "
                f"lazy or suffix, and the request's own max_tokens, stop and temperature."
            )
    return grammar


def special_tokens(grammar: str) -> list[str]:
    """The special tokens that a Lark grammar names, such as `<|im_end|>`; not those given by their ids (`<[5]>`)."""
    return [name for name in _found(grammar, "special") if not name.startswith("<[")]


def _found(grammar: str, kind: str) -> Iterator[str]:
    return (found[kind] for found in _PIECE.finditer(grammar) if found[kind] is not None)


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if "::=" not in grammar:
        raise RequestError(
            "the grammar needs a rule 'start: ...' (Lark) or 'root ::= ...' (GBNF); it has neither. What it begins "
            f"with is {shown(grammar[:100])}."
        )
    try:
        text: str = gbnf_to_lark(grammar)
    except RecursionError:
        raise RequestError("the grammar is nested too deeply.") from None
    except Exception as error:  # the library raises no narrower type
        raise RequestError(f"the grammar cannot be read as GBNF: {str(error)[:200]}") from error
    return text
