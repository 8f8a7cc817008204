"""What each family's models write, read whole and cut at every character: content, reasoning and calls.

The outputs are written for these tests, in the forms that the families' chat templates show.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from serving.turns.formats.in_sections import DEEPSEEK, DEEPSEEK_V3, SEPARATOR
from serving.turns.marked import ToolCallDelta, TurnDelta
from serving.turns.parsers import TOOL_PARSERS, Before, TurnPlan, TurnSettings, make_turn_parser

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/Place"},
            "tags": {"type": ["array", "null"]},
            "unit": {"enum": ["c", "f"]},
            "level": {"enum": [1, 2]},
        },
        "$defs": {"Place": {"type": "object"}},
    },
    "write": {"type": "object", "properties": {"text": {"type": "string"}}},
    "now": {},
}
PARIS: dict[str, Any] = {"city": "Paris"}
HARD: dict[str, Any] = {
    "text": 'a "b" \\ {c} [d] </tool_call> é 漢 🎉\n\tx',
    "n": -1.5e-3,
    "deep": {"x": [[], {}, None]},
}
HARD_JSON = json.dumps(HARD)
DEEP_JSON = '{"text":' + "[" * 199 + "]" * 199 + "}"
HARD_TEXT = json.dumps(HARD, ensure_ascii=False)


@dataclass(frozen=True)
class Row:
    """An output, and what it says.

    Attributes:
        calls: names and arguments; the arguments as text where every character counts.
    """

    parser: str | None
    text: str
    content: str = ""
    calls: Sequence[tuple[str, Any]] = ()
    reasoning: str = ""
    reasoner: str | None = None
    prompt: str = ""
    continued: str | None = None
    plan: TurnPlan = field(default_factory=lambda: TurnPlan(TOOLS))
    hidden: tuple[str, ...] = ()


def ds(*calls: tuple[str, str], v3: bool = True) -> str:
    """A section of DeepSeek's calls."""
    form = "{call}function{sep}{name}\n```json\n{json}\n```{end}" if v3 else "{call}{name}{sep}{json}{end}"
    marks = {"call": DEEPSEEK.call, "sep": SEPARATOR, "end": DEEPSEEK.call_end}
    written = "\n".join(form.format(**marks, name=name, json=text) for name, text in calls)
    return f"{DEEPSEEK.begin}{written}{DEEPSEEK.end}"


def kimi(*calls: tuple[str, str]) -> str:
    """A section of Kimi's calls."""
    form = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    written = "".join(form.format(*each) for each in calls)
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def glm(name: str, **values: str) -> str:
    """A call of GLM's."""
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def coder(name: str, **values: str) -> str:
    """A call of Qwen3-Coder's."""
    pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


WEATHER, NOW = ("get_weather", PARIS), ("now", {})
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
VALUES = {"city": "Paris", "days": "3", "exact": "True", "share": "null", "place": '{"x": [1]}', "tags": "None"}
TYPED = {"city": "Paris", "days": 3, "exact": True, "share": None, "place": {"x": [1]}, "tags": None}
OTHERS = {"days": "soon", "exact": "TRUE", "share": "NaN", "place": "[1]", "unit": "c", "level": "2", "other": "7"}
OTHERS_TYPED = {**OTHERS, "exact": True, "level": 2}
CODE = 'if a < b:\n    print("\\t</p>")\n\n'
ANALYSIS = "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant"
TO_WEATHER = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
REQUIRED = TurnPlan(TOOLS, forced=True)
NAMED = TurnPlan(TOOLS, forced="get_weather")

