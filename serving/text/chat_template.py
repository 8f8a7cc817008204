"""A checkpoint's chat template, which writes conversations as text.

Clients send what OpenAI's API describes; templates differ in what they read of it. So messages are normalised first:

    content              a string, a list of parts, or either
    content null         as it is, left out, or an empty string
    tool_calls           never an empty list; in a message of their own where a text beside them would be lost
    function.arguments   an object; the JSON text where a template writes that as it is
    role developer       `system` where a template does not know it

`serving.text.template_forms` finds what a template reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from model_runner import RequestError
from serving.text.template_forms import INSTRUCTING, TRIED, ContentForm, Message, TemplateForms
from ubatch import ConfigError
from ubatch.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
