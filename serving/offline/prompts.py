"""Reads prompts in the forms that vLLM's scripts give them, and writes the conversations of `LLM.chat` as prompts.

"text"                                   {"prompt": "text"}
[1, 2, 3]                                {"prompt_token_ids": [1, 2, 3]}; beside it `prompt` is only shown
a list of any of these
"""

import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

from model_runner import RequestError
from serving.text.chat_template import ChatTemplate
from ubatch.errors import cut, shown


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class _MayHaveText(TypedDict, total=False):
    prompt: str | None


class TokensPrompt(_MayHaveText):
    """A prompt as tokens; `prompt` is the text that results show for it."""

    prompt_token_ids: Sequence[int]


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt

_REFUSED = {
    "multi_modal_data": "models read text only; leave images, audio and video out",
    "multi_modal_uuids": "models read text only; leave images, audio and video out",
    "mm_processor_kwargs": "models read text only; leave images, audio and video out",
    "prompt_embeds": "prompts are text or token ids",
    "encoder_prompt": "models have no encoder",
    "decoder_prompt": "models have no encoder; give the text as prompt",
    "negative_prompt": "there is no guidance by a second prompt",
    "cache_salt": "all requests share the prefix cache; turn it off with LLM(enable_prefix_caching=False)",
}
"""Keys of vLLM's prompts that are not offered, and why."""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt that was read.

    Attributes:
        text: its text; None if only its tokens were given.
        token_ids: its tokens; None if they have to be made from the text.
    """

    text: str | None
    token_ids: Sequence[int] | None


def read_prompts(given: Any) -> list[ReadPrompt]:
    """The prompts, of which one alone may be without a list around it.

    Raises:
        RequestError: a prompt has another form.
    """
    if isinstance(given, str | Mapping):
        return [read_prompt(given)]
    try:
        several = list(given)
    except TypeError:
        raise RequestError(f"a prompt is {_FORMS}, not {shown(given)}.") from None
    if several and _is_token(several[0]):
        return [read_prompt(given)]
    return [read_prompt(each) for each in several]


_FORMS = "a text, a dict with 'prompt' or 'prompt_token_ids', or a list of token ids"


def read_prompt(given: Any) -> ReadPrompt:
    """One prompt.

    Raises:
        RequestError: it has another form.
    """
    if isinstance(given, str):
        return ReadPrompt(_text(given), None)
    if not isinstance(given, Mapping):
        return ReadPrompt(None, _tokens(given))
    for name, value in given.items():
        if value is None or name in ("prompt", "prompt_token_ids"):
            continue
        if name not in _REFUSED:
            raise RequestError(f"a prompt has no {shown(name)}: it is {_FORMS}.", param="prompts")
        if value != {}:
            raise RequestError(f"{name} of a prompt is not supported: {_REFUSED[name]}.", param=name)
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' of a prompt is a text, not {shown(text)}.", param="prompt")
    if token_ids is None and text is None:
        raise RequestError(f"a prompt is {_FORMS}, not {shown(given)}.")
    return ReadPrompt(None if text is None else _text(text), None if token_ids is None else _tokens(token_ids))


def _is_token(given: Any) -> bool:
    if getattr(given, "ndim", 0):  # an array of one token is a prompt
        return False
    try:
        operator.index(given)
    except TypeError:
        return False
    return True


def _tokens(given: Any) -> list[int]:
    try:
        return [operator.index(token) for token in given]
    except TypeError:
        raise RequestError(f"a prompt is {_FORMS}, not {shown(given)}.") from None


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is no text: it has half of a surrogate pair ({error}).") from error
    return text


# -- conversations, by the checkpoint's chat template or one that the caller gives -------------------------------------

Message = Mapping[str, Any]
_SHOWN_REASON = 1000  # characters shown of a template's error
_FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are written; the arguments of `LLM.chat`.

    Attributes:
        chat_template: the template's text; None for the checkpoint's.
        chat_template_content_format: vLLM's; found by trial here, so each of its values does the same.
        add_generation_prompt: end with the beginning of the assistant's turn.
        continue_final_message: the answer continues the last message.
        tools: tools that the template describes to the model.
        chat_template_kwargs: variables of the template.
    """

    chat_template: str | None = None
    chat_template_content_format: str = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            message = (
                "continue_final_message and add_generation_prompt cannot both be true: the prompt has one end. Set "
                "add_generation_prompt=False."
            )
            raise RequestError(message, param="continue_final_message")
        if self.chat_template_content_format not in _FORMATS:
            message = (
                f"chat_template_content_format must be one of {', '.join(_FORMATS)}, not "
                f"{shown(self.chat_template_content_format)}."
            )
            raise RequestError(message, param="chat_template_content_format")
        tools: object = self.tools
        if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(t, Mapping) for t in tools)):
            raise RequestError(f"tools must be a list of dicts, not {shown(self.tools)}.", param="tools")


