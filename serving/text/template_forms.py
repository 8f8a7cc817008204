"""Finds the forms in which a chat template reads messages, by trial.

A trial writes a short conversation with known words. The form is right whose words come out. Every form is found once,
by `find_all` or when a message needs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

Message = dict[str, Any]
Content = str | Sequence[Mapping[str, str]]

WORD, SECOND, NAME, KEY = "qxwordone", "qxwordtwo", "qxcalled", "qxkey"
"""What trials say; no template has these words itself."""
FILLER = "Hello"
TRIED = frozenset({"user", "system", "developer", "assistant", "tool"})
"""Roles whose forms are found by trial; others, which clients may make up, are read like the user's."""
INSTRUCTING = ("system", "developer")
"""Roles that instruct the model."""
CALL_ID = "qxcall001"  # Mistral's templates want nine letters and digits


@dataclass(frozen=True)
class ContentForm:
    """How a template reads the content of a role's messages.

    Attributes:
        strings: a text is a string; otherwise a list of one part.
        separator: what the template writes between two parts; None if it does not read several, which are then joined
            to one text, a line each.
        told: whether the words come out; None if the template refuses the trials.
    """

    strings: bool = True
    separator: str | None = None
    told: bool | None = None

    def content(self, given: Content) -> str | list[dict[str, str]]:
        """A message's content as the template reads it."""
        if not isinstance(given, str) and given and self.separator is not None:
            return [dict(part) for part in given]
        text = self.text(given)
        return text if self.strings else _parts(text)

    def text(self, given: Content) -> str:
        """A message's text as the template writes it."""
        between = "\n" if self.separator is None else self.separator
        return given if isinstance(given, str) else between.join(part["text"] for part in given)


class NullForm(Enum):
    """What a message has where its content is null."""

    NULL = "null"
    ABSENT = "absent"
    EMPTY = "empty"

    def put(self, message: Message, empty: object) -> Message:
        """The message with this in place of its content; `empty` is an empty text in the template's form."""
        rest = {name: value for name, value in message.items() if name != "content"}
        return rest if self is NullForm.ABSENT else {**rest, "content": None if self is NullForm.NULL else empty}


@dataclass(frozen=True)
class ArgumentsForm:
    """How a template reads the arguments of a tool call: as an object, as JSON text, or either."""

    as_object: bool
    as_text: bool


