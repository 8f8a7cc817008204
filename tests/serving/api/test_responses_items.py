"""Output items of `/v1/responses`, and the events by which they come to be, from the parts of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from serving.api.responses.answer import OutputItems
from serving.turns.marked import ToolCallDelta, TurnDelta

CALL = ToolCallDelta(0, "call_a", "add", '{"a":')
TURNS: Mapping[str, tuple[Sequence[TurnDelta], list[str]]] = {
    "nothing": ([], ["message:"]),
    "text": ([TurnDelta("a"), TurnDelta("b")], ["message:ab"]),
    "reasoning, then text": ([TurnDelta(reasoning="why"), TurnDelta("so")], ["reasoning:why", "message:so"]),
    "both at once": ([TurnDelta("so", "why")], ["reasoning:why", "message:so"]),
    "a call": (
        [TurnDelta(tool_calls=(CALL,)), TurnDelta(tool_calls=(ToolCallDelta(0, arguments="1}"),))],
        ['add:{"a":1}'],
    ),
    "two calls at once": ([TurnDelta(tool_calls=(CALL, ToolCallDelta(1, "call_b", "now")))], ['add:{"a":', "now:"]),
    "text around a call": (
        [TurnDelta("a"), TurnDelta(tool_calls=(CALL,)), TurnDelta("b")],
        ["message:a", 'add:{"a":', "message:b"],
    ),
    "reasoning twice": (
        [TurnDelta(reasoning="x"), TurnDelta("a"), TurnDelta(reasoning="y")],
        ["reasoning:x", "message:a", "reasoning:y"],
    ),
}
TEXT_DONE = {"message": "response.output_text.done", "reasoning": "response.reasoning_text.done"}


def plain(value: Any) -> Any:
    """As a client reads it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def written(turns: Sequence[TurnDelta], *, complete: bool = True) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events and the items of some turns."""
    output = OutputItems("x")
    events = [plain(event) for turn in turns for event in output.take(turn)]
    events += [plain(event) for event in output.finish(complete=complete)]
    return events, plain(output.items)


def shown(item: Mapping[str, Any]) -> str:
    if item["type"] == "function_call":
        return f"{item['name']}:{item['arguments']}"
    return f"{item['type']}:{''.join(part['text'] for part in item['content'])}"


@pytest.mark.parametrize("name", TURNS)
def test_items_of_a_turn(name: str) -> None:
    turns, expected = TURNS[name]
    events, items = written(turns)
    assert [shown(item) for item in items] == expected
    assert {item["status"] for item in items} == {"completed"}
    assert len({item["id"] for item in items}) == len(items)
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items


@pytest.mark.parametrize("name", TURNS)
def test_events_build_what_they_end_with(name: str) -> None:
    """A client that only adds up deltas has the items, one after another."""
    events, items = written(TURNS[name][0])
    open_item: dict[str, Any] | None = None
    built: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None
            open_item = event["item"]
            assert (open_item["status"], event["output_index"]) == ("in_progress", len(built))
            continue
        assert open_item is not None
        assert event["output_index"] == len(built)
        assert event.get("item_id", open_item["id"]) == open_item["id"]
        if kind == "response.content_part.added":
            assert event["content_index"] == len(open_item["content"])
            open_item["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            open_item["arguments"] += event["delta"]
        elif kind.endswith("_text.delta"):
            open_item["content"][0]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (open_item["arguments"], open_item["name"])
        elif kind.endswith("_text.done"):
            assert kind == TEXT_DONE[open_item["type"]]
            assert event["text"] == open_item["content"][0]["text"]
        elif kind == "response.content_part.done":
            assert event["part"] == open_item["content"][0]
        else:
            assert kind == "response.output_item.done"
            built.append({**open_item, "status": "completed"})
            open_item = None
    assert built == items


def test_what_is_cut_is_incomplete() -> None:
    _, items = written([TurnDelta("a"), TurnDelta(tool_calls=(CALL,))], complete=False)
    assert [(shown(item), item["status"]) for item in items] == [
        ("message:a", "completed"),
        ('add:{"a":', "incomplete"),
    ]


def entry(token: str) -> dict[str, Any]:
    return {
        "token": token,
        "logprob": -1.0,
        "bytes": [1],
        "top_logprobs": [{"token": "o", "logprob": -2.0, "bytes": [2]}],
    }


def test_logprobs_are_with_the_text_that_their_tokens_made() -> None:
    """Those of reasoning and calls are left out; those of a token whose text is held back come with the next text."""
    output = OutputItems("x")
    parts = [(TurnDelta(reasoning="r"), "r"), (TurnDelta(), "h"), (TurnDelta("text"), "t"), (TurnDelta(), "end")]
    events = [event for turn, token in parts for event in output.take(turn, [entry(token)])]
    events += output.finish(complete=True)
    deltas = [event for event in plain(events) if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], [each["token"] for each in event["logprobs"]]) for event in deltas] == [
        ("text", ["h", "t"]),
        ("", ["end"]),
    ]
    assert "bytes" not in deltas[0]["logprobs"][0]
    (part,) = plain(output.items[1])["content"]
    assert part["logprobs"] == [entry("h"), entry("t"), entry("end")]