GOOD: Mapping[str, Row] = {
    "hermes": Row("hermes", HERMES, calls=[WEATHER]),
    "hermes: text around": Row("hermes", f"Hm.\n{HERMES}\nand\n{HERMES_NOW}\n ok", "Hm.\n\nand\n\n ok", [WEATHER, NOW]),
    "hermes: in parallel": Row("hermes", f"\n\n{HERMES}\n{HERMES_NOW}\n", calls=[WEATHER, NOW]),
    "hermes: one only": Row("hermes", HERMES + HERMES_NOW, calls=[WEATHER], plan=TurnPlan(TOOLS, parallel=False)),
    "hermes: no end mark": Row("hermes", HERMES.removesuffix("\n</tool_call>"), calls=[WEATHER]),
    "hermes: arguments first": Row(
        "hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', calls=[WEATHER]
    ),
    "hermes: arguments as text": Row(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=[WEATHER],
    ),
    "hermes: no arguments": Row("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=[NOW]),
    "hermes: null arguments": Row("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[NOW]),
    "hermes: other members": Row(
        "hermes", '<tool_call>{"id": [1, "}"], "name": "now", "arguments": {}, "x": true}</tool_call>', calls=[NOW]
    ),
    "hermes: hard": Row(
        "hermes", f'<tool_call>{{"name": "write", "arguments": {HARD_JSON}}}</tool_call>', calls=[("write", HARD_JSON)]
    ),
    "hermes: unicode": Row(
        "hermes",
        f'é🎉<tool_call>{{"name": "write", "arguments": {HARD_TEXT}}}</tool_call>漢',
        "é🎉漢",
        [("write", HARD_TEXT)],
    ),
    "hermes: a mark in text": Row("hermes", "I write <tool_cal and <tool", "I write <tool_cal and <tool"),
    "qwen3_coder": Row("qwen3_coder", coder("get_weather", city="Paris"), calls=[WEATHER]),
    "qwen3_coder: none": Row("qwen3_coder", f"Now:\n{coder('now')}", "Now:\n", [NOW]),
    "qwen3_coder: typed": Row("qwen3_coder", coder("get_weather", **VALUES), calls=[("get_weather", TYPED)]),
    "qwen3_coder: wrong types": Row(
        "qwen3_coder", coder("get_weather", **OTHERS), calls=[("get_weather", OTHERS_TYPED)]
    ),
    "qwen3_coder: code": Row("qwen3_coder", coder("write", text=CODE), calls=[("write", {"text": CODE})]),
    "qwen3_coder: one line": Row(
        "qwen3_coder",
        "<function=write><parameter=text>a\n\n</parameter></function>",
        calls=[("write", {"text": "a\n"})],
    ),
    "qwen3_coder: in parallel": Row(
        "qwen3_coder", f"{coder('get_weather', city='Paris')}\n{coder('now')}\nDone", "\nDone", [WEATHER, NOW]
    ),
    "glm45": Row("glm45", glm("get_weather", city="Paris"), calls=[WEATHER]),
    "glm45: typed": Row("glm45", f"Ja.{glm('get_weather', **VALUES)}", "Ja.", [("get_weather", TYPED)]),
    "glm45: wrong types": Row("glm45", glm("get_weather", **OTHERS), calls=[("get_weather", OTHERS_TYPED)]),
    "glm45: code": Row("glm45", glm("write", text=CODE), calls=[("write", {"text": CODE})]),
    "glm45: as GLM-4.7": Row(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call><tool_call>now</tool_call>",
        calls=[WEATHER, NOW],
    ),
    "llama3_json": Row("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=[WEATHER]),
    "llama3_json: several": Row(
        "llama3_json",
        '\n{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "arguments": {}}',
        calls=[WEATHER, NOW],
    ),
    "llama3_json: marked": Row(
        "llama3_json", 'So:<|python_tag|>{"name": "now", "parameters": {}}', "So:", [NOW], hidden=("<|python_tag|>",)
    ),
    "llama3_json: an answer in JSON": Row(
        "llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}'
    ),
    "mistral: a list": Row(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        calls=[WEATHER, NOW],
    ),
    "mistral": Row(
        "mistral", 'Ja[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now{}', "Ja", [WEATHER, NOW]
    ),
    "mistral: with ids": Row("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}", calls=[NOW]),
    "granite": Row(
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        calls=[WEATHER],
        hidden=("<|tool_call|>",),
    ),
    "granite: 3.1": Row("granite", '<tool_call> [ {"name": "now", "arguments": {}} ]', calls=[NOW]),
    "granite: no mark": Row("granite", '[{"name": "now", "arguments": {}}]', calls=[NOW]),
    "granite: an answer in JSON": Row("granite", '[{"name": "Bob"}]', '[{"name": "Bob"}]'),
    "deepseek_v3": Row(
        "deepseek_v3", ds(("get_weather", '{"city": "Paris"}')), calls=[WEATHER], hidden=DEEPSEEK_V3.marks
    ),
    "deepseek_v3: several": Row(
        "deepseek_v3", f"Ok.{ds(('get_weather', HARD_JSON), ('now', '{}'))}!", "Ok.!", [("get_weather", HARD_JSON), NOW]
    ),
    "deepseek_v31": Row("deepseek_v31", ds(("get_weather", '{"city": "Paris"}'), v3=False), calls=[WEATHER]),
    "deepseek_v31: 200 levels": Row("deepseek_v31", ds(("write", DEEP_JSON), v3=False), calls=[("write", DEEP_JSON)]),
    "deepseek_v31: several": Row(
        "deepseek_v31", f"Ok.{ds(('now', '{}'), ('write', HARD_JSON), v3=False)}", "Ok.", [NOW, ("write", HARD_JSON)]
    ),
    "kimi_k2": Row("kimi_k2", kimi(("functions.get_weather:0", '{"city": "Paris"}')), calls=[WEATHER]),
    "kimi_k2: several": Row(
        "kimi_k2",
        f"Ok. {kimi(('functions.now:3', '{}'), ('functions.write:4', HARD_TEXT))}",
        "Ok. ",
        [NOW, ("write", HARD_TEXT)],
    ),
    "openai": Row("openai", "<|channel|>final<|message|>Hi {} <b|> 漢<|return|>", "Hi {} <b|> 漢"),
    "openai: reasoning": Row("openai", f"{ANALYSIS}<|channel|>final<|message|>Hi", "Hi", reasoning="They ask."),
    "openai: a call": Row("openai", ANALYSIS + TO_WEATHER, calls=[WEATHER], reasoning="They ask."),
    "openai: a preamble": Row(
        "openai",
        f"{ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{TO_WEATHER}",
        "I look.",
        [WEATHER],
        "They ask.",
    ),
    "openai: recipient first": Row(
        "openai", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", calls=[NOW]
    ),
    "openai: no channel": Row("openai", "today", "today"),
    "openai: for its reasoning": Row(
        None, f"{ANALYSIS}<|channel|>final<|message|>Hi", "Hi", reasoning="They ask.", reasoner="openai_gptoss"
    ),
    "qwen3": Row(
        None, "<think>\nHm <b> </thin\n</think>\n\nHi", "\n\nHi", reasoning="\nHm <b> </thin\n", reasoner="qwen3"
    ),
    "qwen3: none": Row(None, "  Hi <think>x</think>", "  Hi <think>x</think>", reasoner="qwen3"),
    "qwen3: begun by the prompt": Row(
        None, "Hm</think>Hi", "Hi", reasoning="Hm", reasoner="qwen3", prompt="assistant\n<think>\n"
    ),
    "qwen3: ended by the prompt": Row(
        None, "Hi</think>", "Hi</think>", reasoner="qwen3", prompt="<think>\n\n</think>\n\n"
    ),
    "qwen3: without an end": Row(None, "<think>Hm", reasoning="Hm", reasoner="qwen3"),
    "qwen3: continued reasoning": Row(
        None, " and</think>Hi", "Hi", reasoning=" and", reasoner="qwen3", prompt="<think>Hm", continued="<think>Hm"
    ),
    "qwen3: then a call": Row(
        "hermes",
        f"<think>\n<tool_call>?</think>\n\n{HERMES}",
        reasoning="\n<tool_call>?",
        calls=[WEATHER],
        reasoner="qwen3",
    ),
    "qwen3: not separated": Row(
        None, "<think>Hm</think>Hi", "<think>Hm</think>Hi", reasoner="qwen3", plan=TurnPlan(TOOLS, reasoning=False)
    ),
    "deepseek_r1": Row(None, "\nHm\n</think>\n\nHi", "\n\nHi", reasoning="\nHm\n", reasoner="deepseek_r1"),
    "deepseek_r1: with its mark": Row(None, "<think>\nHm</think>Hi", "Hi", reasoning="\nHm", reasoner="deepseek_r1"),
    "deepseek_r1: continued answer": Row(None, " you", " you", reasoner="deepseek_r1", continued="Hi"),
    "deepseek_r1: no end": Row(None, "Hm", reasoning="Hm", reasoner="deepseek_r1"),
    "glm45 reasoning": Row(
        "glm45", f"\n<think>Hm</think>\n{glm('now')}", reasoning="Hm", calls=[NOW], reasoner="glm45"
    ),
    "required": Row(
        "hermes",
        ' [{"name": "get_weather", "parameters": {"city": "Paris"}},\n{"name": "now", "parameters": {}}] ',
        calls=[WEATHER, NOW],
        plan=REQUIRED,
    ),
    "named": Row(None, ' {"city": "Paris"}\n', calls=[WEATHER], plan=NAMED),
    "named: after reasoning": Row(
        None, '<think>Hm</think>\n{"city": "Paris"}', calls=[WEATHER], reasoning="Hm", reasoner="qwen3", plan=NAMED
    ),
    "no tools": Row("hermes", HERMES, HERMES, plan=TurnPlan({})),
}

NOW_CALL = '<tool_call>{{"name": "now", "arguments": {}}}</tool_call>'.format
_BROKEN: Mapping[str, Mapping[str, str]] = {
    "hermes": {
        "cut in the mark": "So <tool_c",
        "cut in the name": 'So <tool_call>{"name": "get_w',
        "cut in the arguments": HERMES[:60],
        "cut in an escape": '<tool_call>{"name": "now", "arguments": {"a": "\\u00',
        "no name": '<tool_call>{"arguments": {}}</tool_call>',
        "no JSON": "<tool_call>now()</tool_call>",
        "single quotes": "<tool_call>{'name': 'now'}</tool_call>",
        "a list": NOW_CALL("[1]"),
        "a wrong literal": NOW_CALL('{"a": tru}'),
        "a comma": NOW_CALL('{"a": 1,}'),
        "a line end": NOW_CALL('{"a": "\n"}'),
        "too deep": NOW_CALL('{"a":' * 300),
    },
    "qwen3_coder": {
        "cut": coder("write", text="abc")[:50],
        "no function": "<tool_call>\n{}\n</tool_call>",
        "no name": "<tool_call><function=></function>",
        "a question": "Use <function= in\nXML>",
    },
    "glm45": {"cut": glm("get_weather", city="Paris")[:60], "prose": "<tool_call>I would call it\n"},
    "llama3_json": {"cut": '{"name": "now", "parameters": {', "no arguments": '{"name": "now"}'},
    "mistral": {"cut": 'So[TOOL_CALLS][{"name": "now", "argu', "no arguments": "[TOOL_CALLS]now[ARGS]"},
    "granite": {"cut": '<|tool_call|>[{"name": "now"'},
    "deepseek_v3": {"cut": ds(("now", '{"a": 1}'))[:70]},
    "deepseek_v31": {"no JSON": ds(("now", "a=1"), v3=False)},
    "kimi_k2": {"cut": kimi(("functions.now:0", '{"a": 1}'))[:90]},
    "openai": {"cut": TO_WEATHER[:-15], "cut in a header": "<|channel|>comm"},
}
BROKEN: Mapping[str, Row] = {
    **{f"{parser}: {name}": Row(parser, text, text) for parser, rows in _BROKEN.items() for name, text in rows.items()},
    "a good one after it": Row("hermes", f"<tool_call>{{{HERMES}", "<tool_call>{", [WEATHER]),
    "a good one before it": Row("hermes", f"{HERMES}\n<tool_call>{{", "\n<tool_call>{", [WEATHER]),
    "a list's second": Row("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"na', ', {"na', [NOW]),
    **{
        f"forced: {text}": Row(None, text, text, plan=plan)
        for plan, texts in (
            (REQUIRED, ('[{"name": "now", "parameters": {"a', "I would rather not.")),
            (NAMED, ('{"city": "Par', "")),
        )
        for text in texts
    },
}


def parser_of(row: Row, *, streamed: bool) -> Any:
    return make_turn_parser(
        TurnSettings(True, row.parser, row.reasoner),
        row.plan,
        before=Before(row.prompt, row.continued),
        streamed=streamed,
        hidden=row.hidden,
    )


def deltas(row: Row, pieces: Sequence[str], *, streamed: bool) -> list[TurnDelta]:
    parser = parser_of(row, streamed=streamed)
    return [*(parser.take(piece) for piece in pieces), parser.finish()]


def put_together(parts: Sequence[TurnDelta]) -> tuple[str, str, list[tuple[str, str]]]:
    """As clients do it; every delta must be one that they understand."""
    calls: list[tuple[str, str]] = []
    for part in (call for each in parts for call in each.tool_calls):
        if part.name is not None:
            assert part == ToolCallDelta(len(calls), part.id, part.name)
            assert part.id
            calls.append((part.name, ""))
        else:
            assert part.index == len(calls) - 1
            assert part.id is None
            assert part.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return "".join(each.content for each in parts), "".join(each.reasoning for each in parts), calls


def cuts(text: str) -> list[list[str]]:
    """The text whole, in single characters, and in two pieces cut at every place (in the first ones of a long text)."""
    last = len(text) if len(text) < 400 else 100
    return [[text], list(text), *([text[:place], text[place:]] for place in range(1, last))]


@pytest.mark.parametrize("name", GOOD)
def test_what_an_output_says(name: str) -> None:
    row = GOOD[name]
    for streamed in (True, False):
        for pieces in cuts(row.text)[: None if streamed else 2]:
            content, reasoning, calls = put_together(deltas(row, pieces, streamed=streamed))
            assert (content, reasoning) == (row.content, row.reasoning), pieces
            assert [called for called, _ in calls] == [called for called, _ in row.calls], pieces
            for (_, arguments), (_, wanted) in zip(calls, row.calls, strict=True):
                assert arguments == wanted if isinstance(wanted, str) else json.loads(arguments) == wanted


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_call_is_text(name: str) -> None:
    row = BROKEN[name]
    for pieces in cuts(row.text):
        content, _, calls = put_together(deltas(row, pieces, streamed=False))
        assert content == row.content, pieces
        assert [(called, json.loads(arguments)) for called, arguments in calls] == list(row.calls)
        content, _, begun = put_together(deltas(row, pieces, streamed=True))
        assert content == row.content, pieces
        assert {called for called, _ in row.calls} <= {called for called, _ in begun}


def test_all_formats_have_rows() -> None:
    for rows in (GOOD, BROKEN):
        assert {row.parser for row in rows.values()} - {None} == TOOL_PARSERS.keys()


@pytest.mark.parametrize("name", [name for name, row in GOOD.items() if "hard" in name or row.text.count("\\") > 5])
def test_arguments_come_as_they_are_written(name: str) -> None:
    row = GOOD[name]
    parts = [call.arguments for each in deltas(row, list(row.text), streamed=True) for call in each.tool_calls]
    assert len([part for part in parts if part]) > len(HARD_JSON) / 2
    held = [call.arguments for each in deltas(row, list(row.text), streamed=False) for call in each.tool_calls]
    assert len([part for part in held if part]) <= 2


@pytest.mark.parametrize(
    ("parser", "text", "ids"),
    [
        ("hermes", HERMES + HERMES, "call_[0-9a-f]{24}"),
        ("mistral", "[TOOL_CALLS]now{}[TOOL_CALLS]now{}", "[0-9A-Za-z]{9}"),
        ("kimi_k2", kimi(("functions.now:7", "{}"), ("functions.now:8", "{}")), "functions.now:[78]"),
    ],
)
def test_ids(parser: str, text: str, ids: str) -> None:
    for plan in (TurnPlan(TOOLS), TurnPlan(TOOLS, forced=True, num_calls=7)):
        said = '[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]' if plan.forced else text
        made = [
            call.id for each in deltas(Row(parser, said, plan=plan), [said], streamed=True) for call in each.tool_calls
        ]
        found = [each for each in made if each is not None]
        assert len(set(found)) == 2
        assert all(re.fullmatch(ids, each) for each in found), found


def test_marks_that_are_special_tokens_are_no_content() -> None:
    row = Row("deepseek_v31", f"a{DEEPSEEK.end}b{DEEPSEEK.call}c", "abc", hidden=DEEPSEEK_V3.marks)
    for pieces in cuts(row.text):
        assert put_together(deltas(row, pieces, streamed=True))[0] == "abc"


@pytest.mark.long
def test_long_outputs_take_time_that_grows_with_their_length() -> None:
    """No reader looks again at what it has read, whatever a model is made to write."""
    begun = '<tool_call>{"name": "now", "arguments": {"a": "'
    for text in (
        begun * 4000,
        begun + "x" * 200_000,
        "<tool_cal" * 20_000,
        "<tool_call>" + "[" * 100_000,
        "{" * 100_000,
    ):
        content, _, _ = put_together(deltas(Row("hermes", text), [text], streamed=False))
        assert content == text
        put_together(deltas(Row("hermes", text[:20_000]), list(text[:20_000]), streamed=True))
