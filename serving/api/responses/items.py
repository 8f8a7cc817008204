"""A response's output items, and the events by which they come to be.

    reasoning      added, its part added, text deltas, text done, part done, item done
    message        the same, with the text that the user reads
    function_call  added, deltas of the arguments, arguments done, item done

One item is open at a time: another kind of text, or the next call, ends it. An output without any text is one empty
message.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.api.logprobs import JsonLists
from serving.turns import ToolCallDelta, TurnDelta

Event = dict[str, Any]
_LOGPROBS = "logprobs"
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass
class _Open:
    """The item that text is being added to.

    Attributes:
        kind: the item's type.
        call: the call's place among the turn's calls; None for text.
    """

    item: dict[str, Any]
    kind: str
    text: list[str] = field(default_factory=list)
    logprobs: JsonLists = field(default_factory=lambda: JsonLists([_LOGPROBS]))
    call: int | None = None

    def part(self) -> dict[str, Any]:
        """The text so far, as the item has it: a part of its content, or the call's arguments."""
        text = "".join(self.text)
        if self.kind == "function_call":
            return {"arguments": text}
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], **self.logprobs.raw()}


class OutputItems:
    """The items of one response.

    Args:
        identity: ends the items' ids, which are unique with it.

    Attributes:
        items: what has been added so far; those but the last one are complete.
    """

    def __init__(self, identity: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._identity = identity
        self._open: _Open | None = None
        self._unread: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is held back

    def take(self, turn: TurnDelta, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """The events of a turn's next part, read from tokens with these log-probabilities, in the chat's form."""
        self._unread += logprobs
        if turn.reasoning:
            own = yield from self._opened("reasoning", {"summary": [], "content": []})
            yield self._add(own, turn.reasoning, "response.reasoning_text.delta", content_index=0)
        if turn.content:
            yield from self._add_content(turn.content)
        for call in turn.tool_calls:
            yield from self._add_call(call)
        if turn.reasoning or turn.content or turn.tool_calls:
            self._unread = []

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """The last events; `complete` is false if the output was cut."""
        if not self.items or (self._unread and self.items[-1]["type"] == "message"):
            yield from self._add_content("")  # tokens without a text, such as the end of sequence
        yield from self._end("completed" if complete else "incomplete")

    def _add_content(self, text: str) -> Iterator[Event]:
        own = yield from self._opened("message", {"role": "assistant", "content": []})
        own.logprobs.add({_LOGPROBS: self._unread})
        told = [_told(entry) for entry in self._unread]
        self._unread = []
        if text or told:
            yield self._add(own, text, "response.output_text.delta", content_index=0, logprobs=told)

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        call_id = call.id or f"call_{self._identity}_{call.index}"
        about = {"call_id": call_id, "name": call.name or "", "arguments": ""}
        own = yield from self._opened("function_call", about, call=call.index)
        if call.arguments:
            yield self._add(own, call.arguments, "response.function_call_arguments.delta")

    def _add(self, own: _Open, text: str, name: str, **more: Any) -> Event:
        own.text.append(text)
        return {"type": name, **self._place(), **more, "delta": text}

    def _opened(self, kind: str, about: Mapping[str, Any], call: int | None = None) -> Generator[Event, None, _Open]:
        """The open item if it is of this kind; otherwise a new one, and the events that begin it."""
        own = self._open
        if own is not None and (own.kind, own.call) == (kind, call):
            return own
        yield from self._end("completed")
        item = {"id": f"{_PREFIXES[kind]}_{self._identity}_{len(self.items)}", "type": kind, "status": "in_progress"}
        self.items.append({**item, **about})
        own = self._open = _Open(self.items[-1], kind, call=call)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(own.item)}
        if kind != "function_call":
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": own.part()}
        return own

    def _end(self, status: str) -> Iterator[Event]:
        """Complete the open item, if there is one."""
        own = self._open
        if own is None:
            return
        self._open = None
        place, part = self._place(), own.part()
        if own.kind == "function_call":
            own.item |= part
            yield {"type": "response.function_call_arguments.done", **place, "name": own.item["name"], **part}
        else:
            own.item["content"] = [part]
            place["content_index"] = 0
            said = {name: part[name] for name in ("text", _LOGPROBS) if name in part}
            name = "output_text" if own.kind == "message" else "reasoning_text"
            yield {"type": f"response.{name}.done", **place, **said}
            yield {"type": "response.content_part.done", **place, "part": part}
        own.item["status"] = status
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": own.item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _told(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A token's log-probabilities as deltas have them: without bytes."""
    top = [{"token": other["token"], "logprob": other["logprob"]} for other in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
