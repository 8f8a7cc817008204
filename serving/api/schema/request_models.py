"""Bodies of requests. A value of the wrong type is refused, except for strings that are read as numbers or booleans
(`lax_scalars`); `unsupported_fields` handles fields that are not here.

The answer's code checks constraints between fields; `between_fields` describes them in the JSON schema.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

from model_runner import MAX_BAD_TOKENS, MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from serving.api.schema.body import Body, optional, or_else
from serving.api.schema.unsupported_fields import CHAT, COMPLETIONS, TOKENIZE
from serving.text.words import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARACTERS = 256

FunctionName = Annotated[
    str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS, pattern=r"^[\w.:/-]+$", description="no white space")
]


class _Tool(BaseModel):
    """Other fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")


class FunctionDefinition(_Tool):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = optional("JSON schema of an object; none for no parameters")
    strict: bool | None = optional("only with a tool_choice that forces the call it is enforced")


class Tool(_Tool):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    """A function of the request's tools."""

    name: str


class NamedToolChoice(BaseModel):
    """The call that the model must make."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
EXPECTED_CHOICE = "'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}"


_Text = Annotated[str, Field(min_length=1)]


class JsonSchemaFormat(Body):
    """A JSON schema, as OpenAI's clients send it."""

    place = "response_format.json_schema."

    name: str | None = optional("changes nothing")
    description: str | None = optional("changes nothing")
    schema_: dict[str, Any] = Field(alias="schema", description="what the output must be, as JSON")
    strict: bool | None = optional("changes nothing: the schema is always enforced as it is")


class ResponseFormat(Body):
    """The form of the output. `json_object`: any JSON object."""

    place = "response_format."
    closed = True
    between_fields = (
        {
            "anyOf": [
                {"properties": {"type": {"enum": ["text", "json_object", "structural_tag"]}}},
                {"properties": {"json_schema": {"type": "object"}}, "required": ["json_schema"]},
            ]
        },
    )

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = optional("with json_schema only")
    structures: list[dict[str, Any]] | None = optional("with structural_tag: begin, schema, end")
    triggers: list[_Text] | None = optional("with structures: texts that begin one")
    format: dict[str, Any] | None = optional("with structural_tag, in place of structures: xgrammar's")


class StructuredOutputs(Body):
    """The form of the output; exactly one of the first six."""

    model_config = ConfigDict(protected_namespaces=())
    place = "structured_outputs."
    closed = True

    json_: Annotated[dict[str, Any] | str | None, or_else("a JSON schema, as an object or as text")] = optional(
        "a JSON schema, or its text", alias="json"
    )
    regex: str | None = optional("a regular expression that the whole output matches")
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = optional("the output is one of these")
    grammar: _Text | None = optional("a context-free grammar, in Lark's or GBNF's notation")
    json_object: bool | None = optional("any JSON object")
    structural_tag: Annotated[dict[str, Any] | str | None, or_else("a structural tag, as an object or as text")] = (
        optional("as in response_format, or its text")
    )
    whitespace_pattern: str | None = optional(
        "regular expression of the white space between JSON's tokens (one blank, or a line's end and an indentation)"
    )
    disable_any_whitespace: bool | None = optional("JSON without white space")
    disable_additional_properties: bool | None = optional(
        "objects have no other properties than those of the schema, where it does not say so"
    )


DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions
MAX_OUTPUTS = 128
MAX_DETOKENIZED = 2**17
"""Most token ids that are turned into text at once: the tokenizer holds all other threads meanwhile."""
Int64 = Field(ge=-(2**63), le=2**63 - 1)  # the range of integers in messages to an engine


ModelName = Annotated[str | None, Field(description="a name that /v1/models lists; the only one where left out")]


class CheckedIds(list[int]):
    """Token ids that were found to be integers from 0 already, piece by piece: see `serving.api.http.bodies`."""


def _unless_checked(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, CheckedIds) else handler(value)


