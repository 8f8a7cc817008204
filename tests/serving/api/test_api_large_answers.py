"""Log-probabilities by the hundred thousand: how many are told, and that others are answered meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import fake_engine
import pytest
from api_bodies import refused
from api_clients import app_of, client_of, complete, events_of, post
from fake_engine import FakeEngine, FakeInfo

from serving.api import answer as answers
from serving.api import completions
from serving.api.answer import MAX_LOGPROBS
from serving.api.logprobs import JsonLists

LONG = FakeInfo(max_model_len=10_000)
IDS = list(range(300, 1300))
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("completions", {"prompt": [IDS] * 50, "prompt_logprobs": 20}),
        ("completions", {"prompt": IDS, "n": 100, "prompt_logprobs": 10}),
        ("completions", {"prompt": IDS, "n": 100, "echo": True, "logprobs": 10, "max_tokens": 0}),
        ("completions", {"prompt": IDS, "n": 100, "echo": True, "logprobs": 10, "stream": True}),
        ("completions", {"prompt": "a", "n": 100, "logprobs": 20, "max_tokens": 1000}),
        ("chat/completions", {"messages": MESSAGES, "n": 6, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_too_many_are_refused_before_anything_runs(path: str, asked: dict[str, Any]) -> None:
    error = refused(FakeEngine(info=LONG), f"/v1/{path}", asked)
    assert f"at most {MAX_LOGPROBS} are returned. Ask for fewer" in error["message"]
    assert error["param"] == ("prompt_logprobs" if "prompt_logprobs" in asked else "logprobs")


def test_what_is_not_told_at_once_does_not_count() -> None:
    body = {"prompt": "a", "n": 100, "logprobs": 20, "max_tokens": 1000, "stream": True, "stop_token_ids": [300]}
    response = post(FakeEngine(info=LONG), "/v1/completions", body)
    assert len(events_of(response)) >= 100
    cut = {"prompt": IDS * 9, "n": 128, "prompt_logprobs": 20, "truncate_prompt_tokens": 10, "max_tokens": 1}
    assert len(complete(FakeEngine(info=LONG), cut)["choices"]) == 128


@dataclass
class LastFirst(FakeEngine):
    """Outputs of a prompt come in the wrong order: the first one last."""

    async def generate(self, request: Any) -> Any:
        if request.request_id.endswith("-0"):
            await asyncio.sleep(0.1)
        async for output in super().generate(request):
            yield output


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_once_for_all_of_its_outputs(stream: bool) -> None:
    engine = LastFirst(reply=lambda _: [65, 66, 0])
    asked = {"prompt": [[65, 66], [67, 68]], "n": 3, "echo": True, "logprobs": 1, "seed": 1, "stream": stream}
    response = post(engine, "/v1/completions", asked)
    scored = sorted(each.request_id[-1] for each in engine.requests if each.params.prompt_logprobs is not None)
    assert scored == ["0", "3"]
    choices = [
        choice for answer in (events_of(response) if stream else [response.json()]) for choice in answer["choices"]
    ]
    for index in range(6):
        parts = [choice["logprobs"] for choice in choices if choice["index"] == index]
        tokens = [token for part in parts for token in part["tokens"]]
        assert tokens == [*("ab" if index < 3 else "cd"), "a", "b", "<|endoftext|>"]
        offsets = [offset for part in parts for offset in part["text_offset"]]
        assert offsets == [0, 1, 2, 3, 4]
        assert [len(part["top_logprobs"]) for part in parts] == [len(part["tokens"]) for part in parts]


def test_large_answers_are_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def noted(write: Callable[..., Any]) -> Callable[..., Any]:
        def there(*given: Any) -> Any:
            threads.add(threading.current_thread().name)
            return write(*given)

        return there

    for where, name in ((answers, "prompt_logprobs"), (completions.CompletionAnswer, "_whole")):
        monkeypatch.setattr(where, name, noted(getattr(where, name)))
    complete(FakeEngine(), {"prompt_logprobs": 2})
    assert threads
    assert threading.main_thread().name not in threads


@pytest.mark.long
def test_others_are_answered_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "logprobs_of", cache(fake_engine.logprobs_of))  # its own work is not the API's
    for token in IDS:
        fake_engine.logprobs_of(token, 20)

    async def longest_pause() -> float:
        async with client_of(app_of(FakeEngine())) as client:
            body = {"prompt": [IDS] * 16, "prompt_logprobs": 20, "max_tokens": 1}
            answering = asyncio.create_task(client.post("/v1/completions", json=body))
            longest, clock = 0.0, asyncio.get_running_loop().time
            while not answering.done():
                before = clock()
                await asyncio.sleep(0.005)
                await client.get("/health")
                longest = max(longest, clock() - before)
            assert (await answering).status_code == 200
        return longest

    assert asyncio.run(longest_pause()) < 1  # 4 s when all of it was done at once, in the loop


def test_lists_of_json() -> None:
    lists, more = JsonLists("ab"), JsonLists("ab")
    assert not lists
    assert {name: bytes(raw) for name, raw in lists.raw().items()} == {"a": b"[]", "b": b"[]"}
    for items in ([], [1, None], [], [float("nan")]):
        lists.add({"a": items, "b": items[:1]})
    lists.extend(more)
    more.extend(lists)
    assert {name: bytes(raw) for name, raw in more.raw().items()} == {"a": b"[1,null,null]", "b": b"[1,null]"}
