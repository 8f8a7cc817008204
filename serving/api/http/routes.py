"""The routes, and what `/openapi.json` says of each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from serving.api import prompts
from serving.api.answer import Answer
from serving.api.chat import ChatAnswer
from serving.api.completions import CompletionAnswer
from serving.api.http.bodies import JsonRoute
from serving.api.responses.answer import ResponsesAnswer
from serving.api.schema.errors import ApiError, engine_dead, restarting
from serving.api.schema.request_models import (
    MAX_DETOKENIZED,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from serving.api.schema.response_models import (
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
from serving.api.schema.responses_models import ModelResponse, ResponseEvent
from serving.api.schema.responses_request import ResponsesRequest
from serving.api.service import Service
from serving.api.sse import EventStream, until_client_leaves
from serving.requests import EngineDead, EngineRestarting
from ubatch import UBatchError
from ubatch.errors import cut

JSON = "application/json"
STREAMED = (CompletionChunk, ChatCompletionChunk, ResponseEvent)
_Asked = TypeVar("_Asked", bound=GenerationRequest | ResponsesRequest)
_Making = Coroutine[Any, Any, Answer]

router = APIRouter(route_class=JsonRoute)


def _errors(**said: str) -> dict[int | str, dict[str, Any]]:
    """Descriptions of a route's errors. `default` also keeps FastAPI from adding a 422, which is never sent."""
    known = {"401": "the API key is missing or wrong (`invalid_api_key`)", **said, "default": "any other error"}
    return {
        int(status) if status.isdecimal() else status: {"model": ErrorBody, "description": text}
        for status, text in known.items()
    }


TOO_LARGE = "the body is larger than --max-request-bytes (`request_too_large`)"
WRONG_VALUE = "a value is wrong, or the prompt does not fit (`context_length_exceeded`)"
UNKNOWN_MODEL = "no model has this name (`model_not_found`)"
NO_PROFILE = "no profile was started, or its files could not be written (`no_profile`)"
PROFILES_OFF = "the server was started without `--profile-dir` (`profiles_off`)"
GENERATION_ERRORS = {
    "400": WRONG_VALUE,
    "404": UNKNOWN_MODEL,
    "413": TOO_LARGE,
    "500": "the engine failed during this request (`engine_dead`), or because of it (`poisonous_request`)",
    "503": "too many requests wait, the server is shutting down, or its engine is dead or started again; see "
    "`Retry-After`",
}
NOT_NOW = (
    "the engine is dead (`engine_dead`) or started again (`engine_restarting`), or the server shuts down "
    "(`shutting_down`); see `Retry-After`"
)
UNHEALTHY: dict[int | str, dict[str, Any]] = {503: {"model": ErrorBody, "description": NOT_NOW}}
DEAD: dict[int | str, dict[str, Any]] = {
    503: {"model": ErrorBody, "description": "the engine is dead, and the server ends (`engine_dead`)"}
}

TOKEN_ERRORS = {name: GENERATION_ERRORS[name] for name in ("400", "404", "413", "503")}


def _generates(chunk: type, *, named: bool = False) -> dict[int | str, dict[str, Any]]:
    told = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in (chunk, ErrorBody)]
    data: list[dict[str, Any]] = [{"contentMediaType": JSON, "contentSchema": {"anyOf": told[: 1 if named else 2]}}]
    each = f"`data:` with a {chunk.__name__} each, an ErrorBody if it fails midway, and `[DONE]` at the end."
    if named:
        each = f"`event:` with its type and `data:` with a {chunk.__name__} each; the last one says how it ended."
    else:
        data.insert(0, {"const": "[DONE]"})
    schema = {"type": "object", "properties": {"data": {"type": "string", "anyOf": data}}, "required": ["data"]}
    description = f"The whole answer; or, with `stream`, server-sent events: {each}"
    streamed = {"description": description, "content": {"text/event-stream": {"schema": schema}}}
    return {200: streamed, **_errors(**GENERATION_ERRORS)}


def _service(request: Request) -> Service:
    return request.app.state.service


def _admit(request: Request, model: str | None) -> Service:
    service = _service(request)
    service.model_name(model)
    service.admit()
    return service


async def _generate(request: Request, body: _Asked, make: Callable[[Service, _Asked, int], _Making]) -> Response:
    service = _admit(request, body.model)
    answer = await until_client_leaves(request.receive, make(service, body, await _size(request)))
    if body.stream:
        paused, comment_s = lambda: service.paused, service.comment_s
        return EventStream(answer.events(), answer.done, paused=paused, comment_s=comment_s)
    return Response(await until_client_leaves(request.receive, answer.collect()), media_type=JSON)


async def _run(request: Request, work: Callable[[], BaseModel]) -> Response:
    """Answer a request that needs no engine; a large body's work runs in a thread."""
    answered = _service(request).long_work.run(lambda: work().model_dump_json(), await _size(request))
    return Response(await until_client_leaves(request.receive, answered), media_type=JSON)


async def _size(request: Request) -> int:
    """Bytes of the body. FastAPI has read it already."""
    return len(await request.body())


