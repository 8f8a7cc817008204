"""The body of `/v1/responses`. What the model reads of it becomes a chat: see `serving.api.responses.conversation`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints, create_model

from model_runner import MAX_TOP_LOGPROBS
from serving.api.schema.body import Body, optional, or_else
from serving.api.schema.request_models import ChatCompletionRequest, ReasoningEffort
from serving.api.schema.responses_input import Input
from serving.api.schema.responses_tools import TextFormat, ToolChoice, Tools
from serving.api.schema.unsupported_fields import CHAT, Refused

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log-probabilities."""
AS_IN_CHAT = (
    *("model", "stream", "priority", "chat_template_kwargs", "structured_outputs"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", "bad_words"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos", "skip_special_tokens"),
)
"""Fields that are those of chat completions."""

_STATELESS = "nothing is stored; send the earlier items as input"
_ONE = "one response is made; send several requests"
_MESSAGES = "send messages and other items as input"
_LENGTH = "use max_output_tokens"
_TRUNCATION = "use truncation"
_ALWAYS = "reasoning is in items of its own"
_ADDED: Mapping[str, Refused] = {
    "previous_response_id": Refused(_STATELESS),
    "conversation": Refused(_STATELESS),
    "background": Refused("nothing is stored that could be asked for later; use stream", (False,)),
    "context_management": Refused("nothing is stored; use truncation, or send fewer items", ([],)),
    "prompt": Refused("there are no stored prompts; send instructions and input"),
    "max_tool_calls": Refused("it limits tools that the server runs, and it runs none"),
    "stream_options": Refused(
        "the last event has the usage, and events are not padded",
        ({}, {"include_obfuscation": False}, {"include_usage": True}),
    ),
}
_CALLED_OTHERWISE: Mapping[str, Refused] = {
    "messages": Refused(_MESSAGES, ([],), described=False),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), Refused(_LENGTH, described=False)),
    "logprobs": Refused(f"use include with {LOGPROBS!r}, and top_logprobs", (False,), described=False),
    **dict.fromkeys(("n", "best_of"), Refused(_ONE, (1,), described=False)),
    "response_format": Refused("use text.format", ({"type": "text"},), described=False),
    "reasoning_effort": Refused("use reasoning.effort", described=False),
    "verbosity": Refused("use text.verbosity", ("medium",), described=False),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), Refused(_ALWAYS, (True,), described=False)),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), Refused(_TRUNCATION, described=False)),
}
_CHAT_ONLY = Refused("only a chat has it; use /v1/chat/completions", (False, [], {}, ""), described=False)
_OWN = ("reasoning", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs")
"""Fields of its own that a chat may have, too."""
REFUSED: Mapping[str, Refused] = {
    **{name: _CHAT_ONLY for name in ChatCompletionRequest.model_fields if name not in (*AS_IN_CHAT, *_OWN)},
    **{name: rule for name, rule in CHAT.items() if name not in (*AS_IN_CHAT, *_OWN)},
    **_CALLED_OTHERWISE,
    **_ADDED,
}

Include = Annotated[
    Literal[
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    ],
    or_else("one of the values that the OpenAI API documents, such as 'message.output_text.logprobs'"),
]
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
Verbosity = Annotated[
    Literal["medium"] | None, or_else("'medium': ask for a short or a long answer in the instructions")
]
Summary = Annotated[
    Literal["auto"] | None, or_else("'auto': reasoning is not summarised; reasoning items have all of its text")
]


class TextConfig(Body):
    """The form of the text."""

    place = "text."

    format: TextFormat | None = optional("text, json_object, or json_schema with a schema")
    verbosity: Verbosity = optional("medium: others are not supported")


class ReasoningConfig(Body):
    """How much the model reasons."""

    place = "reasoning."

    effort: ReasoningEffort | None = optional(
        "passed to the chat template as reasoning_effort; sets enable_thinking, false for none"
    )
    summary: Summary = optional("auto: reasoning items have the text of all reasoning")
    generate_summary: Summary = optional("older name of summary")


if TYPE_CHECKING:
    _AsInChat = Body
else:
    _shared = {name: ChatCompletionRequest.model_fields[name] for name in AS_IN_CHAT}
    _AsInChat = create_model(
        "_AsInChat", __base__=Body, **{name: (field.annotation, field) for name, field in _shared.items()}
    )


class ResponsesRequest(_AsInChat):
    """Answer a conversation with items: text, function calls and reasoning."""

    refused = REFUSED
    between_fields = (
        {
            "anyOf": [
                {"properties": {"top_logprobs": {"enum": [None, 0]}}},
                {
                    "properties": {"include": {"type": "array", "contains": {"const": LOGPROBS}}},
                    "required": ["include"],
                },
            ]
        },
    )

    if TYPE_CHECKING:
        model: str | None
        stream: bool | None
    input: Input = Field(description="what the user says, or the items of the conversation so far")
    instructions: str | None = optional("a system message in front of the input")
    max_output_tokens: int | None = optional(
        "tokens of the output (the checkpoint's max_new_tokens, or what is left of the context)", ge=1
    )
    tools: Tools | None = optional("functions that the model may call")
    tool_choice: ToolChoice | None = optional("auto, none, required, or the functions that it chooses from (auto)")
    parallel_tool_calls: bool | None = optional("several calls in one response (true)")
    text: TextConfig | None = optional("the form of the text")
    reasoning: ReasoningConfig | None = optional("how much the model reasons")
    include: list[Include] | None = optional(
        f"{LOGPROBS}: log-probabilities of the text; the others change nothing, as there is nothing of the kind"
    )
    top_logprobs: int | None = optional(f"top tokens per position; with {LOGPROBS}", ge=0, le=MAX_TOP_LOGPROBS)
    truncation: Literal["auto", "disabled"] | None = optional(
        "auto: the first tokens of a prompt that is too long are left out (disabled)"
    )
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = optional(
        "the client's notes; they are in the answer"
    )

    @property
    def with_logprobs(self) -> bool:
        """Whether log-probabilities of the text are asked for."""
        return LOGPROBS in (self.include or ())
