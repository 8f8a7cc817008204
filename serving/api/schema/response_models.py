"""Bodies of responses, and of the chunks of a stream."""

from __future__ import annotations

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
    reasoning_tokens: int = Field(0, description="of chats only")


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
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(BaseModel):
    """The log-probability of a token at a position of the prompt."""

    logprob: float
    rank: int = Field(description="1 is the most likely")
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Field(description="per prompt token: token id -> entry, for it and the most likely tokens; null for the first"),
]
TokenIds = Annotated[list[int], Field(description="with return_token_ids only")]


class _Answer(BaseModel):
    id: str
    created: int
    model: str


class _Choice(BaseModel):
    index: int
    token_ids: TokenIds = []


class CompletionChoice(_Choice):
    """One output."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    prompt_token_ids: TokenIds = []
    prompt_logprobs: PromptLogprobs = []


class Completion(_Answer):
    """The answer of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(_Choice):
    """The new part of one output."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName | None
    prompt_token_ids: TokenIds = Field([], description="with the first event of each choice")


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

    top_logprobs: list[TopLogprob]


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
    refusal: None = None
    reasoning: str = Field("", description="with --reasoning-parser only; left out if there is none")
    reasoning_content: str = Field("", description="the same, by its older name")
    tool_calls: list[ToolCall] = Field([], description="left out if there are none")


class ChatChoice(_Choice):
    """One answer."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReasonName


class ChatCompletion(_Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: TokenIds = []
    prompt_logprobs: PromptLogprobs = []


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


class ChatCompletionChunk(_Answer):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice] = Field(description="empty in the chunk with the usage only")
    prompt_token_ids: TokenIds = Field([], description="with the first event")
    usage: Usage | None = Field(None, description="with stream_options.include_usage only")


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ubatch"
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
