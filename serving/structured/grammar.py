"""From what a user asks for to the text of a grammar for llguidance, and what may come before it: the reasoning.

Structural tags are text with parts that have a form of their own, as vLLM and xgrammar describe them. Two notations are
taken. The older has `structures` (begin, schema, end) and `triggers`; it means the newer one's `triggered_tags`. The
newer is `{"type": "structural_tag", "format": ...}`, where a format is one of `_FORMATS`.

Free text before a tag is a lazy lexeme: it ends where a trigger does, so that a trigger is never part of free text.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model_runner import RequestError
from serving.structured.limits import MAX_DEPTH, MAX_TEXT_BYTES
from serving.structured.params import StructuredOutputsParams
from serving.structured.writing import ANYTHING, Grammars, check_size, parsed, schema_text
from ubatch.errors import shown

MAX_REPEATS = 1000
MAX_PARTS = 4096


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


def structural_tag(made: Grammars, tag: Any, params: StructuredOutputsParams) -> str:
    """The rule of a structural tag.

    Raises:
        RequestError: it is not in one of the notations, or has what is not supported.
    """
    if isinstance(tag, str):
        check_size(tag, MAX_TEXT_BYTES, "a structural tag")
        tag = parsed(tag)
    if not isinstance(tag, Mapping):
        raise RequestError(f"a structural tag is an object, not {shown(tag)}.")
    writer = _Writer(made, params)
    if "structures" in tag:
        return writer.triggered(_older(tag), "")
    if "format" not in tag:
        raise RequestError("a structural tag has a format, or structures and triggers.")
    return writer.format(tag["format"], "format", 0, last=True)


def _older(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    structures = _list(tag, "structures", "")
    tags = []
    for place, each in enumerate(structures):
        where = f"structures.{place}"
        if not isinstance(each, Mapping):
            raise _wrong(where, f"a structure is an object, not {shown(each)}.")
        content = {"type": "json_schema", "json_schema": each.get("schema")}
        tags.append({"type": "tag", "begin": _text(each, "begin", where), "content": content, "end": each.get("end")})
    return {"triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Writes formats as rules."""

    def __init__(self, made: Grammars, params: StructuredOutputsParams) -> None:
        self._made = made
        self._params = params
        self._parts = 0

    def format(self, given: Any, where: str, depth: int, *, last: bool) -> str:
        """The rule of a format.

        Args:
            last: nothing comes after it, so that it may be free text.
        """
        self._parts += 1
        if depth > MAX_DEPTH or self._parts > MAX_PARTS:
            raise RequestError(f"it has more than {MAX_DEPTH} levels or {MAX_PARTS} parts.")
        if not isinstance(given, Mapping):
            raise _wrong(where, f"a format is an object, not {shown(given)}.")
        kind = given.get("type")
        if kind == "any_text":
            _only(given, where, "type")
            if not last:
                raise _wrong(where, "any_text is only supported as a tag's whole content, and at the very end.")
            return self._made.rule(ANYTHING)
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise _wrong(where, f"the type {shown(kind)} is not supported; it may be any_text, {', '.join(_FORMATS)}.")
        write, *names = _FORMATS[kind]
        try:
            _only(given, where, "type", *names)
            return write(self, given, where, depth, last)
        except RequestError as error:
            raise error if str(error).startswith(where) else _wrong(where, str(error)) from error

    def tag(self, given: Any, where: str, depth: int, *, without: str = "") -> str:
        """What a tag writes, but for the beginning `without`, as the body of a rule."""
        if not isinstance(given, Mapping) or given.get("type", "tag") != "tag":
            raise _wrong(where, f"a tag is an object with begin, content and end, not {shown(given)}.")
        _only(given, where, "type", "begin", "content", "end")
        begin = _text(given, "begin", where).removeprefix(without)
        ends = given.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise _wrong(where, "a tag's end is a text or a list of texts.")
        end = " | ".join(map(_quoted, ends))
        content = given.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            _only(content, f"{where}.content", "type")
            inner = self._made.rule(ANYTHING, options=f"[suffix={self._made.rule(end, terminal=True)}]")
            return f"{_quoted(begin)} {inner}"
        inner = self.format(content, f"{where}.content", depth + 1, last=False)
        return f"{_quoted(begin)} {inner} ({end})"

    def triggered(self, given: Mapping[str, Any], where: str, depth: int = 0, last: bool = True) -> str:
        """Free text, in which each trigger begins a tag."""
        triggers, tags = _list(given, "triggers", where), _list(given, "tags", where)
        if not all(isinstance(each, str) and each for each in triggers):
            raise _wrong(where, "triggers are texts that are not empty.")
        if not last and not given.get("stop_after_first"):
            raise _wrong(where, "triggered_tags is only supported at the very end, or with stop_after_first.")
        options: dict[str, list[str]] = {}
        for place, tag in enumerate(tags):
            inside = f"{where}.tags.{place}" if where else f"structures.{place}"
            begin = _text(tag, "begin", inside) if isinstance(tag, Mapping) else ""
            begun = [each for each in triggers if begin.startswith(each)]
            if len(begun) != 1:
                raise _wrong(inside, f"begin {shown(begin)} must begin with exactly one of the triggers.")
            options.setdefault(begun[0], []).append(self.tag(tag, inside, depth + 1, without=begun[0]))
        made = self._made
        calls = []
        for trigger, bodies in options.items():
            text = made.rule(f"{ANYTHING} {_quoted(trigger)}", terminal=True)
            calls.append(f"{made.rule(text, options='[lazy]')} ({' | '.join(bodies)})")
        call = made.rule(" | ".join(calls))
        if given.get("stop_after_first"):
            return call if given.get("at_least_one") else made.rule(f"{call} | {made.rule(ANYTHING)}")
        return made.rule(f"{call}{'+' if given.get('at_least_one') else '*'} {made.rule(ANYTHING)}")

    def several(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """Tags with a separator between them."""
        tags = _list(given, "tags", where)
        bodies = [self.tag(tag, f"{where}.tags.{place}", depth + 1) for place, tag in enumerate(tags)]
        one = self._made.rule(" | ".join(bodies))
        more = "" if given.get("stop_after_first") else f" ({_quoted(_text(given, 'separator', where))} {one})*"
        body = f"{one}{more}"
        return self._made.rule(body if given.get("at_least_one") else f"({body})?")

    def elements(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """Formats one after the other, or one of several."""
        several = _list(given, "elements", where)
        in_turn = given["type"] == "sequence"
        rules: list[str] = []
        for place, each in enumerate(several):
            ends = last and (not in_turn or place == len(several) - 1)
            rules.append(self.format(each, f"{where}.elements.{place}", depth + 1, last=ends))
        return self._made.rule((" " if in_turn else " | ").join(rules))

    def repeated(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """A format that may come several times, or not at all."""
        kind = given["type"]
        inner = self.format(given.get("content"), f"{where}.content", depth + 1, last=False)
        if kind != "repeat":
            return self._made.rule(f"{inner}{ {'optional': '?', 'plus': '+', 'star': '*'}[kind] }")
        least, most = given.get("min"), given.get("max")
        whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (least, most))
        if not whole or not 0 <= least <= MAX_REPEATS or not (most == -1 or least <= most <= MAX_REPEATS):  # type: ignore[operator]
            raise _wrong(where, f"min and max are integers from 0 to {MAX_REPEATS}; max may be -1 for no limit.")
        return self._made.rule(f"{inner}{{{least},{'' if most == -1 else most}}}")

    def const(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """A text as it is."""
        return self._made.rule(_quoted(_text(given, "value", where)))

    def schema(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """JSON that a schema describes."""
        if given.get("style", "json") != "json":
            raise _wrong(where, f"the style {shown(given['style'])} is not supported; only json is.")
        return self._made.json_schema(given.get("json_schema"), self._params)

    def regex(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """What a regular expression matches."""
        return self._made.regex(given.get("pattern"))

    def grammar(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """What a grammar describes."""
        return self._made.lark(given.get("grammar"))

    def one_tag(self, given: Mapping[str, Any], where: str, depth: int, last: bool) -> str:
        """A tag alone."""
        return self._made.rule(self.tag(given, where, depth))


_Write = Callable[[_Writer, Mapping[str, Any], str, int, bool], str]
_FORMATS: Mapping[str, tuple[_Write, *tuple[str, ...]]] = {
    "const_string": (_Writer.const, "value"),
    "json_schema": (_Writer.schema, "json_schema", "style"),
    "regex": (_Writer.regex, "pattern"),
    "grammar": (_Writer.grammar, "grammar"),
    **dict.fromkeys(("sequence", "or"), (_Writer.elements, "elements")),
    "tag": (_Writer.one_tag, "begin", "content", "end"),
    "triggered_tags": (_Writer.triggered, "triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": (_Writer.several, "tags", "separator", "at_least_one", "stop_after_first"),
    **dict.fromkeys(("optional", "plus", "star"), (_Writer.repeated, "content")),
    "repeat": (_Writer.repeated, "content", "min", "max"),
}
"""Type -> what writes the format, and its fields."""


def _only(given: Mapping[str, Any], where: str, *names: str) -> None:
    """Refuse fields of a format that are not done, but for those that ask for nothing."""
    for name, value in given.items():
        if name not in names and value not in (None, [], False):
            raise _wrong(where, f"{shown(name)} is not supported in {shown(given.get('type', 'a tag'))}.")
        if name == "excludes" and value:
            raise _wrong(where, "excludes is not supported.")


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise _wrong(where, f"{name} is a text, not {shown(value)}.")
    return value


def _list(given: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise _wrong(where, f"{name} is a list that is not empty, not {shown(value)}.")
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrong(where: str, message: str) -> RequestError:
    return RequestError(f"{where}: {message}" if where else message)


_Make = Callable[[Grammars, Any, StructuredOutputsParams], str]
_KINDS: Mapping[str, _Make] = {
    "json": _json,
    "regex": lambda made, asked, params: made.regex(asked),
    "choice": lambda made, asked, params: made.choice(asked),
    "grammar": lambda made, asked, params: made.lark(asked),
    "json_object": lambda made, asked, params: made.json_schema({"type": "object"}, params),
    "structural_tag": structural_tag,
}