class TemplateForms:
    """The forms that one template reads.

    Args:
        write: writes a conversation; any exception means that the template refuses it.
    """

    def __init__(self, write: Callable[[Sequence[Message]], str]) -> None:
        self._write = write
        self._content: dict[str, ContentForm] = {}
        self._later: dict[tuple[str, bool], bool | None] = {}

    def find_all(self) -> None:
        """Find every form now; all trials take some milliseconds, which no request should wait for."""
        for role in TRIED:
            self.content(role)
        _ = self.calls_apart, self.null_beside_calls
        for role in INSTRUCTING:
            for instructed in (False, True):
                self.told_later(role, instructed=instructed)

    def content(self, role: str) -> ContentForm:
        """How the template reads a role's content."""
        role = role if role in TRIED else "user"
        known = self._content.get(role)
        if known is None:
            known = self._content[role] = self._find_content(role)
        return known

    def without_content(self, message: Message) -> Message:
        """A message whose content is null, in the form that the template reads: an empty text, but beside tool calls,
        which some templates write only if the content is null."""
        calling = message["role"] == "assistant" and "tool_calls" in message
        form = self.null_beside_calls if calling else NullForm.EMPTY
        return form.put(message, self.content(message["role"]).content(""))

    @cached_property
    def null_beside_calls(self) -> NullForm:
        """What a message with tool calls has where its content is null."""
        texts = self._tried_without_content(self._call())
        own = texts.get(NullForm.EMPTY, "").count("None")  # more of them are a null that was written
        fine = [form for form, text in texts.items() if text.count("None") <= own]
        best = [form for form in fine if WORD in texts[form]]
        return next(iter(best or fine), NullForm.EMPTY)

    def told_later(self, role: str, *, instructed: bool) -> bool | None:
        """Whether instructions behind other messages come out; None if the template refuses the trial. Some templates
        read only those of the first message.

        Args:
            role: one of `INSTRUCTING`.
            instructed: there are instructions before, which must come out, too.
        """
        if (role, instructed) not in self._later:
            self._later[role, instructed] = self._find_later(role, instructed)
        return self._later[role, instructed]

    @cached_property
    def calls_apart(self) -> bool:
        """Whether tool calls need a message of their own: beside a text the template leaves out one of them."""
        call, text = self._call(), self._saying("assistant", SECOND)
        together = self._tried({**call, **text})
        apart = self._tried(self.without_content(call), text)
        return not _tells(together, WORD, SECOND) and _tells(apart, WORD, SECOND)

    @cached_property
    def arguments(self) -> ArgumentsForm:
        """How the template reads the arguments of tool calls; as an object if it shows neither."""
        values = {KEY: WORD}
        text = json.dumps(values)
        objects, texts = (self._tried_without_content(_calling(each)).values() for each in (values, text))
        # An object that is written as text looks as in Python, with single quotes: then it should have been text.
        as_object = any(WORD in each and repr(values) not in each for each in objects)
        as_text = any(text in each for each in texts)
        return ArgumentsForm(as_object or not as_text, as_text)

    def _find_content(self, role: str) -> ContentForm:
        one, single = (self._tried({"role": role, "content": form}) for form in (WORD, _parts(WORD)))
        two = self._tried({"role": role, "content": [*_parts(WORD), *_parts(SECOND)]}) or ""
        _, first, rest = two.partition(WORD)
        between, second, _ = rest.partition(SECOND)
        separator = between if first and second else None
        if one is not None and WORD in one:
            # A template that reads only strings may write a list as Python shows it, which no string looks like.
            alike = separator is not None and self._tried({"role": role, "content": WORD + between + SECOND}) == two
            return ContentForm(separator=separator if alike else None, told=True)
        if single is not None and WORD in single:
            return ContentForm(strings=False, separator=separator, told=True)
        return ContentForm(told=None if one is None and single is None else False)

    def _find_later(self, role: str, instructed: bool) -> bool | None:
        user, message = self._saying("user", FILLER), self._saying(role, WORD)
        before = [self._saying("system", SECOND)] if instructed else [user, self._saying("assistant", SECOND)]
        text = self._first_written([[*before, message, user]])
        return None if text is None else _tells(text, WORD, SECOND)

    def _tried_without_content(self, message: Message) -> dict[NullForm, str]:
        """The texts of conversations with the message, for each form of its null content that the template takes."""
        empty = self.content(message["role"]).content("")
        texts = {form: self._tried(form.put(message, empty)) for form in NullForm}
        return {form: text for form, text in texts.items() if text is not None}

    def _tried(self, message: Message, *before: Message) -> str | None:
        """The text of the first conversation around a message that the template takes; None if it takes none."""
        return self._first_written(self._around(message, *before))

    def _first_written(self, conversations: Sequence[Sequence[Message]]) -> str | None:
        for conversation in conversations:
            try:
                return self._write(conversation)
            except Exception:  # a template can raise errors of any kind
                continue
        return None

    def _around(self, message: Message, *before: Message) -> list[list[Message]]:
        """Conversations with a message, as templates demand them: they begin with a user, and roles take turns.

        Args:
            before: what the assistant says before its tool calls, in messages of its own.
        """
        role = message["role"]
        if role == "user":
            filler = FILLER if isinstance(message.get("content"), str | None) else _parts(FILLER)
            return [[message], [{"role": "system", "content": filler}, message]]
        user = self._saying("user", FILLER)
        result = {"role": "tool", "tool_call_id": CALL_ID, "name": NAME, "content": FILLER}
        if role == "tool":
            return [[user, self.without_content(self._call()), {**result, **message}]]
        if role == "assistant" and "tool_calls" in message:
            return [[user, *before, message], [user, *before, message, result]]
        return [[user, message, user]] if role == "assistant" else [[message, user]]

    def _call(self) -> Message:
        """A message with a tool call."""
        values = {KEY: WORD}
        return _calling(values if self.arguments.as_object else json.dumps(values))

    def _saying(self, role: str, text: str) -> Message:
        """A message with a text."""
        return {"role": role, "content": self.content(role).content(text)}


def _tells(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text for word in words)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _calling(arguments: object) -> Message:
    function = {"name": NAME, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}
