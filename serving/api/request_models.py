"""Bodies of requests. Unknown fields are ignored, as OpenAI's clients expect; a value of the wrong type is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from model_runner import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from serving.bad_words import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS
from serving.stop_strings import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

__all__ = [
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "ResponseFormat",
    "StreamOptions",
    "TextPart",
    "TokenizeRequest",
]

MAX_OUTPUTS = 128
Int64 = Field(ge=-(2**63), le=2**63 - 1)  # what goes to an engine


def _or_else(expected: str) -> WrapValidator:
    """One message for a value that fits no branch of a union, in place of one per branch."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("wrong_value", f"Input should be {expected}") from None

    return WrapValidator(check)


# One wrong item is enough to refuse a list, which may have millions.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    _or_else("a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None,
    _or_else(
        f"a string or a list of at most {MAX_STOP_STRINGS} strings, none of them empty or of more than "
        f"{MAX_STOP_CHARACTERS} characters"
    ),
]

BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]], Field(max_length=MAX_BAD_WORDS)
]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(_Body):
    """What a stream tells besides its text."""

    include_usage: Annotated[bool, Field(description="a last chunk tells the tokens used")] = False
    continuous_usage_stats: Annotated[bool, Field(description="every chunk does; needs include_usage")] = False


class GenerationRequest(_Body):
    """What completions and chat completions have in common. Where a default is not given here, it is the
    checkpoint's (`generation_config.json`), or else OpenAI's."""

    model: Annotated[str | None, Field(description="a name that /v1/models lists; the only one where left out")] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_OUTPUTS, description="outputs per prompt (1)")] = None
    stop: Annotated[Stop, Field(description="texts that end the output, which they are not part of")] = None
    stop_token_ids: Annotated[
        Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None,
        Field(description="tokens that end the output"),
    ] = None
    seed: Annotated[int | None, Int64, Field(description="makes the outputs repeatable; output i has seed + i")] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, description="0 is greedy (1)")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="from the likeliest of this mass (1)")] = None
    top_k: Annotated[int | None, Field(ge=-1, description="from the k likeliest; 0 or -1 from all (0)")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1, description="share of the likeliest token's (0)")] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    logit_bias: Annotated[
        Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None,
        Field(description="token id -> -100 to 100"),
    ] = None
    allowed_token_ids: Annotated[TokenIds | None, Field(description="no other tokens come")] = None
    bad_words: Annotated[
        BadWords | None,
        Field(description="words whose tokens do not come one after the other, with a space before or without"),
    ] = None
    min_tokens: Annotated[int | None, Field(ge=0, description="tokens before which nothing ends it (0)")] = None
    ignore_eos: Annotated[bool | None, Field(description="go on after an end-of-sequence token")] = None
    skip_special_tokens: Annotated[bool | None, Field(description="special tokens give no text (true)")] = None
    include_stop_str_in_output: Annotated[bool | None, Field(description="the stop is part of the text")] = None
    stream: Annotated[bool | None, Field(description="answer with server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, Field(description="only with stream")] = None
    user: Annotated[str | None, Field(description="not used")] = None
    priority: Annotated[
        int | None, Int64, Field(description="lower runs earlier, with --scheduling-policy priority")
    ] = None
    add_special_tokens: Annotated[bool | None, Field(description="the tokenizer adds its special tokens")] = None


class CompletionRequest(GenerationRequest):
    """Continue one or more prompts."""

    prompt: Prompt
    best_of: Annotated[int | None, Field(description="only 1 or n: all outputs are returned")] = None
    max_tokens: Annotated[int | None, Field(ge=0, description="tokens per output (16); 0 only with echo")] = None
    logprobs: Annotated[int | None, Field(ge=0, le=20, description="of the output and so many likeliest")] = None
    echo: Annotated[bool | None, Field(description="the prompt is the begin of the text")] = None
    suffix: Annotated[str | None, Field(description="not supported")] = None


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Further fields are handed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[
        str | list[TextPart] | None,
        _or_else("a string or a list of text parts, {'type': 'text', 'text': ...}; other parts are not supported"),
    ] = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ResponseFormat(_Body):
    """How the output is constrained: not at all."""

    type: Annotated[str, Field(description="only text")]


class ChatCompletionRequest(GenerationRequest):
    """Answer a conversation."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="(what is left of the context)")] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="older name of max_completion_tokens")] = None
    logprobs: Annotated[bool | None, Field(description="tell the output's log-probabilities")] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20, description="and so many likeliest tokens'")] = None
    add_generation_prompt: Annotated[bool | None, Field(description="begin the assistant's turn (true)")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="for the chat template")] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any] | None, Field(description="not supported, unless tool_choice is none")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, Field(description="only none")] = None


class TokenizeRequest(_Body):
    """A prompt or a conversation to turn into token ids; exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[bool | None, Field(description="true for a prompt, false for messages")] = None
    add_generation_prompt: Annotated[bool | None, Field(description="as in chat completions (true)")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Annotated[bool | None, Field(description="the tokens as the vocabulary has them")] = None


class DetokenizeRequest(_Body):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
