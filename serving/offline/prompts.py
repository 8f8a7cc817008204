"""Reads prompts in the forms that vLLM's scripts give them.

"text"                                   {"prompt": "text"}
[1, 2, 3]                                {"prompt_token_ids": [1, 2, 3]}; beside it `prompt` is only shown
a list of any of these
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from model_runner import RequestError
from ubatch.errors import shown


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
