"""Bodies of responses, and of the chunks of a stream.

A whole answer has all of its fields, null where there is nothing to tell. So do vLLM's, whose clients index them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

FinishReasonName = Literal["stop", "length"]
ChatFinishReasonName = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = Field(description="the field that is wrong")
    code: str | None = Field(description="identifies the kind of error, for programs")
    request_id: str = Field("", description="the request's `X-Request-Id`, or a generated one")


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int = Field(description="tokens found in the prefix cache")


class CompletionTokensDetails(BaseModel):
    """Details of the output's tokens."""

    accepted_prediction_tokens: int = Field(description="draft tokens that were accepted")
    rejected_prediction_tokens: int = Field(description="draft tokens that were rejected")
    reasoning_tokens: int = Field(description="tokens whose text is reasoning; of chats only")


class Usage(BaseModel):
    """Numbers of tokens. A prompt counts once, even if it has several outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionLogprobs(BaseModel):
    """Log-probabilities, one entry per token. A token that is part of a character is named `bytes:\\xe4\\xb8`."""

    text_offset: list[int] = Field(description="where each token's text begins in the choice's text")
    token_logprobs: list[float | None] = Field(description="null for a prompt's first token")
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] = Field(description="the token itself, then the most likely ones")


class PromptLogprob(BaseModel):
    """The log-probability of a token at a position of the prompt."""

    logprob: float
    rank: int = Field(description="1 is the most likely")
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | None,
    Field(
        description="with prompt_logprobs only; per prompt token: token id -> entry, for it and then the most likely "
        "tokens; null for the first"
    ),
]
TokenIds = Annotated[list[int] | None, Field(description="with return_token_ids only")]
StopReason = Annotated[
    str | int | None,
    Field(description="the stop string or stop token that ended the output; null for the end of sequence, as in vLLM"),
]
MatchedStop = Annotated[
    str | int | None,
    Field(description="the stop string or token that ended the output, also the end of sequence, as in SGLang"),
]
NeverFilled = Annotated[None, Field(description="always null: a field of vLLM's")]


class _Answer(BaseModel):
    id: str
    created: int
    model: str


class _WholeAnswer(_Answer):
    usage: Usage
    service_tier: NeverFilled
    system_fingerprint: NeverFilled
    kv_transfer_params: NeverFilled
    ec_transfer_params: NeverFilled
    metrics: NeverFilled


class _Choice(BaseModel):
    index: int
    stop_reason: StopReason
    matched_stop: MatchedStop


class _WholeChoice(_Choice):
    token_ids: TokenIds
    routed_experts: NeverFilled


class CompletionChoice(_WholeChoice):
    """One output."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    prompt_token_ids: TokenIds
    prompt_logprobs: PromptLogprobs


class Completion(_WholeAnswer):
    """The answer of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class CompletionChunkChoice(_Choice):
    """The new part of one output."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    token_ids: TokenIds
    prompt_token_ids: TokenIds = Field(description="with the first event of each choice, if return_token_ids")


class CompletionChunk(_Answer):
    """One event of a streamed completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice] = Field(description="empty in the chunk with the usage only")
    usage: Usage | None = Field(None, description="with stream_options.include_usage only")


class TopLogprob(BaseModel):
    """A possible token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A token of the output. A token that is part of a character is named `bytes:\\xe4\\xb8`."""

    top_logprobs: list[TopLogprob] = Field(description="the token itself, then the most likely ones")


class ChatLogprobs(BaseModel):
    """Log-probabilities, one entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    """A function and its arguments."""

    name: str
    arguments: str = Field(description="JSON, as the model wrote it: it may not fit the tool's schema")


class ToolCall(BaseModel):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The answer."""

    role: str = Field(description="assistant, unless the answer continues a message of another role")
    content: str | None = Field(description="null where there are only tool calls, or reasoning")
    refusal: None
    annotations: None
    audio: None
    function_call: None
    tool_calls: list[ToolCall] | None = Field(description="null if there are none")
    reasoning: str | None = Field(description="with --reasoning-parser only; null if there is none")
    reasoning_content: str | None = Field(description="the same, by its older name")


class ChatChoice(_WholeChoice):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonName


class ChatCompletion(_WholeAnswer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: TokenIds
    prompt_logprobs: PromptLogprobs
    prompt_text: NeverFilled


class FunctionDelta(BaseModel):
    """The new part of a call's function."""

    name: str = Field("", description="in the call's first part only")
    arguments: str = Field(description="to be appended")


class ToolCallPart(BaseModel):
    """The new part of a call."""

    index: int = Field(description="which call of the message")
    id: str = Field("", description="in the call's first part only")
    type: Literal["function"] = Field("function", description="in the call's first part only")
    function: FunctionDelta


class ChatDelta(BaseModel):
    """The new part of a message."""

    role: str | None = None
    content: str | None = None
    reasoning: str = Field("", description="with --reasoning-parser only")
    reasoning_content: str = Field("", description="the same, by its older name")
    tool_calls: list[ToolCallPart] = []


class ChatChunkChoice(_Choice):
    """The new part of one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonName | None
    token_ids: TokenIds = Field(None, description="not in the event with the role; null unless return_token_ids")


class ChatCompletionChunk(_Answer):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice] = Field(description="empty in the chunk with the usage only")
    prompt_token_ids: TokenIds = Field(None, description="in the first event; null unless return_token_ids")
    usage: Usage | None = Field(None, description="with stream_options.include_usage only")


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ubatch"
    root: str | None = Field(description="the checkpoint, as it was named at the start")
    parent: None = None
    permission: list[None] = Field(default_factory=list, description="always empty")
    max_model_len: int = Field(description="context length: most tokens of prompt and output together")


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    """A prompt's token ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """The text of token ids."""

    prompt: str


class ProfileFiles(BaseModel):
    """The traces that were written, one per rank."""

    files: list[str]


class Status(BaseModel):
    """The server's status."""

    status: str


class Version(BaseModel):
    """This package's version."""

    version: str
