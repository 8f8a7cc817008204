"""Tensor-parallel ranks behind a client: the tokens of one rank, streams, aborts, pauses, profiles, and a death."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from dense_checkpoint import make_small
from engine_mains import is_alive, tiny, tokens_of, wait_for
from engine_served import LONG, PARAMS, PROMPTS, Served, cpu_seconds, outputs_of_one_rank
from repository import TINY_MOE

from model_runner import FinishReason, RequestError, SamplingParams
from serving import LLM
from serving.cli import main
from serving.requests import EngineDead, RequestInput
from ubatch.ranks.launch_order import VARIABLE

pytestmark = pytest.mark.ranks

NO_SEED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0)


@pytest.fixture(scope="module", autouse=True)
def ranks_compare_the_order_of_launches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1")
        yield


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(tiny(1, tensor_parallel_size=2, expert_parallel=True))
    yield served
    served.close()


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return outputs_of_one_rank()


def test_the_streams_are_those_of_one_rank_alone(served: Served, expected: list[list[int]]) -> None:
    assert served.run(served.all_outputs("first")) == expected
    info, statistics = served.client.info, served.client.statistics
    assert [line.partition(":")[0] for line in info.memory.splitlines()] == [
        "rank 0 (DP 0, TP 0)",
        "rank 1 (DP 0, TP 1)",
    ]
    assert served.run(served.drained())
    assert list(statistics) == [0]
    assert statistics[0].generation_tokens == sum(map(len, expected))
    assert statistics[0].steps["decode/engaged"] > 0


def test_a_sampling_without_a_seed_keeps_them_together(served: Served, expected: list[list[int]]) -> None:
    """Two ranks that drew their own seeds would not generate the same, and the follower would stop the engine."""

    async def scenario() -> list[list[int]]:
        return await asyncio.gather(*[tokens_of(served.client, f"unseeded-{i}", PROMPTS[0], NO_SEED) for i in range(6)])

    first, *others = served.run(scenario())
    assert any(other != first for other in others)
    assert served.run(served.all_outputs("after")) == expected


def test_requests_that_leave_midway_do_not_break_the_step(served: Served, expected: list[list[int]]) -> None:
    async def leaves(number: int) -> int:
        left = 0
        async with aclosing(served.client.generate(RequestInput(f"left-{number}", PROMPTS[number], LONG))) as stream:
            async for output in stream:
                left += len(output.token_ids)
                if left > 3 * number:
                    break
        return left

    async def ends() -> FinishReason | None:
        last = None
        async for output in served.client.generate(RequestInput("aborted", PROMPTS[1], LONG)):
            last = output
            await served.client.abort("aborted")
        return last and last.finish_reason

    async def scenario() -> list[Any]:
        return await asyncio.gather(served.all_outputs("stay"), ends(), *[leaves(number) for number in range(8)])

    outputs, reason, *_ = served.run(scenario())
    assert outputs == expected
    assert reason is FinishReason.ABORT
    assert served.run(served.drained())


def test_what_is_refused_is_refused_by_both(served: Served, expected: list[list[int]]) -> None:
    for prompt in ([], [5000], [1] * 600):
        with pytest.raises(RequestError):
            served.run(tokens_of(served.client, "wrong", prompt, LONG))
    assert served.run(tokens_of(served.client, "right", PROMPTS[0], PARAMS[0])) == expected[0]


@pytest.mark.slow
def test_they_pause_together_and_wake_again(served: Served, expected: list[list[int]]) -> None:
    assert used_while_idle_s(served) < 0.3
    for turn in range(10):
        served.run(asyncio.sleep(0.01 * turn))
        short = SamplingParams(max_tokens=2, ignore_eos=True)
        assert served.run(tokens_of(served.client, f"turn-{turn}", PROMPTS[0], short)) == expected[0][:2]


def test_a_profile_has_a_file_of_every_process(served: Served, tmp_path: Path) -> None:
    async def scenario() -> list[Path]:
        await served.client.start_profile()  # while they pause: the follower hears of it, too
        await served.all_outputs("profiled")
        return await served.client.stop_profile(tmp_path)

    paths = served.run(scenario())
    assert [path.name.partition("-rank-")[2] for path in paths] == ["0.json", "1.json"]
    for rank, path in enumerate(paths):
        events = json.loads(path.read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"lane 0", "lane 1", "link"} <= names
        travelled = {event["name"] for event in events if event["ph"] == "X"}
        assert {"attn_gather", "attn_scatter"} <= travelled, "attention is shared, not done twice"


def test_the_death_of_a_follower_reaches_every_stream(served: Served) -> None:
    """The last test on these ranks."""
    pids = dict(served.client.pids)

    async def scenario() -> list[Any]:
        streams = [asyncio.create_task(tokens_of(served.client, f"last-{i}", PROMPTS[i], LONG)) for i in range(3)]
        assert await wait_for(lambda: served.client.statistics[0].num_running == 3)
        assert pids[1] is not None
        os.kill(pids[1], signal.SIGKILL)
        begun = time.monotonic()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - begun < 30
        return outcomes

    for outcome in served.run(scenario()):
        assert isinstance(outcome, EngineDead)
        assert str(outcome) == "rank 1 (DP 0, TP 1) was killed by SIGKILL."
    assert served.run(wait_for(lambda: not is_alive(pids[0] or 0)))


@pytest.mark.slow
def test_two_ranks_of_two_share_the_experts(expected: list[list[int]]) -> None:
    """DP 2 x TP 2: each request is served by one pair, and the other pair steps along."""
    served = Served(tiny(2, tensor_parallel_size=2, expert_parallel=True))
    try:
        assert served.run(served.all_outputs("first")) == expected
        assert used_while_idle_s(served) < 0.3
        alone = tokens_of(served.client, "alone", PROMPTS[0], PARAMS[0])
        assert served.run(asyncio.wait_for(alone, 30)) == expected[0]
        assert served.run(served.drained())
        statistics = served.client.statistics
        assert list(statistics) == [0, 1]
        assert all(each.generation_tokens > 0 for each in statistics.values())
        assert sum(each.generation_tokens for each in statistics.values()) == sum(map(len, expected)) + len(expected[0])
        assert any(each.steps.get("decode/engaged", 0) > 0 for each in statistics.values())
    finally:
        served.close()


# ----------------------------------------------------------------------------------------------------------- offline


@pytest.mark.slow
def test_a_dense_model_offline_gives_the_same_tokens(tmp_path: Path) -> None:
    dense = make_small(tmp_path / "dense", dense=True)
    prompts = [[(7 * place + index) % 380 + 1 for place in range(5 + 4 * index)] for index in range(6)]
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enable_dbo": True,
        "dbo_decode_token_threshold": 4,
        "dbo_prefill_token_threshold": 16,
        "kv_cache_memory": "8M",
        "max_num_seqs": 8,
    }

    def generated(**more: Any) -> list[tuple[int, ...]]:
        with LLM(dense, **options, **more) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
            assert llm.statistics[0].steps["decode/engaged"] > 0
        return [output.outputs[0].token_ids for output in outputs]

    assert generated(tensor_parallel_size=2) == generated()


@pytest.mark.slow
def test_generate_gives_the_same_text(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(TINY_MOE), "--prompt", "def main(", "import os", "class Server:", "--max-tokens", "12"]
    overlap = ["--enable-dbo", "--dbo-decode-token-threshold", "2"]
    sampled = ["--temperature", "0.8", "--seed", "5"]
    assert main([*words, *sampled]) == 0
    alone = capfd.readouterr().out
    assert len(texts(alone)) > 3
    assert main([*words, *sampled, *overlap, "-tp", "2", "--enable-expert-parallel"]) == 0
    printed = capfd.readouterr().out
    assert texts(printed) == texts(alone)
    assert "11 overlapped, 1 not" in printed
    assert pages(printed) == 2 * pages(alone), "of one of the two key/value heads as many again fit"


def used_while_idle_s(served: Served) -> float:
    """What all processes use in 1.5 s without a request: next to nothing if they pause."""
    assert served.run(served.drained())
    pids = [pid for pid in served.client.pids.values() if pid is not None]
    served.run(asyncio.sleep(0.5))
    before = sum(map(cpu_seconds, pids))
    served.run(asyncio.sleep(1.5))
    return sum(map(cpu_seconds, pids)) - before


def pages(printed: str) -> int:
    found = re.search(r"memory of rank 0.*: KV cache \S+ MiB \((\d+) pages", printed)
    assert found, printed
    return int(found[1])


def texts(printed: str) -> Sequence[str]:
    return printed.partition("steps: ")[0].splitlines()
