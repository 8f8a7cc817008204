"""Errors as OpenAI's clients expect them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from attention import KVCacheExhausted
from model_runner import RequestError
from serving.engine.restarts import Pause
from serving.logs import request_id
from serving.requests import EngineDead, EngineRestarting, PoisonousRequest, QueueFull
from ubatch import UBatchError
from ubatch.errors import SHOWN_CHARACTERS, cut, shown

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
POISONOUS = "poisonous_request"
UNSUPPORTED = "unsupported"  # type of the validation error for an unsupported field


class ApiError(UBatchError):
    """An error that is sent to the client.

    Args:
        code: identifies the kind of error, for programs.
        retry_after_s: when to try again, with status 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error as a JSON object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        own = request_id.get()
        return {"error": error if own is None else {**error, "request_id": own}}


def shutting_down() -> ApiError:
    """The error for new requests while the server shuts down."""
    return ApiError(503, "The server is shutting down and takes no new requests.", code="shutting_down")


def engine_dead(error: EngineDead) -> ApiError:
    """The error for whoever asks for the engines after their end."""
    return ApiError(503, f"The engine is dead: {error}", code="engine_dead")


def restarting(pause: Pause) -> ApiError:
    """The error for whoever asks whether engines serve while they are started again."""
    left_s = math.ceil(pause.left_s)
    message = f"The engines are being started again, which should take another {left_s} s: {pause.reason}"
    return ApiError(503, message, code="engine_restarting", retry_after_s=left_s)


def as_api_error(error: Exception) -> ApiError:
    """The error that the client gets for any exception. An unexpected one is logged, and its text is not sent."""
    match error:
        case ApiError():
            return error
        case KVCacheExhausted():
            return ApiError(400, str(error), code="context_length_exceeded")
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case QueueFull():
            return ApiError(503, str(error), code="queue_full")
        case EngineDead():
            return ApiError(500, str(error), code="engine_dead")
        case EngineRestarting():
            return ApiError(503, str(error), code="engine_restarting", retry_after_s=error.retry_after_s)
        case PoisonousRequest():
            return ApiError(500, str(error), code=POISONOUS)
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "The server failed during this request; its log says why.")


def error_response(error: ApiError) -> Response:
    """The HTTP response for an error; 503 has `Retry-After`, in whole seconds. OpenAI's clients try again after every
    other 500; not a request that would kill engines again."""
    retry_after = {"Retry-After": str(math.ceil(error.retry_after_s))}
    headers = retry_after if error.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    if error.code == POISONOUS:
        headers["X-Should-Retry"] = "false"
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(error.body)
    return Response(content, status_code=error.status, headers=headers, media_type="application/json")


def add_error_handlers(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Give every error of the application OpenAI's body, including FastAPI's own errors.

    Args:
        routes: the included router's routes, which `app.routes` may lack.
    """

    async def handle(request: Request, error: Exception) -> Response:
        match error:
            case RequestValidationError():
                return error_response(validation_error(error.errors(), error.body))
            case HTTPException(status_code=HTTPStatus.NOT_FOUND):
                return error_response(_unknown_path(request, [*app.routes, *routes]))
            case HTTPException():
                message = f"{error.detail}: {request.method} {cut(request.url.path)}"
                response = error_response(ApiError(error.status_code, message))
                response.headers.update(error.headers or {})
                if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                    response.headers["Allow"] = ", ".join(_methods(request, [*app.routes, *routes]))
                return response
            case _:
                return error_response(as_api_error(error))

    for kind in (UBatchError, Exception, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _unknown_path(request: Request, routes: Sequence[BaseRoute]) -> ApiError:
    """The error for a path that there is not; never `model_not_found`, which clients take it for without a code."""
    path, shown_path = request.url.path, cut(request.url.path)
    if (why := why_not(path)) is not None:
        return ApiError(404, f"{shown_path} is not offered: {why}.", code="endpoint_not_offered")
    there = elsewhere(path, {getattr(route, "path", "") for route in routes})
    instead = "/openapi.json lists what there is" if there is None else f"use {there}, and check the client's base URL"
    return ApiError(404, f"There is no {request.method} {shown_path}; {instead}.", code="unknown_endpoint")


def _methods(request: Request, routes: Sequence[BaseRoute]) -> list[str]:
    """All HTTP methods of a path. Starlette's 405 names only those of the path's first route."""
    there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in getattr(route, "methods", None) or ()})


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The first of pydantic's errors; the others are often the same error in another branch of a union.

    Args:
        body: what was validated.
    """
    first = errors[0]
    if first["type"] == UNSUPPORTED:
        return ApiError(400, f"{first['msg']}.", param=first["ctx"]["param"])
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"The body is not valid JSON: {reason}.")
    parts = first["loc"][first["loc"][:1] == ("body",) :]
    place = [cut(str(part), SHOWN_CHARACTERS) for part in _sent(parts, body, missing=first["type"] == "missing")]
    param = ".".join(place) or None
    if first["type"] == "missing":
        return ApiError(400, f"{param or 'the body'} is missing.", param=param)
    if isinstance(first.get("input"), bytes):  # without a JSON content type FastAPI passes the body on as bytes
        return ApiError(400, "Send the body as JSON, with the header Content-Type: application/json.")
    if first["type"] == "too_short":
        return ApiError(400, f"{param}: Input should not be empty.", param=param)
    message = f"{param or 'the body'}: {first['msg']}"
    if "actual_length" not in first.get("ctx", {}):  # otherwise pydantic's message has the length: omit the list
        message += f", not {shown(first.get('input'))}"
    return ApiError(400, f"{message}.", param=param)


