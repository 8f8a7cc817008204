"""A checkpoint's chat template, which writes conversations as text.

Clients send what OpenAI's API describes; templates differ in what they read of it. So messages are normalised first:

    content              a string, a list of parts, or either
    content null         as it is, left out, or an empty string
    tool_calls           never an empty list; in a message of their own where a text beside them would be lost
    function.arguments   an object; the JSON text where a template writes that as it is
    role developer       `system` where a template does not know it

What a template reads is found by trial. A trial writes a short conversation with known words. The form is right whose
words come out. Every form is found once, by `find_all` or when a message needs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from model_runner import RequestError
from ubatch import ConfigError
from ubatch.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


DEFAULT, FOR_TOOLS = "default", "tool_use"
LEFT_OUT = TRIED - {"user"}
"""Roles whose messages are refused where the template leaves them out; the check at the start is about the user's."""


def read_template(given: str) -> str:
    """The template that `--chat-template` names: a file's text, or the template itself where it has a brace.

    Raises:
        ConfigError: there is no such file, or it is no text.
    """
    if any(sign in given for sign in "{}\n"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(
            f"--chat-template {shown(given)} cannot be read: {reason}. Give a file with a template."
        ) from None


class ChatTemplate:
    """The template of a tokenizer; `ChatTemplate.of` makes it once.

    Attributes:
        source: the template.
        name: its name, if the checkpoint names several: `default`, or the first where there is none; `tool_use` for
            requests with tools.
        forms: the forms in which it reads messages.
    """

    _known: ClassVar[WeakKeyDictionary[Any, dict[str | None, ChatTemplate]]] = WeakKeyDictionary()

    def __init__(self, source: str, name: str | None, variables: Mapping[str, Any]) -> None:
        self.source, self.name = source, name
        self._variables = variables
        self.forms = TemplateForms(lambda messages: self.write(messages, add_generation_prompt=True))

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> ChatTemplate | None:
        """The tokenizer's template, for conversations with or without tools; None if it has none."""
        found: Any = tokenizer.chat_template
        name = None
        if isinstance(found, Mapping):
            wanted = FOR_TOOLS if tools and FOR_TOOLS in found else DEFAULT
            name = wanted if wanted in found else next(iter(found), None)
            found = found.get(name)
        if not found:
            return None
        of_tokenizer = cls._known.setdefault(tokenizer, {})
        known = of_tokenizer.get(name)
        if known is None or known.source != found:
            known = of_tokenizer[name] = cls(found, name, tokenizer.special_tokens_map)
        return known

    def write(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a conversation whose messages have the form that the template reads; see `normalised`.

        Args:
            options: `tools`, `add_generation_prompt`, `continue_final_message`, and variables of the template.

        Raises:
            Exception: of any kind, as a template can raise it. `jinja2.TemplateError` itself, no subclass of it, is the
                template's own refusal.
        """
        from transformers.utils.chat_template_utils import render_jinja_template  # transformers takes two seconds

        options = {**self._variables, **options}
        texts, _ = render_jinja_template(conversations=[list(messages)], chat_template=self.source, **options)
        return str(texts[0])

    def content_form(self, role: str) -> ContentForm:
        """How the template reads the content of a role's messages."""
        return self.forms.content(self._role(role))

    def normalised(self, messages: Sequence[Message], *, continued: bool) -> list[Message]:
        """The messages in the form that the template reads.

        Args:
            messages: as clients send them; a content is a string, a list of text parts, or null.
            continued: the answer continues the last message.

        Raises:
            RequestError: a tool call's arguments are no JSON object, or the template leaves out messages of a role.
        """
        last = len(messages) - 1
        normalised: list[Message] = []
        instructed = False
        for place, each in enumerate(messages):
            self._check_told(each, place, instructed)
            normalised += self._normalised(each, place, continued and place == last)
            instructed = instructed or each["role"] in INSTRUCTING
        return normalised

    def _normalised(self, given: Message, place: int, continued: bool) -> list[Message]:
        role = self._role(given["role"])
        message = {**{name: value for name, value in given.items() if value is not None}, "role": role}
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = self._calls(calls, f"messages.{place}.tool_calls")
        content, form = given.get("content"), self.content_form(role)
        if not continued and (content is None or (calls and not content)):
            return [self.forms.without_content(message)]
        said = {**message, "content": form.content(content or "")}
        if continued or not calls or not self.forms.calls_apart:
            return [said]
        calling = self.forms.without_content({"role": role, "tool_calls": said.pop("tool_calls")})
        return [said, calling]

    def _check_told(self, given: Message, place: int, instructed: bool) -> None:
        """Refuse a message that the template leaves out. `instructed`: there are instructions before it."""
        role = self._role(given["role"])
        if not given.get("content") or role not in LEFT_OUT:
            return
        which, remedy = "", "a message of the user"
        told = self.content_form(role).told
        if told and place and role in INSTRUCTING:
            told = self.forms.told_later(role, instructed=instructed)
            which, remedy = " behind other messages", "the first message"
        if told is False:
            raise RequestError(
                f"The model's chat template leaves out messages of the role {shown(given['role'])}{which}: the "
                f"model would not read all of them. Put the text into {remedy}.",
                param=f"messages.{place}.role",
            )

    def _role(self, role: str) -> str:
        return "system" if role == "developer" and not self.forms.content(role).told else role

    def _calls(self, calls: Any, where: str) -> Any:
        if not isinstance(calls, list):
            return calls
        return [self._call(call, f"{where}.{place}.function") for place, call in enumerate(calls)]

    def _call(self, call: Any, where: str) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        arguments = self._arguments(function.get("arguments") or {}, f"{where}.arguments")
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, given: Any, where: str) -> Any:
        form = self.forms.arguments
        if not form.as_object:
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        try:
            read = json.loads(given) if isinstance(given, str) else given
        except (ValueError, RecursionError):
            read = None
        if isinstance(read, dict):
            return read
        if form.as_text and isinstance(given, str):  # what a model wrote may be no JSON
            return given
        raise RequestError(
            f"{where} must be a JSON object, or the text of one: the model's chat template reads its entries.",
            param=where,
        )
