"""The next processes of ranks attach what their first ones have prepared, and write the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from engine_mains import run_telling_engine, started, tiny, tokens_of

from model_runner import SamplingParams
from serving.engine import EngineOptions
from serving.engine.kept import KeptOfRank
from serving.engine.launch import LocalEngines
from serving.engine.rank import build

pytestmark = pytest.mark.ranks

WAYS: Mapping[str, dict[str, Any]] = {
    "data parallel": {"ranks": 2, "expert_parallel": True},
    "tensor parallel": {"tensor_parallel_size": 2, "expert_parallel": True},
}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ranks leave behind in this test, as if they were started again."""
    left = {rank: KeptOfRank() for rank in range(2)}
    start = LocalEngines.__init__
    monkeypatch.setattr(
        LocalEngines, "__init__", lambda self, options, place, main, *_: start(self, options, place, main, left)
    )
    yield left
    for each in left.values():
        each.close()


async def outputs(options: EngineOptions) -> list[list[int]]:
    """What two requests give, one on each rank."""
    async with started(options, run_telling_engine) as client:
        one = tokens_of(client, "one", [5, 17, 99], PARAMS)
        return await asyncio.gather(one, tokens_of(client, "two", list(range(20, 90)), PARAMS))


@pytest.mark.parametrize("way", WAYS)
def test_the_next_ranks_attach_and_answer_alike(way: str, kept: Any, tmp_path: Path) -> None:
    options = tiny(**WAYS[way], profile_folder=tmp_path)
    first, second = (asyncio.run(outputs(options)) for _ in range(2))
    assert first == second
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["False\nTrue\n"] * 2


def test_what_is_kept_is_found_again_at_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 starts its ranks again at the number of its name, as the name may be gone with the network."""
    made = Mock(return_value=Mock(measured={}))
    monkeypatch.setattr(build, "KeptStart", made)
    monkeypatch.setattr(build, "remember_choices", Mock())
    for address, port in (("node-0", 29500), ("10.0.0.1", 29501)):
        build._kept_start(replace(tiny(), master_addr=address, master_port=port), 0, Mock())
    build._kept_start(tiny(dtype="bfloat16"), 0, Mock())
    first, second, other = (call.args[1] for call in made.call_args_list)
    assert first == second != other
