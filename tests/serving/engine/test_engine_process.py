"""Two ranks behind a client, data- or tensor-parallel: streams, pauses, refusals, profiles, and the death of one."""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dense_checkpoint import make_small
from engine_mains import LONG, PARAMS, PROMPTS, Served, is_alive, run_drowsy_engine, tiny, tokens_of, wait_for
from grammars import regex
from repository import TINY_MOE

from attention import KVCacheExhausted
from model_runner import RequestError, SamplingParams
from serving import LLM
from serving.cli import main
from serving.engine.offline import InProcessEngine
from serving.requests import EngineDead, RequestInput, RequestOutput
from serving.text.tokenizer import load_tokenizer
from ubatch.ranks.launch_order import VARIABLE

pytestmark = pytest.mark.ranks

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
NO_SEED = SamplingParams(max_tokens=10, ignore_eos=True, temperature=1.0)
WAYS: Mapping[str, tuple[dict[str, int], tuple[str, str]]] = {
    "data parallel": ({"ranks": 2}, ("rank 0", "rank 1")),
    "tensor parallel": ({"tensor_parallel_size": 2}, ("rank 0 (DP 0, TP 0)", "rank 1 (DP 0, TP 1)")),
}
"""How two ranks share the work, and what they are called."""


class ServedPair(Served):
    """Two ranks that share the experts. Tensor-parallel ones compare the order of their launches."""

    def __init__(self, way: str) -> None:
        options, self.names = WAYS[way]
        self.tensor_parallel = "tensor_parallel_size" in options
        with pytest.MonkeyPatch.context() as patch:
            if self.tensor_parallel:
                patch.setenv(VARIABLE, "1")
            super().__init__(tiny(expert_parallel=True, **options))

    @property
    def pids(self) -> list[int]:
        return [pid for pid in self.client.pids.values() if pid is not None]


