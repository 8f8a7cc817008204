"""The routes, and what `/openapi.json` says of each."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.api.answer import Answer
from serving.api.chat import ChatAnswer
from serving.api.completions import CompletionAnswer
from serving.api.errors import ApiError
from serving.api.prompts import check_token_ids, conversation_text, decode, encode
from serving.api.request_models import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from serving.api.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Detokenized,
    ErrorBody,
    ModelCard,
    ModelList,
    ProfileFiles,
    Status,
    Tokenized,
    Version,
)
from serving.api.service import Service
from serving.api.sse import ClientLeft, EventStream, until_client_leaves
from serving.requests import EngineDead
from ubatch import UBatchError

__all__ = ["STREAMED", "router"]

CLIENT_LEFT = 499  # nginx's; nobody reads it
STREAMED = (CompletionChunk, ChatCompletionChunk)

router = APIRouter()


def _errors(**said: str) -> dict[int | str, dict[str, Any]]:
    """Descriptions of a route's errors. `default` also keeps FastAPI from adding a 422 that never comes."""
    known = {"401": "the server was started with an API key, and this is not it", **said, "default": "any other error"}
    return {
        int(status) if status.isdecimal() else status: {"model": ErrorBody, "description": text}
        for status, text in known.items()
    }


WRONG_VALUE = "a value is wrong, or the prompt does not fit (`context_length_exceeded`)"
UNKNOWN_MODEL = "no model has this name (`model_not_found`)"
NO_PROFILE = "no profile was started, or it could not be written (`no_profile`)"
GENERATION_ERRORS = {
    "400": WRONG_VALUE,
    "404": UNKNOWN_MODEL,
    "500": "the engine failed at this request",
    "503": "too many requests wait, the server is about to end, or its engine is dead; see `Retry-After`",
}


def _generates(chunk: type) -> dict[int | str, dict[str, Any]]:
    schema = {"$ref": f"#/components/schemas/{chunk.__name__}"}
    description = (
        f"The whole answer; or, with `stream`, server-sent events: `data:` with a {chunk.__name__} each, an ErrorBody "
        f"if it fails midway, and `[DONE]` at the end."
    )
    streamed = {"description": description, "content": {"text/event-stream": {"schema": schema}}}
    return {200: streamed, **_errors(**GENERATION_ERRORS)}


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _admit(request: Request, model: str | None) -> Service:
    service = _service(request)
    service.model_name(model)
    service.admit(draining=request.app.state.draining)
    return service


async def _respond(request: Request, answer: Answer, *, stream: bool) -> Response:
    if stream:
        return EventStream(answer.events())
    try:
        whole = await until_client_leaves(request.receive, answer.collect())
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT)
    return Response(whole.model_dump_json(), media_type="application/json")


@router.post("/v1/completions", response_model=Completion, responses=_generates(CompletionChunk))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts."""
    service = _admit(request, body.model)
    return await _respond(request, await CompletionAnswer.make(service, body), stream=bool(body.stream))


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=_generates(ChatCompletionChunk))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, with the checkpoint's chat template."""
    service = _admit(request, body.model)
    return await _respond(request, await ChatAnswer.make(service, body), stream=bool(body.stream))


@router.get("/v1/models", responses=_errors())
async def list_models(request: Request) -> ModelList:
    """The names of the model that is served."""
    service = _service(request)
    return ModelList(data=[_card(service, name) for name in service.names])


@router.get("/v1/models/{model:path}", responses=_errors(**{"404": UNKNOWN_MODEL}))
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """One of them."""
    service = _service(request)
    return _card(service, service.model_name(model))


@router.post("/tokenize", responses=_errors(**{"400": WRONG_VALUE, "404": UNKNOWN_MODEL}))
async def tokenize(body: TokenizeRequest, request: Request) -> Tokenized:
    """Token ids of a prompt, or of a conversation written by the chat template."""
    service = _service(request)
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    add_special_tokens = body.add_special_tokens
    if body.messages is not None:
        text = conversation_text(
            service,
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_options=body.chat_template_kwargs or {},
        )
        tokens = await encode(service, text, add_special_tokens=bool(add_special_tokens))
    else:
        tokens = await encode(service, body.prompt or "", add_special_tokens=add_special_tokens is not False)
    return Tokenized(
        count=len(tokens),
        max_model_len=service.engine.info.max_model_len,
        tokens=tokens,
        token_strs=service.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
    )


@router.post("/detokenize", responses=_errors(**{"400": WRONG_VALUE, "404": UNKNOWN_MODEL}))
async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
    """The text of token ids, special tokens too."""
    service = _service(request)
    service.model_name(body.model)
    check_token_ids(body.tokens, service.engine.info.vocab_size, "tokens")
    return Detokenized(prompt=decode(service, body.tokens, skip_special_tokens=False))


@router.get("/health", responses={503: {"model": ErrorBody, "description": "the engine is dead; the message says why"}})
async def health(request: Request) -> Status:
    """Whether the engine runs."""
    dead = _service(request).engine.dead
    if dead is not None:
        raise ApiError(503, f"The engine is dead: {dead}", code="engine_dead")
    return Status(status="draining" if request.app.state.draining else "ok")


@router.get("/version")
async def show_version() -> Version:
    """The server's version."""
    return Version(version=version("ubatch"))


@router.post("/start_profile", responses=_errors(**{"500": "the engine failed"}))
async def start_profile(request: Request) -> Status:
    """Begin to trace the steps of every rank."""
    await _service(request).engine.start_profile()
    return Status(status="profiling")


@router.post("/stop_profile", responses=_errors(**{"409": NO_PROFILE, "500": "the engine failed"}))
async def stop_profile(request: Request) -> ProfileFiles:
    """End it, and write the traces: Chrome's format, which Perfetto shows."""
    try:
        files = await _service(request).engine.stop_profile()
    except EngineDead:
        raise
    except UBatchError as error:
        raise ApiError(409, f"There is no profile: {error}", code="no_profile") from error
    return ProfileFiles(files=[str(path) for path in files])


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=service.created, max_model_len=service.engine.info.max_model_len)