@router.post("/v1/completions", response_model=Completion, responses=_generates(CompletionChunk))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one or more prompts."""
    return await _generate(request, body, CompletionAnswer.make)


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=_generates(ChatCompletionChunk))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, with the checkpoint's chat template."""
    return await _generate(request, body, ChatAnswer.make)


@router.post("/v1/responses", response_model=ModelResponse, responses=_generates(ResponseEvent, named=True))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation of items: messages, function calls, their outputs, and reasoning. Nothing is stored."""
    return await _generate(request, body, ResponsesAnswer.respond)


@router.api_route("/v1/responses/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def stored_response(rest: str, request: Request) -> Response:
    """Refuse what asks for a response that was stored."""
    message = (
        f"/v1/responses/{cut(rest)} is not there: nothing is stored. Keep the response, and send its items as input."
    )
    raise ApiError(404, message, code="not_stored")


@router.get("/v1/models", responses=_errors())
async def list_models(request: Request) -> ModelList:
    """The names of the model that is served."""
    service = _service(request)
    return ModelList(data=[_card(service, name) for name in service.names])


@router.get("/v1/models/{model:path}", responses=_errors(**{"404": UNKNOWN_MODEL}))
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """One name of the model that is served."""
    service = _service(request)
    return _card(service, service.model_name(model))


@router.post("/tokenize", response_model=Tokenized, responses=_errors(**TOKEN_ERRORS))
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a prompt, or of a conversation written by the chat template."""
    service = _service(request)
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    prompts.check_conversation(body)

    def work() -> Tokenized:
        text, add_special_tokens, param = body.prompt or "", body.add_special_tokens is not False, "prompt"
        if body.messages is not None:
            text = prompts.conversation_text(service, body.messages, body)
            add_special_tokens, param = bool(body.add_special_tokens), "messages"
        prompts.check_characters(service, text, param, cut=True)
        tokens = prompts.encode(service, text, add_special_tokens=add_special_tokens)
        return Tokenized(
            count=len(tokens),
            max_model_len=service.engine.info.max_model_len,
            tokens=tokens,
            token_strs=service.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
        )

    return await _run(request, work)


@router.post("/detokenize", response_model=Detokenized, responses=_errors(**TOKEN_ERRORS))
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, with special tokens unless `skip_special_tokens` is set."""
    service = _service(request)
    service.model_name(body.model)

    if len(body.tokens) > MAX_DETOKENIZED:
        message = f"tokens: {len(body.tokens)} token ids; at most {MAX_DETOKENIZED} are turned into text at once."
        raise ApiError(400, message, param="tokens")

    def work() -> Detokenized:
        service.check_token_ids(body.tokens, "tokens")
        return Detokenized(
            prompt=prompts.decode(service, body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        )

    return await _run(request, work)


@router.get("/health", responses=UNHEALTHY)
@router.get("/ping", responses=UNHEALTHY)
@router.post("/ping", responses=UNHEALTHY)
async def health(request: Request) -> Status:
    """Whether new requests are served at once: the engines run, and the server is not shutting down."""
    service = _service(request)
    if service.engine.dead is not None:
        raise engine_dead(service.engine.dead)
    if service.draining:
        raise ApiError(503, "The server is shutting down; send requests to another one.", code="shutting_down")
    if service.engine.pause is not None:
        raise restarting(service.engine.pause)
    return Status(status="ok")


@router.get("/live", responses=DEAD)
async def live(request: Request) -> Status:
    """Whether the server should be left alone: its engines run, or it starts them again by itself. Once it answers 503,
    the server ends."""
    service = _service(request)
    if service.engine.dead is not None:
        raise engine_dead(service.engine.dead)
    return Status(status="ok")


@router.get("/version")
async def show_version() -> Version:
    """The server's version."""
    return Version(version=version("ubatch"))


@router.post("/start_profile", responses=_errors(**{"404": PROFILES_OFF, "500": "the engine failed"}))
async def start_profile(request: Request) -> Status:
    """Start to trace the steps of every rank."""
    await _profiling(request).engine.start_profile()
    return Status(status="profiling")


@router.post("/stop_profile", responses=_errors(**{"404": PROFILES_OFF, "409": NO_PROFILE, "500": "the engine failed"}))
async def stop_profile(request: Request) -> ProfileFiles:
    """Stop tracing, and write the traces in Chrome's format, which Perfetto shows."""
    try:
        files = await _profiling(request).engine.stop_profile()
    except (ApiError, EngineDead, EngineRestarting):
        raise
    except UBatchError as error:
        raise ApiError(409, f"There is no profile: {error}", code="no_profile") from error
    return ProfileFiles(files=[str(path) for path in files])


def _profiling(request: Request) -> Service:
    service = _service(request)
    if not service.profiles:
        message = "This server records no profiles; start it with --profile-dir FOLDER, where they are written."
        raise ApiError(404, message, code="profiles_off")
    return service


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=service.created, root=service.root, max_model_len=service.engine.info.max_model_len
    )