# A list may have a million items, so validation stops at the first wrong one.
AnyIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), WrapValidator(_unless_checked)]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True), WrapValidator(_unless_checked)
]
Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | TokenIds
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    or_else("a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"),
]
TruncatedLength = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1)] | None, or_else("a number of tokens, or -1 for what there is room for")
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None,
    or_else(
        f"a string or a list of at most {MAX_STOP_STRINGS} strings, none of them empty or of more than "
        f"{MAX_STOP_CHARACTERS} characters"
    ),
]

BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]], Field(max_length=MAX_BAD_WORDS)
]


_ON: Mapping[str, Any] = {"const": True}
_OFF: Mapping[str, Any] = {"enum": [False, None]}
_NULL: Mapping[str, Any] = {"type": "null"}
_SOME: Mapping[str, Any] = {"minimum": 1}
_FEW: Mapping[str, Any] = {"maximum": DEFAULT_MAX_TOKENS}


def _either(*options: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """JSON schema: the fields must have one of these combinations of values. An omitted field is off, or null."""
    optional = (_OFF, _NULL, _SOME, _FEW)
    return {
        "anyOf": [
            {"properties": values, "required": [name for name, value in values.items() if value not in optional]}
            for values in options
        ]
    }


class StreamOptions(Body):
    """What a stream sends besides the text."""

    place = "stream_options."

    include_usage: bool = Field(False, description="send the token usage in a last chunk")
    continuous_usage_stats: bool = Field(False, description="send it in every chunk; needs include_usage")


_STREAMED_OR_NOT = _either({"stream": _OFF, "stream_options": _NULL}, {"stream": _ON, "prompt_logprobs": _NULL})


class GenerationRequest(Body):
    """Fields shared by completions and chat completions. A default that is not given here is the checkpoint's
    (`generation_config.json`), or OpenAI's if the checkpoint has none."""

    model: ModelName = None
    n: int | None = optional("outputs per prompt (1)", ge=1, le=MAX_OUTPUTS)
    stop: Stop = optional("strings that end the output; not part of the text")
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = optional(
        "tokens that end the output"
    )
    seed: Annotated[int | None, Int64] = optional("makes the outputs repeatable; output i has seed + i")
    temperature: float | None = optional("0 is greedy (1)", ge=0, le=2)
    top_p: float | None = optional("most likely tokens with this mass (1)", gt=0, le=1)
    top_k: int | None = optional("only the k most likely tokens; 0 or -1 for all (0)", ge=-1, le=2**63 - 1)
    min_p: float | None = optional("least share of the highest probability (0)", ge=0, le=1)
    presence_penalty: float | None = optional("for tokens in the output (0)", ge=-2, le=2)
    frequency_penalty: float | None = optional("the same, once per occurrence in the output (0)", ge=-2, le=2)
    repetition_penalty: float | None = optional("divides logits of tokens in prompt and output (1)", gt=0)
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = optional(
        "token id -> -100 to 100"
    )
    allowed_token_ids: TokenIds | None = optional("generate only these tokens")
    bad_words: BadWords | None = optional(
        "words whose token sequences are never generated, with or without a space before; at most "
        f"{MAX_BAD_TOKENS} tokens in all"
    )
    min_tokens: int | None = optional("least tokens before the output may end (0)", ge=0)
    ignore_eos: bool | None = optional("go on after an end-of-sequence token")
    skip_special_tokens: bool | None = optional("leave out special tokens (true)")
    include_stop_str_in_output: bool | None = optional("keep the stop string in the text")
    response_format: ResponseFormat | None = optional("the form of the output (text)")
    structured_outputs: StructuredOutputs | None = optional("the same, in vLLM's form; send one")
    stream: bool | None = optional("answer with server-sent events")
    stream_options: StreamOptions | None = optional("only with stream")
    priority: Annotated[int | None, Int64] = optional("lower runs earlier, with --scheduling-policy priority")
    add_special_tokens: bool | None = optional("the tokenizer adds its special tokens")
    best_of: int | None = optional("must be 1 or n: all outputs are returned", json_schema_extra={"enum": [1, None]})
    truncate_prompt_tokens: TruncatedLength = optional(
        "truncate a longer prompt to this many tokens; -1: to what fits the context"
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "which end is cut off: left keeps the last tokens (left)"
    )
    prompt_logprobs: int | None = optional(
        "log-probabilities of the prompt and this many top tokens; not in streams", ge=0, le=MAX_TOP_LOGPROBS
    )
    return_token_ids: bool | None = optional("also return the token ids of prompt and output")
    return_tokens_as_token_ids: bool | None = optional("logprobs names tokens as `token_id:5`, not by their text")


class CompletionRequest(GenerationRequest):
    """Continue one or more prompts."""

    refused = COMPLETIONS
    between_fields = (
        _STREAMED_OR_NOT,
        _either({"max_tokens": _SOME}, {"echo": _ON}),
        _either({"min_tokens": _FEW}, {"max_tokens": {"type": "integer"}}),
    )

    prompt: Prompt = Field(description="text or token ids, or several of either")
    max_tokens: int | None = optional(
        "tokens per output (the checkpoint's max_new_tokens, or 16); 0 only with echo", ge=0
    )
    logprobs: int | None = optional("of the output and this many top tokens", ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = optional("the text begins with the prompt")


class TextPart(Body):
    """A part of a message."""

    place = "messages.content."

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Other fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None,
        or_else("a string or a list of text parts, {'type': 'text', 'text': ...}; other parts are not supported"),
    ] = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversationOptions(BaseModel):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = optional(
        "begin the assistant's turn (true; false with continue_final_message)"
    )
    continue_final_message: bool | None = optional(
        "the answer continues the last message; not with add_generation_prompt"
    )
    reasoning_effort: ReasoningEffort | None = optional(
        "passed to the chat template as reasoning_effort; sets enable_thinking, false for none"
    )
    chat_template_kwargs: dict[str, Any] | None = optional("variables for the chat template")
    tools: Tools | None = optional("functions that the model may call; the chat template shows them")

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


_ONE_ENDING = _either({"add_generation_prompt": _OFF}, {"continue_final_message": _OFF})


class ChatCompletionRequest(GenerationRequest, ConversationOptions):
    """Answer a conversation."""

    refused = CHAT
    between_fields = (_STREAMED_OR_NOT, _ONE_ENDING, _either({"top_logprobs": _NULL}, {"logprobs": _ON}))

    messages: Messages = Field(description="the conversation so far")
    max_completion_tokens: int | None = optional(
        "tokens per output (the checkpoint's max_new_tokens, or what is left of the context)", ge=1
    )
    max_tokens: int | None = optional("older name of max_completion_tokens", ge=1)
    logprobs: bool | None = optional("return the output's log-probabilities")
    top_logprobs: int | None = optional("number of top tokens per position", ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = optional("begin with the last message, if it has the answer's role")
    tool_choice: Annotated[ToolChoice | None, or_else(EXPECTED_CHOICE)] = optional(
        "whether tools are called (auto with tools, which needs --enable-auto-tool-choice; else none)"
    )
    parallel_tool_calls: bool | None = optional("the model may make several calls (true)")
    include_reasoning: bool | None = optional("the answer has the reasoning (true)")
    separate_reasoning: bool | None = optional("reasoning is no part of the content, with --reasoning-parser (true)")


class TokenizeRequest(Body, ConversationOptions):
    """A prompt or a conversation to turn into token ids; exactly one of them."""

    refused = TOKENIZE
    between_fields = (
        _ONE_ENDING,
        _either({"prompt": {"type": "string"}, "messages": _NULL}, {"messages": {"type": "array"}, "prompt": _NULL}),
    )

    model: ModelName = None
    prompt: str | None = optional("a text")
    messages: Messages | None = optional("a conversation")
    add_special_tokens: bool | None = optional("true for a prompt, false for messages")
    return_token_strs: bool | None = optional("also return the vocabulary's strings")


class DetokenizeRequest(Body):
    """Token ids to turn into text."""

    model: ModelName = None
    tokens: AnyIds = Field(description="token ids", json_schema_extra={"maxItems": MAX_DETOKENIZED})
    skip_special_tokens: bool | None = optional("leave out special tokens (false)")