def _sent(place: Sequence[int | str], body: Any, *, missing: bool) -> Iterator[int | str]:
    """The parts of an error's place that are in the body; the others name branches of unions.

    Args:
        missing: the last part is not there.
    """
    for number, part in enumerate(place):
        match body:
            case Mapping() if part in body:
                body = body[part]
            case list() if isinstance(part, int):
                body = body[part]
            case _ if not missing or number < len(place) - 1:
                continue
        yield part


_LONGEST = 6  # most segments of a path that are looked at, with the empty one in front

_OTHERS = "this server only generates text; serve a model for embeddings, ranking or classes with another one"
_GROUPS: Mapping[str, str] = {
    _OTHERS: """
        /v1/embeddings /v2/embed /api/embed /api/embeddings /encode /pooling /classify /v1/classify /rerank /v1/rerank
        /v2/rerank""",
    f"{_OTHERS}. prompt_logprobs of /v1/completions tells the log-probabilities of a prompt": """
        /score /v1/score /generative_scoring /v1/decisions /v1/systemone""",
    "nothing is moderated; ask a model that is made for it in /v1/chat/completions": "/v1/moderations",
    "only text is read and written": """
        /v1/audio /v1/images /v1/videos /v1/realtime /v1/live /v1/content_provenance_checks""",
    "nothing is stored; send what is needed with each request": """
        /v1/files /v1/uploads /v1/vector_stores /v1/containers /v1/skills /v1/chat/completions/*""",
    "send the requests one by one, many at once; the server batches them": "/v1/batches /v1/chat/completions/batch",
    "conversations are not stored; keep them in the client, and send them to /v1/chat/completions": """
        /v1/assistants /v1/threads /v1/conversations /v1/chatkit""",
    "agents are not run here; run them in the client, over /v1/chat/completions": "/v1/agents /v1/vaults",
    "models are only served; train elsewhere": "/v1/fine_tuning /v1/fine-tunes",
    "outputs are not judged; use a program for evaluations over /v1/completions": "/v1/evals",
    "there are no accounts; the server has one key, --api-key": """
        /v1/organization /v1/projects /v1/safety /v1/webhook_endpoints /v1/webhook_event_types""",
    # the same under other names: Anthropic's, Cohere's, Ollama's, those of clouds, SGLang's own
    "use /v1/chat/completions": "/v1/edits /v1/messages /cohere/v2/chat /api/chat",
    "use /v1/completions": "/generate /inference/v1/generate /vertex_generate /api/generate",
    "use /v1/completions or /v1/chat/completions": "/invocations",
    "use /v1/models": "/v1/engines /api/tags /api/show",
    "use /tokenize": "/v1/completions/render",
    "use /tokenize with messages": "/v1/messages/count_tokens /v1/messages/render /v1/chat/completions/render",
    "use /detokenize": "/v1/chat/completions/derender /v1/completions/derender",
    "use /health": "/health_generate /ready /readyz",
    "use /live": "/livez",
    "use /v1/models, /version and /metrics": """
        /server_info /get_server_info /model_info /get_model_info /load /v1/loads /get_world_size /weight_info""",
    "use /start_profile and /stop_profile": "/dumper",
    # parts of a request
    "the checkpoint's folder has tokenizer_config.json": "/tokenizer_info",
    "tool calls are parsed in /v1/chat/completions alone": "/parse_function_call",
    "reasoning is separated in /v1/chat/completions alone": "/separate_reasoning",
    "there are no sessions; send the whole prompt": "/open_session /close_session",
    "close the connection, which ends its request": "/abort_request /abort_requests /inference/v1/abort_requests",
    # running the server
    "there are no LoRA adapters; merge one into the checkpoint, and serve that": """
        /v1/load_lora_adapter /v1/unload_lora_adapter /load_lora_adapter /load_lora_adapter_from_tensors
        /unload_lora_adapter""",
    "the server keeps its memory while it runs; stop it, and start it again": """
        /sleep /wake_up /is_sleeping /release_kv_cache_memory /release_memory_occupation /resume_memory_occupation""",
    "generation cannot be paused; send requests later": """
        /pause /resume /is_paused /pause_generation /continue_generation /slow_down""",
    "requests cannot run code in the engines": "/collective_rpc",
    "the cache makes room by itself; to serve without one, start with --no-enable-prefix-caching": """
        /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /flush_cache /hicache /get_hicache_l3_cache_layout
        /kv_event_sources""",
    "weights do not change while they are served; start a server with the other checkpoint": """
        /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update
        /finish_weight_update /begin_weight_update /end_weight_update /update_weights /update_weight_version
        /update_weights_from_disk /update_weights_from_distributed /update_weights_from_ipc
        /update_weights_from_tensor /get_weights_by_name /weights_checker /weight_checker /init_weights_update_group
        /destroy_weights_update_group /init_weights_send_group_for_remote_instance /send_weights_to_remote_instance
        /get_transfer_engine_info /register_transfer_engine_info /get_remote_instance_transfer_engine_info
        /remote_instance_transfer_engine_info""",
    "ranks are set when the server starts": """
        /scale_elastic_ep /is_scaling_elastic_ep /pd_role_switch""",
    "engines that fail are started again by themselves; --max-engine-restarts says how often": "/fault_tolerance",
    "settings are given when the server starts; see `ubatch serve --help`": """
        /configure_logging /set_internal_state /set_trace_level /freeze_gc""",
    "/metrics has the load of the experts at all times, and --expert-load-out writes it to a file": """
        /start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record""",
    "n-gram speculation looks in the request's own tokens alone": """
        /add_external_corpus /remove_external_corpus /list_external_corpora""",
}
"""What to do instead -> paths of OpenAI, vLLM, SGLang and others that this server does not have.

They answer 404 with `code: endpoint_not_offered`. Clients do not retry it, and show the sentence; a 501 is retried as a
failure of the server.
"""

NOT_OFFERED: Mapping[str, str] = {path: why for why, paths in _GROUPS.items() for path in paths.split()}
"""Path, with all that lies below it -> what to do instead. `/*` at the end is for what lies below alone."""


def why_not(path: str) -> str | None:
    """What to do instead of asking for a path; None if nobody knows the path."""
    parts = path.rstrip("/").split("/")
    for length in range(min(len(parts), _LONGEST), 1, -1):
        begin = "/".join(parts[:length])
        why = NOT_OFFERED.get(begin) or (NOT_OFFERED.get(f"{begin}/*") if length < len(parts) else None)
        if why is not None:
            return why
    return None


def elsewhere(path: str, known: Collection[str]) -> str | None:
    """One of the `known` paths that is the same but for `/v1` in front, which a client's base URL has too much or not
    at all; None if there is none."""
    candidates = (f"/v1{path}", path.removeprefix("/v1"), path.replace("/v1/v1/", "/v1/", 1))
    return next((candidate for candidate in candidates if candidate != path and candidate in known), None)
