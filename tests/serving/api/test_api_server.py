"""The other routes, who may come in, what watches, whether `/openapi.json` is true; and paths that there are not."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from api_clients import (
    BODIES,
    MODEL,
    Recorder,
    app_of,
    call,
    chat,
    client_of,
    complete,
    events_of,
    post,
    refused,
    says,
    stream,
    tokenizer,
)
from fake_engine import CrowdedEngine, FakeEngine
from prometheus_client import CollectorRegistry, Counter, make_asgi_app
from pydantic import BaseModel
from repository import ROOT

from serving.api.http.routes import router
from serving.api.schema.errors import NOT_OFFERED, elsewhere, why_not
from serving.api.schema.response_models import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ErrorBody,
    ModelList,
)
from serving.requests import EngineDead
from ubatch import UBatchError

GENERATING = tuple(BODIES)


def test_models() -> None:
    app = app_of(FakeEngine(), names=("big/one", "alias"))
    listed = call(app, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listed["data"]] == [
        ("big/one", "model", 1024),
        ("alias", "model", 1024),
    ]
    assert call(app, "GET", "/v1/models/big/one").json() == listed["data"][0]
    assert call(app, "GET", "/v1/models/other").status_code == 404
    for name, answered in (("alias", "alias"), (None, "big/one")):
        assert complete(app, {"model": name})["model"] == answered


@pytest.mark.parametrize("path", [*GENERATING, "/tokenize", "/detokenize"])
def test_an_unknown_model_is_404(path: str) -> None:
    body = {**BODIES.get(path, {"prompt": "a", "tokens": [5]}), "model": "other"}
    error = refused(FakeEngine(), path, body, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL in error["message"]


def test_tokenize_and_detokenize() -> None:
    ids = tokenizer().encode("Zoë says")
    answer = post(FakeEngine(), "/tokenize", {"prompt": "Zoë says", "return_token_strs": True}).json()
    strings = tokenizer().convert_ids_to_tokens(ids)
    assert answer == {"count": len(ids), "max_model_len": 1024, "tokens": ids, "token_strs": strings}
    answer = post(FakeEngine(), "/tokenize", {"messages": [{"role": "user", "content": "Zoë"}]}).json()
    assert answer["token_strs"] is None
    assert post(FakeEngine(), "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Zoë\n"}
    assert post(FakeEngine(), "/detokenize", {"tokens": []}).json() == {"prompt": ""}
    long = post(FakeEngine(), "/tokenize", {"prompt": "word " * 10_000}).json()
    assert long["count"] == len(tokenizer().encode("word " * 10_000))
    both = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    for path, body in (("tokenize", {}), ("tokenize", both), ("detokenize", {"tokens": [9999]})):
        assert post(FakeEngine(), f"/{path}", body).status_code == 400


def test_a_dead_engine_takes_nothing_and_the_version_is_told() -> None:
    app = app_of(FakeEngine(dead=EngineDead("rank 1: killed by signal 9")))
    assert call(app, "GET", "/version").json()["version"]
    for path, body in BODIES.items():
        assert "rank 1: killed by signal 9" in refused(app, path, body, 503)["message"]


def test_profile() -> None:
    engine = FakeEngine()
    for path in ("/start_profile", "/stop_profile"):
        refused = call(app_of(engine), "POST", path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "profiles_off")
        assert "--profile-dir" in refused.json()["error"]["message"]
    assert not engine.profiling
    app = app_of(engine, profiles=True)
    assert call(app, "POST", "/start_profile").status_code == 200
    assert engine.profiling
    assert call(app, "POST", "/stop_profile").json() == {"files": ["traces/rank0.json"]}
    assert not engine.profiling


def test_a_profile_that_is_not_there() -> None:
    engine = FakeEngine(profile_failure=UBatchError("rank 0: no profile was started."))
    response = call(app_of(engine, profiles=True), "POST", "/stop_profile")
    assert response.status_code == 409
    assert "rank 0: no profile was started." in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == "no_profile"
    engine.profile_failure = EngineDead("rank 1 was killed")
    assert call(app_of(engine, profiles=True), "POST", "/stop_profile").status_code == 500


def test_a_body_that_does_not_say_it_is_json() -> None:
    response = call(app_of(FakeEngine()), "POST", GENERATING[0], content=b'{"prompt": "a"}')
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.long
def test_the_key_opens_what_works() -> None:
    app = app_of(FakeEngine(), api_key="secret", profiles=True)
    for path in ("/health", "/version", "/openapi.json"):
        assert call(app, "GET", path).status_code == 200
    body = {"prompt": "a", "max_tokens": 2}
    closed = [("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/start_profile"), ("POST", GENERATING[0])]
    for method, path in closed:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            response = call(app, method, path, headers=headers, json=body)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert call(app, method, path, headers={"Authorization": "Bearer secret"}, json=body).status_code == 200


def test_a_key_is_compared_in_utf_8() -> None:
    key = "sch\u00f6n \u2713"
    app = app_of(FakeEngine(), api_key=key)
    sent = {
        f"Bearer {key}".encode(): 200,
        f"bearer  {key}\t".encode(): 200,
        b"Bearer " + key[:5].encode("latin-1"): 401,
        b"Bearer \xff\xfe": 401,
        f"Bearer \u00a0{key}".encode(): 401,
        b"Bearer": 401,
    }
    for value, status in sent.items():
        assert call(app, "GET", "/v1/models", headers={b"Authorization": value}).status_code == status, value


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = FakeEngine()
    app = app_of(engine, max_waiting_requests=2)
    for waiting, status in ((1, 200), (2, 503), (3, 503)):
        engine.num_waiting = waiting
        for path, body in BODIES.items():
            response = post(app, path, body)
            assert response.status_code == status
            assert ("retry-after" in response.headers) == (status == 503)
    assert response.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(("outputs", "taken"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("streamed", [False, True])
def test_requests_that_come_together_do_not_pass_the_full_queue(outputs: int, taken: int, streamed: bool) -> None:
    engine = CrowdedEngine()
    app, several = app_of(engine, max_waiting_requests=3), 8

    async def burst() -> list[int]:
        engine.hold = asyncio.Event()
        body = {**BODIES[GENERATING[0]], "n": outputs, "stream": streamed}
        async with client_of(app) as client, asyncio.timeout(30):
            posts = [asyncio.create_task(client.post(GENERATING[0], json=body)) for _ in range(several)]
            while sum(sent.done() for sent in posts) < several - taken:
                await asyncio.sleep(0.01)
            engine.hold.set()
            return sorted([(await sent).status_code for sent in posts])

    assert asyncio.run(burst()) == [200] * taken + [503] * (several - taken)


def test_a_draining_server_takes_nothing_new() -> None:
    app = app_of(FakeEngine())
    app.state.service.draining = True
    for path, body in BODIES.items():
        assert refused(app, path, body, 503)["code"] == "shutting_down"


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b"{}", 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
    ],
)
def test_every_error_has_openais_body(method: str, path: str, content: bytes | None, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    response = call(app_of(FakeEngine()), method, path, content=content, headers=headers)
    assert response.status_code == status
    assert ErrorBody.model_validate_json(response.content).error.type == "invalid_request_error"


def test_the_observer_is_told() -> None:
    recorder = Recorder()
    complete(app_of(FakeEngine(reply=says("a")), observer=recorder), {"n": 2})
    stream(app_of(FakeEngine(), observer=recorder), GENERATING[1], {"max_tokens": 3})
    complete(app_of(FakeEngine(reply=lambda request: [65, 66, 67]), observer=recorder), {"stop": "b"})
    stream(app_of(FakeEngine(fail_after=1, failure=EngineDead("gone")), observer=recorder), GENERATING[0], {})
    assert recorder.reasons == ["stop", "stop", "length", "stop", "error"]
    assert list(recorder.counts.values()) == [2, 2, 3, 2, 1]
    assert next(iter(recorder.prompts.values())) == len(tokenizer().encode("Hello"))


def test_metrics_are_where_prometheus_looks() -> None:
    registry = CollectorRegistry()
    Counter("seen", "...", registry=registry).inc()
    app = app_of(FakeEngine(), metrics_app=make_asgi_app(registry), api_key="secret")
    response = call(app, "GET", "/metrics")
    assert response.status_code == 200
    assert "seen_total 1.0" in response.text


@pytest.mark.long
def test_the_description_is_true() -> None:
    """Answers and events have the fields that `/openapi.json` lists, and no others; every reference resolves."""
    description = call(app_of(FakeEngine(), api_key="k"), "GET", "/openapi.json").json()
    schemas = description["components"]["schemas"]
    for reference in references(description):
        assert reference.removeprefix("#/components/schemas/") in schemas
    assert "HTTPValidationError" not in schemas
    assert list(description["components"]["securitySchemes"]) == ["HTTPBearer"]
    for path, operations in description["paths"].items():
        keyless = path in ("/health", "/live", "/ping", "/version")
        assert all(("security" in operation) is not keyless for operation in operations.values())
    for path in GENERATING:
        operation = description["paths"][path]["post"]
        assert {"200", "400", "401", "404", "500", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
        assert sorted(operation["responses"]["200"]["content"]) == ["application/json", "text/event-stream"]
    logprobs = {"logprobs": True, "top_logprobs": 1}
    usage = {"stream_options": {"include_usage": True}, "max_tokens": 2}
    whole: list[tuple[type[BaseModel], Any]] = [
        (Completion, complete(FakeEngine(), {"logprobs": 1, "echo": True})),
        (ChatCompletion, chat(FakeEngine(), {"max_tokens": 2, **logprobs})),
        (ModelList, call(app_of(FakeEngine()), "GET", "/v1/models").json()),
    ]
    for model, answer in whole:
        assert model.model_validate(answer).model_dump() == answer, "a field is missing"
    answers: list[tuple[type[BaseModel], Any]] = [
        *whole,
        *((CompletionChunk, event) for event in stream(FakeEngine(), GENERATING[0], {"logprobs": 1, **usage})),
        *((ChatCompletionChunk, event) for event in stream(FakeEngine(), GENERATING[1], {**logprobs, **usage})),
        (ErrorBody, post(FakeEngine(), GENERATING[0], {}).json()),
    ]
    for model, answer in answers:
        assert model.__name__ in schemas
        assert model.model_validate(answer, strict=True).model_dump(exclude_unset=True) == answer
        assert set(schemas[model.__name__].get("required", [])) <= set(answer)


def references(node: Any) -> list[str]:
    """All `$ref`s of a JSON document."""
    if isinstance(node, list):
        return [found for item in node for found in references(item)]
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    return []


def test_many_requests_at_once_are_not_mixed_up() -> None:
    engine = FakeEngine(pause_s=0.0005)

    async def run() -> list[httpx.Response]:
        async with client_of(app_of(engine)) as client:
            bodies = [
                {"prompt": [7] * (seed + 1), "seed": 2 * seed, "max_tokens": 5 + seed % 7, "stream": seed % 2 == 0}
                for seed in range(100)
            ]
            return await asyncio.gather(*(client.post(GENERATING[0], json=body) for body in bodies))

    for seed, response in enumerate(asyncio.run(run())):
        expected = tokenizer().decode(list(range(300 + 2 * seed, 305 + 2 * seed + seed % 7)))
        choices = [event["choices"][0] for event in (events_of(response) if seed % 2 == 0 else [response.json()])]
        assert "".join(choice["text"] for choice in choices) == expected
    assert not engine.alive
    assert not engine.aborted


DOCUMENT = ROOT / "docs" / "api.md"
OURS = {getattr(route, "path", "") for route in router.routes}
_PATHS = yaml.safe_load(Path(__file__).with_name("known_paths.yaml").read_text(encoding="utf-8"))
KNOWN = [f"/{'v1/' if system == 'openai' else ''}{path}" for system, paths in _PATHS.items() for path in paths.split()]


def test_every_path_of_others_is_ours_or_says_what_to_use() -> None:
    for path in KNOWN:
        ours = path in OURS or path.startswith("/v1/models/")
        assert ours is (why_not(path) is None and elsewhere(path, OURS) is None), path


@pytest.mark.parametrize(
    ("method", "path", "code", "sentence"),
    [
        ("POST", "/v1/embeddings", "endpoint_not_offered", "/v1/embeddings is not offered: this server only generates"),
        ("GET", "/v1/files/x/content", "endpoint_not_offered", "/v1/files/x/content is not offered: nothing is stored"),
        ("POST", "/v1/messages/", "endpoint_not_offered", "/v1/messages/ is not offered: use /v1/chat/completions."),
        ("DELETE", "/v1/chat/completions/x", "endpoint_not_offered", "completions/x is not offered: nothing is stored"),
        ("POST", "/chat/completions", "unknown_endpoint", "use /v1/chat/completions, and check the client's base URL."),
        ("POST", "/v1/v1/completions", "unknown_endpoint", "use /v1/completions, and"),
        ("POST", "/v1/tokenize", "unknown_endpoint", "use /tokenize, and"),
        ("GET", "/nowhere", "unknown_endpoint", "There is no GET /nowhere; /openapi.json lists what there is."),
        ("GET", "/v1/embeddingsx", "unknown_endpoint", "There is no GET /v1/embeddingsx; /openapi.json"),
        ("GET", "/x" * 20_000, "unknown_endpoint", "/openapi.json lists what there is."),
    ],
)
def test_the_sentence_comes_as_an_error(method: str, path: str, code: str, sentence: str) -> None:
    """With a code of its own: clients take a bare 404 for an unknown model."""
    response = call(app_of(FakeEngine()), method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (404, code, "invalid_request_error")
    assert sentence in error["message"]
    assert len(response.content) < 1000


def test_a_long_path_takes_no_longer() -> None:
    """Every part of it would take the square of its length: minutes."""
    assert why_not("/x" * 500_000) is None


def test_a_path_that_is_not_offered_needs_the_key() -> None:
    assert call(app_of(FakeEngine(), api_key="k"), "POST", "/v1/embeddings").status_code == 401


def test_no_path_is_both() -> None:
    assert not OURS & NOT_OFFERED.keys()
    for why in NOT_OFFERED.values():
        assert not why.endswith(".")
        for used in re.findall(r" (/[a-z0-9_/]+)", why):
            assert used in {*OURS, "/metrics"}, f"{used} is recommended, and is not there"


def documented() -> Iterator[tuple[str, str]]:
    """(path, sentence) in the document's table."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (part,) = re.findall(r"^## End points that are not offered$(.*?)(?=^## |\Z)", text, re.DOTALL | re.M)
    for row in (line for line in part.splitlines() if line.startswith("| `")):
        _, paths, why, _ = row.split("|")
        yield from ((path, why.strip()) for path in re.findall(r"`([^`]+)`", paths))


def test_the_document_lists_all() -> None:
    rows = list(documented())
    assert len(rows) == len(dict(rows))
    assert dict(rows) == NOT_OFFERED
