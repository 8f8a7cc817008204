"""`ubatch bench abuse`: what it counts as wrong, and a short run of all of it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from openai_stub import running_stub
from safetensors.torch import load_file

from serving.api.errors import shown
from serving.bench.abuse.attacks import ATTACKS, Target
from serving.bench.abuse.command import Options, run
from serving.bench.abuse.poison import poisoned_copy
from serving.bench.abuse.watch import Reference, Watch
from serving.bench.serve_requests import Server, Task, send
from ubatch import ConfigError

TINY = Path(__file__).resolve().parent.parent / "examples" / "models" / "tiny-moe"


def test_the_poisoned_copy_computes_all_but_one_token(tmp_path: Path) -> None:
    token = poisoned_copy(TINY, tmp_path)
    before, after = load_file(TINY / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    embedding = before["model.embed_tokens.weight"]
    assert token == len(embedding) - 1
    assert torch.equal(after["model.embed_tokens.weight"][:token], embedding[:token])
    assert after["model.embed_tokens.weight"][token].isnan().all()
    assert torch.equal(after["lm_head.weight"], embedding)  # it was tied
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in TINY.iterdir()}


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a checkpoint"):
        poisoned_copy(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="embed_tokens"):
        poisoned_copy(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("ties", "text", "allowed"),
    [
        ((), "one two", True),
        ((), "one tow", False),
        ((), "one", False),
        ((4,), "one tow", True),
        ((3,), "one tow", True),
        ((6,), "one tow", False),
        ((4,), "eno two", False),
    ],
)
def test_a_text_is_wrong_unless_it_leaves_at_a_tie(ties: tuple[int, ...], text: str, allowed: bool) -> None:
    assert Reference((1,), "one two", ties).allows(text) is allowed


def test_streams_are_watched_window_by_window() -> None:
    async def watch(base_url: str) -> list[Any]:
        server = Server(base_url, "stub")
        references = [Reference((1,), "w0 w1 w2 "), Reference((2,), "w0 w1 w3 ")]
        async with Watch(server, references, 3) as watch:
            first = await watch.during("first", 0.5)
            second = await watch.during("second", asyncio.sleep(0.5))
        return [(window, watch.seen(window)) for window in (first, second)]

    with running_stub() as stub:
        stub.pause_s = 0.01
        windows = asyncio.run(watch(stub.url))
        stub.pause_s = 0.0
    for window, seen in windows:
        assert seen.ended > 2
        assert 0 < seen.wrong < seen.ended  # the second reference is never met
        assert not seen.failed
        assert seen.gap_median_s is not None
        assert 0.01 <= seen.gap_median_s < 0.2
        assert window.unhealthy == ["404"] * len(window.health_s)  # the stand-in has no `/health`


def test_a_stream_that_was_read_to_its_end_leaves_its_connection() -> None:
    async def ask(base_url: str) -> list[bool]:
        server = Server(base_url, "stub")
        async with server.client() as client:
            for _ in range(3):
                await send(server, client, Task(0, [1], 3), time.perf_counter())
            return [each.is_idle() for each in client._transport._pool.connections]  # type: ignore[attr-defined]

    with running_stub() as stub:
        assert asyncio.run(ask(stub.url)) == [True]


def test_a_large_wrong_value_is_shown_without_being_looked_through() -> None:
    compared = 0

    class Key(str):
        def __lt__(self, other: str) -> bool:
            nonlocal compared
            compared += 1
            return str(self) < other

    assert shown({Key(str(number)): 1 for number in range(10_000)}).startswith("{'0': 1, ")
    assert compared < 1000


def test_attacks_are_named_once_and_fit_the_table() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 46
    assert {status for attack in ATTACKS for status in attack.answers if status >= "500" and status.isdecimal()} == {
        "500",
        "503",
    }


def test_an_attack_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts of 900 tokens arrive"):
        run(Options(model=TINY, only=("nothing",)))


def test_prompts_avoid_the_poisoned_token() -> None:
    target = Target(Server("http://here:8000", "m"), [1, 2, 3], 4, 64, 10, 1.0)
    assert set(target.prompt(100)) == {1, 2, 3}
    assert target.address == ("here", 8000)


LOADS = ("1,000 prompts", "200 prompts", "arrive")
"""Attacks by much work: what they are to show are times, which the command itself measures."""
PARTS = {
    "requests": tuple(each.name for each in ATTACKS[:11]),
    "connections": tuple(each.name for each in ATTACKS[11:] if not any(part in each.name for part in LOADS)),
}


@pytest.mark.slow
@pytest.mark.timeout(140)
@pytest.mark.parametrize("part", [*PARTS, "rounds"])
def test_a_server_keeps_its_promises(part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "abuse.json"
    options = Options(
        model=TINY,
        only=PARTS.get(part, ("paths",)),
        streams=16,
        alone_s=1,
        rounds=3 if part == "rounds" else 0,
        round_streams=150,
        hang=part == "rounds",
        serve_flags=("--dbo-decode-token-threshold=4",),
        json_file=file,
    )
    status = run(options)
    assert status == 0, capsys.readouterr().out
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["windows"]][1:-1] == list(
        options.only if part != "rounds" else PARTS["connections"][-1:]
    )
    if part == "rounds":
        assert len(written["rounds"]) == 3
        assert written["hang"]["exit_status"] == 1
