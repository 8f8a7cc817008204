"""The answer of `/v1/responses`, and the events of its stream."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from serving.api.schema.response_models import ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """A text of the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]] = Field(description="always empty")
    logprobs: list[ChatTokenLogprob] = Field(description="with message.output_text.logprobs in include only")


class OutputMessage(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputFunctionCall(BaseModel):
    """A call for the client to make; its result is sent as a function_call_output with the same call_id."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str = Field(description="a JSON object, as text")


class OutputReasoningText(BaseModel):
    """A text that the model thinks."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What the model thought."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]] = Field(description="always empty: content has all of the text")
    content: list[OutputReasoningText]


OutputItem = OutputMessage | OutputFunctionCall | OutputReasoning


class InputTokensDetails(BaseModel):
    """Details of the input's tokens."""

    cached_tokens: int = Field(description="tokens found in the prefix cache")
    cache_write_tokens: int = Field(description="always 0: what is written to the cache is not counted")


class OutputTokensDetails(BaseModel):
    """Details of the output's tokens."""

    reasoning_tokens: int = Field(description="tokens whose text is reasoning")


class ResponseUsage(BaseModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a response failed midway."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ModelResponse(BaseModel):
    """The answer of /v1/responses: the output, and the settings that made it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = Field(None, description="only of a completed response")
    status: Literal["completed", "incomplete", "failed", "in_progress"] = Field(
        description="failed and in_progress in events only"
    )
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = Field(description="null while the response is in progress")
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False] = Field(description="nothing is stored")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]


class DeltaLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float


class DeltaTokenLogprob(DeltaLogprob):
    """A token of the output."""

    top_logprobs: list[DeltaLogprob]


class ResponseEvent(BaseModel):
    """One event of a streamed response. Each has the fields of its type, as the OpenAI API documents them."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "error",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int = Field(description="counts the events, from 0")
    response: ModelResponse | None = None
    output_index: int | None = Field(None, description="the item's place in the output")
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = Field(None, description="the part's place in the item's content; always 0")
    part: OutputText | OutputReasoningText | None = None
    delta: str | None = Field(None, description="the next piece of the text, or of the arguments")
    text: str | None = None
    logprobs: list[ChatTokenLogprob | DeltaTokenLogprob] | None = Field(
        None, description="of the delta, without bytes; or of the whole text"
    )
    name: str | None = None
    arguments: str | None = None
    code: str | None = Field(None, description="of an error, like message and param")
    message: str | None = None
    param: str | None = None