def conversations_in(messages: Any) -> list[list[Message]]:
    """The conversations, of which one alone may be without a list around it.

    Raises:
        RequestError: a message is no dict with a role, or has what is no text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages are a list of dicts with role and content, not {shown(messages)}.", param="messages"
        )
    several = [messages] if messages and isinstance(messages[0], Mapping) else messages
    return [_conversation(each) for each in several]


def _conversation(messages: Any) -> list[Message]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f"a conversation is a list of messages, at least one, not {shown(messages)}.", param="messages"
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            param = f"messages.{place}"
            raise RequestError(f"{param} must be a dict with a role, not {shown(message)}.", param=param)
        _check_content(message.get("content"), f"messages.{place}.content")
    return list(messages)


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts, not {shown(content)}.", param=where)
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where} has {shown(part)}; only text is read: {{'type': 'text', 'text': ...}}.", param=where
            )


def conversation_text(tokenizer: Any, messages: Sequence[Message], options: ChatOptions) -> str:
    """The conversation as text.

    Raises:
        RequestError: there is no template, or it refuses the messages.
    """
    template = _template(tokenizer, options.chat_template)
    variables = dict(options.chat_template_kwargs)
    if reserved := sorted(set(variables) & _reserved(tokenizer)):
        message = f"chat_template_kwargs may only have what the template itself asks for, not {', '.join(reserved)}."
        raise RequestError(message, param="chat_template_kwargs")
    if options.tools:
        variables["tools"] = [dict(tool) for tool in options.tools]
    continued = options.continue_final_message
    try:
        return template.write(
            template.normalised([dict(each) for each in messages], continued=continued),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=continued,
            **variables,
        )
    except RequestError:
        raise
    except Exception as error:  # a template can raise errors of any kind
        reason = "they are nested too deeply" if isinstance(error, RecursionError) else str(error)[:_SHOWN_REASON]
        raise RequestError(f"the chat template refuses the messages: {reason}", param="messages") from error


def _template(tokenizer: Any, source: str | None) -> ChatTemplate:
    if source is not None:
        if not isinstance(source, str):
            raise RequestError(f"chat_template is a template's text, not {shown(source)}.", param="chat_template")
        try:
            return ChatTemplate(source, None, tokenizer.special_tokens_map)
        except Exception as error:  # a template can raise errors of any kind
            raise RequestError(f"chat_template is broken: {cut(str(error))}", param="chat_template") from error
    template = ChatTemplate.of(tokenizer)
    if template is None:
        message = (
            "this model has no chat template: give one as chat_template, add one to its tokenizer_config.json, or call "
            "generate."
        )
        raise RequestError(message, param="chat_template")
    return template


def _reserved(tokenizer: Any) -> frozenset[str]:
    """Names that a template has from `LLM.chat`, not from its `chat_template_kwargs`."""
    from transformers.utils.chat_template_utils import render_jinja_template  # transformers takes two seconds

    writers = (tokenizer.apply_chat_template, render_jinja_template)
    return frozenset({"messages", "self"}.union(*(inspect.signature(each).parameters for each in writers)))
