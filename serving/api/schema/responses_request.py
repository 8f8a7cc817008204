"""The body of `/v1/responses`: its input's items, its tools, and the form of its text.

What the model reads of it becomes a chat: see `serving.api.responses.conversation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, StringConstraints, TypeAdapter, ValidatorFunctionWrapHandler, WrapValidator, create_model

from model_runner import MAX_TOP_LOGPROBS
from serving.api.schema.body import Body, by_type, optional, or_else, type_of, wrong
from serving.api.schema.request_models import MAX_TOOLS, ChatCompletionRequest, FunctionName, ReasoningEffort
from serving.api.schema.unsupported_fields import CHAT, Refused

_TEXT_ONLY = dict.fromkeys(("input_image", "input_file", "input_audio"), "only text is read")
_RETURNED = frozenset({"id", "status", "phase", "annotations", "logprobs"})


class _Item(Body):
    """An item, or a part of one."""

    place = "input."
    also = _RETURNED


class InputText(_Item):
    """A text."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(_Item):
    """What a model said in place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text, as other parts have it."""
        return self.refusal


Part = Annotated[
    InputText | Refusal,
    by_type(InputText, Refusal, what="parts", refused=_TEXT_ONLY, why="only texts are read"),
]
_PARTS: TypeAdapter[list[Any]] = TypeAdapter(Annotated[list[Part], Field(fail_fast=True)])


def _text_or(several: TypeAdapter[list[Any]], what: str) -> WrapValidator:
    """A text, or a list of something. Errors are those of what is wrong in the list."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str | list):
            raise wrong(f"Input should be a text or a list of {what}")
        return value if isinstance(value, str) else several.validate_python(value)

    return WrapValidator(check)


Text = Annotated[str | list[Part], _text_or(_PARTS, "text parts")]


class Message(_Item):
    """What somebody says."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class FunctionCall(_Item):
    """A call that the model made."""

    also = _RETURNED | {"namespace", "caller", "async"}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="a JSON object, as text")


class FunctionCallOutput(_Item):
    """What a call returned."""

    also = _RETURNED | {"namespace", "caller", "name"}

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningText(_Item):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class Reasoning(_Item):
    """What the model thought before its next item. The summary is read where there is no content."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: Annotated[
        Literal[""] | None, or_else("null: what another server has encrypted cannot be read here")
    ] = optional("not supported: this server has no key")


Item = Message | FunctionCall | FunctionCallOutput | Reasoning
_ITEM = by_type(
    *get_args(Item),
    what="items",
    refused={"item_reference": "nothing is stored; send the item itself"},
    why="only messages, function calls, their outputs and reasoning are read",
)


def _with_type(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, dict) and "type" not in value and "role" in value:
        return Message.model_validate(value)
    return handler(value)


InputItem = Annotated[Item, _ITEM, WrapValidator(_with_type)]
_Items = Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]
Input = Annotated[str | _Items, _text_or(TypeAdapter(_Items), "items")]
"""A body's input."""


MAX_FORM_NAME_CHARACTERS = 256


class FunctionTool(Body):
    """A function that the model may call."""

    place = "tools."

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("a JSON schema of the arguments")
    strict: bool | None = optional("the arguments follow the schema")


Tool = Annotated[FunctionTool, by_type(FunctionTool, what="tools", why="only functions are, which the client runs")]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenFunction(Body):
    """The function that the model must call."""

    place = "tool_choice."

    type: Literal["function"]
    name: FunctionName


class AllowedTools(Body):
    """The functions that the model may call (auto), or one of which it must call (required)."""

    place = "tool_choice."

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, fail_fast=True)]


def _choice(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    if value in ("none", "auto", "required"):
        return value
    match type_of(value):
        case "function":
            return ChosenFunction.model_validate(value)
        case "allowed_tools":
            return AllowedTools.model_validate(value)
    raise wrong(
        "Input should be 'none', 'auto', 'required', a function {'type': 'function', 'name': ...} or allowed_tools"
    )


ToolChoice = Annotated[Literal["none", "auto", "required"] | ChosenFunction | AllowedTools, WrapValidator(_choice)]


class TextForm(Body):
    """Any text."""

    place = "text.format."

    type: Literal["text"]


class JsonObjectForm(Body):
    """Any JSON object."""

    place = "text.format."

    type: Literal["json_object"]


class JsonSchemaForm(Body):
    """JSON that follows a schema."""

    place = "text.format."
    also = frozenset({"schema"})

    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_FORM_NAME_CHARACTERS)]
    # `schema` is a method of pydantic's models, so the field has another name.
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema")
    description: str | None = optional("changes nothing")
    strict: bool | None = optional("changes nothing: the schema is always enforced as it is")


TextFormat = Annotated[
    TextForm | JsonObjectForm | JsonSchemaForm,
    by_type(TextForm, JsonObjectForm, JsonSchemaForm, what="formats", why="use json_schema"),
]


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