@pytest.fixture(scope="module", params=WAYS)
def served(request: pytest.FixtureRequest) -> Iterator[ServedPair]:
    with ServedPair(request.param) as served:
        yield served


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one rank alone gives for each prompt."""
    outputs: dict[str, list[int]] = {}
    engine = InProcessEngine(tiny())

    def take(output: RequestOutput) -> bool:
        outputs.setdefault(output.request_id, []).extend(output.token_ids)
        return True

    engine.run([RequestInput(str(i), *each) for i, each in enumerate(zip(PROMPTS, PARAMS, strict=True))], take)
    engine.close()
    return [outputs[str(index)] for index in range(len(PROMPTS))]


def test_the_streams_are_those_of_one_rank_alone(served: ServedPair, expected: list[list[int]]) -> None:
    assert served.run(served.all_outputs("first")) == expected
    info = served.client.info
    assert (info.vocab_size, info.max_model_len) == (2048, 512)
    assert tuple(line.partition(": KV cache")[0] for line in info.memory.splitlines()) == served.names
    assert served.run(served.drained())
    statistics = served.client.statistics
    assert list(statistics) == ([0] if served.tensor_parallel else [0, 1])
    assert sum(each.generation_tokens for each in statistics.values()) == sum(map(len, expected))
    for each in statistics.values():
        assert each.generation_tokens > 0
        assert any(key.endswith("/engaged") for key in each.steps), each.steps


def test_requests_that_come_together_start_in_the_same_step() -> None:
    """Also if they come before a slow rank has had its first look at what there is."""
    with Served(tiny(2, expert_parallel=True), run_drowsy_engine) as served:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        tokens = [tokens_of(served.client, str(index), PROMPTS[index], params) for index in range(4)]

        async def at_once() -> None:
            await asyncio.gather(*tokens)
            await served.client.settle()

        served.run(at_once())
        for statistics in served.client.statistics.values():
            assert sum(statistics.steps.values()) == 5, statistics.steps


def test_ranks_that_pause_use_no_cpu_and_wake_again(served: ServedPair, expected: list[list[int]]) -> None:
    assert used_while_idle_s(served) < 0.3
    assert served.run(served.all_outputs("again")) == expected


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def used_while_idle_s(served: Served) -> float:
    """What all processes use in 1.5 s without a request: next to nothing if they pause."""
    assert served.run(served.drained())
    pids = [pid for pid in served.client.pids.values() if pid is not None]
    for _ in range(10):  # a rank may have gone along with the other for some steps after its own last output
        statistics, before = dict(served.client.statistics), sum(map(cpu_seconds, pids))
        served.run(asyncio.sleep(1.5))
        if served.client.statistics == statistics:
            break
    assert served.client.statistics == statistics
    return sum(map(cpu_seconds, pids)) - before


def test_no_request_is_lost_around_a_pause(served: ServedPair, expected: list[list[int]]) -> None:
    """Requests that come just as the ranks go to sleep, at either of them."""

    async def scenario() -> None:
        for turn in range(25):
            await asyncio.sleep(random.random() * 0.02)
            tokens = tokens_of(served.client, f"turn-{turn}", PROMPTS[0], SHORT)
            assert await asyncio.wait_for(tokens, 30) == expected[0][:2]

    served.run(scenario())


def test_a_sampling_without_a_seed_keeps_tensor_parallel_ranks_together(
    served: ServedPair, expected: list[list[int]]
) -> None:
    """Two ranks that drew their own seeds would not generate the same, and the follower would stop the engine."""

    async def scenario() -> list[list[int]]:
        return await asyncio.gather(*[tokens_of(served.client, f"unseeded-{i}", PROMPTS[0], NO_SEED) for i in range(6)])

    first, *others = served.run(scenario())
    assert any(other != first for other in others)
    assert served.run(served.all_outputs("after")) == expected


def test_grammars_hold_on_every_rank(served: ServedPair, expected: list[list[int]]) -> None:
    """Made in each process, while other requests run; the same tokens greedy and sampled, on either rank; and a text
    that is none is refused before it runs."""
    pytest.importorskip("llguidance", reason="llguidance is not installed; `make setup` installs it")
    greedy = SamplingParams(max_tokens=20, grammar=regex("[0-9]{4}-[a-c]{3}"))
    warm = replace(greedy, temperature=1.0, seed=7)

    async def scenario() -> list[Any]:
        asked = [greedy, warm, greedy, warm, SamplingParams(grammar="rubbish")]
        tokens = [tokens_of(served.client, f"form-{i}", PROMPTS[0], params) for i, params in enumerate(asked)]
        return await asyncio.gather(*tokens, served.all_outputs("beside"), return_exceptions=True)

    first, second, *again, refused, beside = served.run(scenario())
    assert again == [first, second]
    assert first != second
    tokenizer = load_tokenizer(TINY_MOE)
    for tokens in (first, second):
        assert re.fullmatch("[0-9]{4}-[a-c]{3}", tokenizer.decode(tokens, skip_special_tokens=True))
    assert isinstance(refused, RequestError)
    assert refused.param == "grammar"
    assert "cannot be used" in str(refused)
    assert beside == expected


def test_requests_that_leave_midway_free_what_they_held_and_disturb_none(
    served: ServedPair, expected: list[list[int]]
) -> None:
    async def leaves(number: int) -> None:
        left = 0
        async with aclosing(served.client.generate(RequestInput(f"left-{number}", PROMPTS[number], LONG))) as stream:
            async for output in stream:
                left += len(output.token_ids)
                if left > 3 * number:
                    break

    async def is_cancelled() -> None:
        begun = served.client.num_outstanding
        task = asyncio.create_task(tokens_of(served.client, "cancelled", PROMPTS[2], LONG))
        await wait_for(lambda: served.client.num_outstanding > begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def scenario() -> list[Any]:
        return await asyncio.gather(
            served.all_outputs("stay"), is_cancelled(), *[leaves(number) for number in range(8)]
        )

    assert served.run(scenario())[0] == expected
    assert served.client.num_outstanding == served.client.num_waiting == 0
    assert served.run(served.drained())


@pytest.mark.parametrize(
    ("prompt", "params"),
    [([], LONG), ([5000], LONG), ([1] * 600, LONG), ([2**70], LONG), ([1.5], LONG), ([1], None), ([object()], LONG)],
)
def test_what_cannot_be_served_is_refused_by_itself(
    served: ServedPair, prompt: Any, params: Any, expected: list[list[int]]
) -> None:
    with pytest.raises(RequestError) as raised:
        served.run(tokens_of(served.client, "wrong", prompt, params))
    assert type(raised.value) in (RequestError, KVCacheExhausted)
    assert served.client.dead is None
    assert served.run(tokens_of(served.client, "right", PROMPTS[0], PARAMS[0])) == expected[0]


def test_an_id_that_is_in_use_is_refused(served: ServedPair) -> None:
    async def scenario() -> None:
        async with aclosing(served.client.generate(RequestInput("same", [1], LONG))) as stream:
            await anext(stream)
            with pytest.raises(RequestError, match="'same'"):
                await tokens_of(served.client, "same", [1], LONG)

    served.run(scenario())


def test_a_profile_shows_both_lanes_of_every_rank(served: ServedPair, tmp_path: Path) -> None:
    async def scenario() -> list[Path]:
        await served.client.start_profile()  # while they pause: a follower hears of it, too
        await served.all_outputs("profiled")
        return await served.client.stop_profile(tmp_path)

    paths = served.run(scenario())
    assert [path.parent for path in paths] == [tmp_path] * 2
    assert [path.name.partition("-rank-")[2] for path in paths] == ["0.json", "1.json"]
    for rank, path in enumerate(paths):
        events = json.loads(path.read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"lane 0", "lane 1", "link"} <= names
        travelled = {event["name"] for event in events if event["ph"] == "X"}
        attention_is_shared = {"attn_gather", "attn_scatter"} <= travelled
        assert attention_is_shared == served.tensor_parallel


def test_the_death_of_a_rank_reaches_every_stream(served: ServedPair) -> None:
    """The last test of these ranks."""
    first, second = served.pids

    async def scenario() -> list[Any]:
        streams = [asyncio.create_task(tokens_of(served.client, f"last-{i}", PROMPTS[i], LONG)) for i in range(4)]
        await wait_for(lambda: all(each.num_running > 0 for each in served.client.statistics.values()))
        os.kill(second, signal.SIGKILL)
        begun = time.monotonic()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - begun < 30
        assert await asyncio.wait_for(served.client.wait_dead(), 10) is served.client.dead
        return outcomes

    for outcome in served.run(scenario()):
        assert isinstance(outcome, EngineDead)
        assert str(outcome) == f"{served.names[1]} was killed by SIGKILL."
    client = served.client
    for call in (tokens_of(client, "late", [1], LONG), client.start_profile(), client.stop_profile()):
        with pytest.raises(EngineDead, match="rank 1"):
            served.run(call)
    assert served.run(wait_for(lambda: not is_alive(first)))


@pytest.mark.slow
def test_two_ranks_of_two_share_the_experts(expected: list[list[int]]) -> None:
    """DP 2 x TP 2: each request is served by one pair, and the other pair steps along."""
    with Served(tiny(2, tensor_parallel_size=2, expert_parallel=True)) as served:
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


# -- tensor parallel, offline ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dense_model_offline_gives_the_same_tokens(tmp_path: Path) -> None:
    dense = make_small(tmp_path / "dense", dense=True)
    prompts = [[(7 * place + index) % 380 + 1 for place in range(5 + 4 * index)] for index in range(6)]
    thresholds = {"enable_dbo": True, "dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 16}

    def generated(**more: Any) -> list[tuple[int, ...]]:
        small: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory": "8M", "max_num_seqs": 8}
        with LLM(dense, **small, **thresholds, **more) as llm:
            outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
            assert llm.statistics[0].steps["decode/engaged"] > 0
        return [tuple(output.outputs[0].token_ids) for output in outputs]

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


def pages(printed: str) -> int:
    found = re.search(r"memory of rank 0.*: KV cache \S+ MiB \((\d+) pages", printed)
    assert found, printed
    return int(found[1])


def texts(printed: str) -> Sequence[str]:
    return printed.partition("steps: ")[0].splitlines()
