"""Two hundred clients at once, round after round, a third of whom leave midway: nobody is lost, and nothing leaks."""

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence

import pytest
from repository import TINY_MOE
from served import family, read_metrics, resident_bytes, values, wait_until

from model_runner import SamplingParams
from serving import LLM, RequestOutput
from serving.workbench.bench.server.process import ServerProcess, running_server
from serving.workbench.bench.server.requests import Outcome, Server, Status, Task, send_all

CLIENTS = 200
CLEAR_GAP = 1e-3  # of log-probabilities: with less, another batch's rounding may prefer the other token
GROWTH = 40 << 20  # bytes in 300 requests; kernels for new numbers of rows are kept, requests are not
FLAGS = [
    *("--data-parallel-size", "2", "--enable-expert-parallel"),
    *("--enable-dbo", "--dbo-decode-token-threshold", "4", "--dbo-prefill-token-threshold", "32"),
    *("--dtype", "float32"),  # bfloat16, where the processor is fast in it, rounds by more than CLEAR_GAP
    *("--kv-cache-memory", "12M"),  # of a rank: too little for a hundred requests at once
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads memory from /proc, which only Linux has")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(TINY_MOE, FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def answers() -> list[RequestOutput]:
    """Prompts and answers of mixed lengths, from one rank alone, 48 at a time, without overlap."""
    rng = random.Random(0)
    prompts = [rng.choices(range(1, 2048), k=rng.randint(2, 80)) for _ in range(CLIENTS + CLIENTS // 4)]
    params = [SamplingParams(max_tokens=rng.randint(2, 30), ignore_eos=True, logprobs=2) for _ in prompts]
    with LLM(TINY_MOE, dtype="float32", max_num_seqs=48) as llm:
        generated = llm.generate(prompts, params, use_tqdm=False)
    clear = [each for each in generated if smallest_gap(each) > CLEAR_GAP]
    assert len(clear) >= CLIENTS
    return clear[:CLIENTS]


def smallest_gap(answer: RequestOutput) -> float:
    tables = answer.outputs[0].logprobs or []
    tops = [sorted((each.logprob for each in table.values()), reverse=True) for table in tables]
    return min(top[0] - top[1] for top in tops)


def one_round(server: ServerProcess, answers: Sequence[RequestOutput], seed: int) -> list[Outcome]:
    """Everybody asks at once; a third drops the connection after some tokens. Then the server drains."""
    rng = random.Random(seed)
    tasks = []
    for index, answer in enumerate(answers):
        length = len(answer.outputs[0].token_ids)
        tasks.append(
            Task(
                index,
                answer.prompt_token_ids,
                length,
                cancel_after=rng.randint(1, length - 1) if index % 3 == seed % 3 else None,
                fields={"temperature": 0, "ignore_eos": True},
            )
        )
    outcomes = asyncio.run(send_all(Server(server.base_url, str(TINY_MOE)), tasks))
    wait_until(lambda: drained(server), "all KV is free again")
    return outcomes


def drained(server: ServerProcess) -> bool:
    metrics = read_metrics(server.base_url)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(len(values(metrics, name)) == 2 and not any(values(metrics, name)) for name in names)


def check_texts(outcomes: Sequence[Outcome], answers: Sequence[RequestOutput]) -> None:
    for outcome, answer in zip(outcomes, answers, strict=True):
        text = answer.outputs[0].text
        assert outcome.error is None
        if outcome.status is Status.OK:
            assert (outcome.text, outcome.finish_reason) == (text, "length")
            assert outcome.output_tokens == len(answer.outputs[0].token_ids)
        else:
            assert outcome.status is Status.CANCELLED
            assert text.startswith(outcome.text)


@pytest.mark.slow
def test_nobody_is_lost_and_nobody_gets_anothers_text(server: ServerProcess, answers: list[RequestOutput]) -> None:
    outcomes = one_round(server, answers, seed=0)
    assert len(outcomes) == CLIENTS
    check_texts(outcomes, answers)
    cancelled = sum(outcome.status is Status.CANCELLED for outcome in outcomes)
    assert cancelled > CLIENTS // 20  # the others' answers came in so few pieces that they were complete
    metrics = read_metrics(server.base_url)
    assert all(count > 0 for count in values(metrics, "vllm:generation_tokens_total"))  # both ranks
    assert sum(values(metrics, "ubatch:steps_total", outcome="engaged")) > 0
    succeeded = values(metrics, "vllm:request_success_total", finished_reason="length")
    assert sum(succeeded) >= CLIENTS - cancelled


@pytest.mark.slow
def test_memory_does_not_grow(server: ServerProcess, answers: list[RequestOutput]) -> None:
    resident: list[dict[int, int]] = []
    for seed in range(1, 6):
        few = random.Random(seed).sample(answers, CLIENTS // 2)
        check_texts(one_round(server, few, seed), few)
        resident.append({pid: resident_bytes(pid) for pid in family(server.process.pid)})
    assert len(resident[-1]) >= 3  # the API and two engines
    assert resident[1].keys() == resident[4].keys()
    grown = {pid: resident[4][pid] - resident[1][pid] for pid in resident[1]}
    assert all(growth < GROWTH for growth in grown.values()), grown
