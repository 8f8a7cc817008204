"""The table of `docs/api.md` about `/v1/responses`: what it says works is done, and what it says is refused is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from api_clients import app_with, call, post, says
from fake_engine import FakeEngine
from repository import ROOT

from serving.turns.parsers import TurnSettings

DOCUMENT = ROOT / "docs" / "api.md"
USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "name": "f"}
OF_REASONING: Mapping[str, Any] = {
    "content": [{"type": "reasoning_text", "text": "a"}],
    "summary": [{"type": "summary_text", "text": "a"}],
    "encrypted_content": "a",
}


def item(kind: str) -> dict[str, Any]:
    """An item with all that any of its type may need."""
    own = {"type": kind, "id": "x", "call_id": "c", "name": "f", "arguments": "{}", "output": "a", "summary": []}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    return {"input": [call, {**own, **(USER if kind == "message" else {})}]}


def part(kind: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": kind, "text": "a", "refusal": "a"}]}]}


def choice(kind: str) -> dict[str, Any]:
    if kind in ("none", "auto", "required"):
        return {"tools": [TOOL], "tool_choice": kind}
    return {"tools": [TOOL], "tool_choice": {"type": kind, "name": "f", "mode": "auto", "tools": [TOOL]}}


BODIES: Mapping[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "items of the input": ("input.1", item),
    "parts of messages and results": ("input.0.content.0", part),
    "reasoning items": (
        "input.0.encrypted_content",
        lambda name: {"input": [{"type": "reasoning", "summary": [], name: OF_REASONING[name]}, USER]},
    ),
    "tools": ("tools.0", lambda kind: {"tools": [{"type": kind, "name": "f"}]}),
    "tool_choice": ("tool_choice", choice),
    "text.format": (
        "text.format",
        lambda kind: {"text": {"format": {"type": kind, "name": "x", "schema": {"type": "object"}}}},
    ),
    "text.verbosity": ("text.verbosity", lambda value: {"text": {"verbosity": value}}),
    "reasoning.effort": ("reasoning.effort", lambda value: {"reasoning": {"effort": value}}),
    "reasoning.summary": ("reasoning.summary", lambda value: {"reasoning": {"summary": value}}),
    "include": ("include.0", lambda value: {"include": [value]}),
    "truncation": ("truncation", lambda value: {"truncation": value}),
}
"""Row of the table -> the field that a refusal names, and a body with a value."""


def rows() -> dict[str, tuple[list[str], list[str]]]:
    """Row -> what works, and what is refused."""
    (section,) = re.findall(r"^## Responses$(.*?)^## ", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.M)
    _, _, *table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    names = re.compile(r"`([^`]+)`")
    return {what.strip(" `"): (names.findall(works), names.findall(refused)) for what, works, refused in table}


ROWS = rows()


def app() -> Any:
    made = app_with("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", FakeEngine(reply=says("a")))
    made.state.service.turns = TurnSettings(True, "hermes")
    return made


@pytest.mark.wide_sample(3)
@pytest.mark.parametrize("row", BODIES)
def test_the_table_is_true(row: str) -> None:
    param, body = BODIES[row]
    works, refused = ROWS[row]
    for value in works:
        response = post(app(), "/v1/responses", {"input": "a", **body(value)})
        assert response.status_code == 200, (value, response.text)
    for value in refused:
        response = post(app(), "/v1/responses", {"input": "a", **body(value)})
        assert response.status_code == 400, value
        assert response.json()["error"]["param"] == param, value


def test_end_points() -> None:
    works, refused = ROWS["end points"]
    for place in (*works, *refused):
        method, path = place.replace("{id}", "resp_1").split()
        response = call(app(), method, path, json={"input": "a"})
        assert response.status_code == (200 if place in works else 404)
    assert ROWS.keys() == {*BODIES, "end points"}
