"""While experts move between ranks, requests get the tokens that they get where experts stay.

Experts travel while steps wait for their own transfers: what a move computes and launches lies in a step's gaps.
Engines move them while they serve: in time, early, and after a restart.
"""

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_mains import core_over, kill_engine, started, tiny, tokens_of, two_nodes, wait_for
from fake_proposer import FakeProposer, oracle
from repository import TINY_MOE

from model_runner import ModelRunner, SamplingParams
from model_runner.decoder import repeated
from moe import EmulatedLink, ExpertPlacement
from moe.balance import EplbConfig
from ranks import run_ranks
from serving.balance.balancer import MoveReason
from serving.engine import EngineClient
from serving.engine.options import RestartLimits
from serving.requests import RequestInput
from ubatch import SCHEDULES, CommGroup, SpanKind, Trace, UBatchConfig, tracing

pytestmark = pytest.mark.ranks

NEW = 48
SMALL = {"max_num_seqs": 8, "max_model_len": 160, "max_num_batched_tokens": 64}
LOW = {"dbo_decode_token_threshold": 4, "dbo_prefill_token_threshold": 8}
OFF = UBatchConfig(enable_dbo=False)
LANES = UBatchConfig(**LOW)
CHUNKS = UBatchConfig(**LOW, schedule=SCHEDULES["single_batch"])
CASES: dict[str, dict[str, Any]] = {
    "plain": {"dbo": OFF},
    "lanes": {"dbo": LANES},
    "chunks": {"dbo": CHUNKS},
    "overlapped loop": {"dbo": LANES, "loop": True},
    "redundant": {"dbo": LANES, "redundant": 4},
    "uneven": {"dbo": LANES, "redundant": 3},
    "drafts": {"dbo": LANES, "drafts": True},
    "tensor parallel": {"dbo": OFF, "tensor_parallel_size": 2},
    "little memory": {"dbo": OFF, "num_kv_blocks": 24},
    "four ranks": {"ranks": 4, "dbo": LANES, "redundant": 3},
    "two replicas of two ranks": {"ranks": 4, "dbo": LANES, "tensor_parallel_size": 2},
}


def random_placement(rng: random.Random, like: ExpertPlacement) -> ExpertPlacement:
    experts = like.experts.copy()
    for row in experts:
        used = np.flatnonzero(row >= 0)
        chosen = [*range(like.num_experts), *(rng.randrange(like.num_experts) for _ in used[like.num_experts :])]
        rng.shuffle(chosen)
        row[used] = chosen
    return ExpertPlacement(experts, like.num_experts, like.num_ranks)


def requests_of(rank: int) -> list[RequestInput]:
    """Prompts of this rank's own; two of them begin alike, for the prefix cache."""
    rng = random.Random(rank)
    shared = [rng.randrange(3, 2000) for _ in range(40)]
    prompts = [[rng.randrange(3, 2000) for _ in range(length)] for length in (5, 70, 20)]
    prompts += [[*shared, 7], [*shared, 9, 11]]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    return [RequestInput(str(index), prompt, params) for index, prompt in enumerate(prompts)]


def serve(
    runner: ModelRunner, rank: int, *, loop: bool = False, proposer: FakeProposer | None = None, moving: bool = False
) -> tuple[list[list[int]], dict[str, int], int, Any]:
    """This rank's tokens, what steps did, and how many layers were switched while requests ran."""
    drafts = 3 if proposer else 0
    core = core_over(runner, overlap=loop, proposer=proposer, **SMALL, num_speculative_tokens=drafts)
    requests = requests_of(rank)
    tokens: list[list[int]] = [[] for _ in requests]
    for request in requests:
        core.add(request)
    rng, steps, number, switched = random.Random(9), 0, 0, 0
    while core.has_work or not core.idle:
        mover = runner.mover if moving else None
        if mover is not None and not mover.busy and steps % 2 == rank % 2:  # ranks hear of it at different steps
            number += 1
            mover.begin(number, random_placement(rng, mover.placement))
        for output in core.step():
            tokens[int(output.request_id)] += output.token_ids
        steps += 1
        for news in () if mover is None else mover.take_news():
            assert not news.failure
            switched += len(news.layers)
    core.scheduler.check(idle=True)
    return tokens, dict(core.statistics().steps), switched, core.statistics()


def on_a_rank(rank: int, world_size: int, name: str) -> tuple[Any, ...]:
    case = {key: value for key, value in CASES[name].items() if key != "ranks"}
    size, redundant = case.get("tensor_parallel_size", 1), case.pop("redundant", 0)
    group = CommGroup.from_process_group(timeout_s=20)
    own = rank // size
    loop, drafts = case.pop("loop", False), case.pop("drafts", False)
    options = {"kv_cache_memory": 8 << 20} if "num_kv_blocks" not in case else {}
    options |= {"group": group, "max_num_seqs": 8, "num_speculative_tokens": 3 if drafts else 0}
    with ModelRunner(TINY_MOE, **options, **case) as still:
        wanted, *_ = serve(still, own)
    config = EplbConfig(move_bytes_per_step=150_000, num_redundant_experts=redundant)
    recorded = []
    keep = repeated.RepeatedLayers.__call__

    def watch(self: Any, *args: Any) -> Any:
        recorded.append(self.repetitions)
        return keep(self, *args)

    repeated.RepeatedLayers.__call__ = watch  # type: ignore[method-assign]
    with ModelRunner(TINY_MOE, **options, **case, enable_eplb=True, eplb_config=config) as runner:
        proposer = oracle(wanted, 200, trees=False, seed=rank) if drafts else None
        tokens, steps, switched, statistics = serve(runner, own, loop=loop, proposer=proposer, moving=True)
    return tokens == wanted, steps, switched, statistics.preemptions, statistics.prefix_hits, max(recorded, default=0)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_same_while_experts_move(name: str) -> None:
    ranks = CASES[name].get("ranks", 2)
    for same, steps, switched, retracted, hits, recorded in run_ranks(on_a_rank, ranks, name, timeout_s=150):
        assert same
        assert switched >= 4
        dbo = CASES[name]["dbo"]
        engaged = "engaged_single" if dbo is CHUNKS else "engaged"
        assert any(key.endswith(f"/{engaged}") for key in steps) == dbo.enable_dbo, steps
        if name == "drafts":
            assert any(key == "target_verify/engaged" for key in steps), steps
        if name == "little memory":
            assert retracted
        if name == "plain":
            assert hits
            assert recorded


def traced(rank: int, _: int, lanes: bool) -> tuple[Trace, set[str]]:
    """The trace of four requests while experts move, and what steps did."""
    group = CommGroup.from_process_group(timeout_s=20)
    config = EplbConfig(move_bytes_per_step=150_000)
    options: dict[str, Any] = {"kv_cache_memory": 8 << 20, "max_num_seqs": 8, "dbo": LANES if lanes else OFF}
    options |= {"all2all_backend": "torch_dist", "link": EmulatedLink(0.003, 1e9)}  # slow, so that steps wait
    with ModelRunner(TINY_MOE, group=group, enable_eplb=True, eplb_config=config, **options) as runner:
        mover, rng = runner.mover, random.Random(3)
        core = core_over(runner, **SMALL)
        for number in range(4):
            tokens = [rng.randrange(3, 2000) for _ in range(20)]
            core.add(RequestInput(str(number), tokens, SamplingParams(max_tokens=40, ignore_eos=True)))
        here = mover.placement
        mover.begin(1, replace(here, experts=np.roll(here.experts, here.slots_per_rank, axis=1)))
        with tracing() as trace:
            while core.has_work or not core.idle:
                core.step()
        assert not any(news.failure for news in mover.take_news())
        return trace, set(core.statistics().steps)


@pytest.mark.wide
@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "unsplit"])
def test_experts_are_sent_in_the_gaps_of_steps(lanes: bool) -> None:
    for trace, steps in run_ranks(traced, 2, lanes):
        assert any(key.endswith("/engaged") for key in steps) == lanes, steps
        moves = [span for span in trace.spans if span.kind is SpanKind.TRANSFER and "experts of layer" in span.name]
        assert len(moves) > 10
        waits = [span for span in trace.spans if span.kind is SpanKind.WAIT and "experts of layer" not in span.name]
        inside = [any(wait.start <= span.start <= wait.end for wait in waits) for span in moves]
        assert sum(inside) > 0.8 * len(moves)
        of_step = [sum(note.start <= span.start <= note.end for span in moves) for note in trace.notes]
        assert max(of_step) == 1
        assert sum(of_step) > 0.8 * len(moves)  # before the first step nothing waits; and one may arrive late


LONG = SamplingParams(max_tokens=120, ignore_eos=True)
CONFIG: dict[str, Any] = {
    "window_size": 20,
    "step_interval": 10**9,
    "balancedness_fall": 0.0,
    "move_bytes_per_step": 300_000,
}
PROMPTS = [[5, 6, 7], [5, 5, 5, 5, 5, 5], [9] * 20, [11, 12]]


def balanced(ranks: int = 2, **options: Any) -> AbstractAsyncContextManager[EngineClient]:
    config = EplbConfig(**{**CONFIG, **options.pop("config", {})})
    return started(tiny(ranks, expert_parallel=True, enable_eplb=True, eplb_config=config, **options))


async def all_tokens(client: EngineClient, prefix: str) -> list[list[int]]:
    named = enumerate(PROMPTS)
    return await asyncio.gather(*[tokens_of(client, f"{prefix}-{index}", prompt, LONG) for index, prompt in named])


async def move_while_they_run(client: EngineClient) -> None:
    """Experts go to other slots while requests run: all get the tokens that they get before and after."""
    first = await all_tokens(client, "a")
    running = asyncio.create_task(all_tokens(client, "b"))
    wanted = random_placement(random.Random(30), client.loads.placement)
    client.balancer.begin(wanted, range(4), MoveReason.INTERVAL)
    assert await running == first
    assert await wait_for(lambda: not client.balancer.moving)
    assert client.loads.placement == wanted
    assert not client.balancer.failed
    assert await all_tokens(client, "c") == first


@pytest.mark.wide
@pytest.mark.parametrize(
    ("config", "reason"),
    [({"step_interval": 40}, MoveReason.INTERVAL), ({"window_size": 60, "balancedness_fall": 0.01}, MoveReason.FALLEN)],
)
async def test_experts_move_and_no_token_changes(config: dict[str, Any], reason: MoveReason) -> None:
    async with balanced(config=config) as client:
        first = await all_tokens(client, "a")
        hottest = np.argsort(-client.loads.balance().tokens(), axis=1)  # all on rank 0
        skewed = ExpertPlacement(hottest, 8, 2)
        client.balancer.begin(skewed, range(4), MoveReason.RESTORED)
        assert await wait_for(lambda: not client.balancer.moving)
        assert (client.loads.placement.experts == hottest).all()
        for turn in range(6):
            assert await all_tokens(client, f"b{turn}") == first
            if client.balancer.layers_moved > 4 and not client.balancer.moving:
                break
        assert client.balancer.rearrangements[reason] >= 1
        assert not client.balancer.failed
        assert client.balancer.bytes_moved
        balance = client.loads.balance()  # of few tokens: how even they can be is chance
        assert balance.balancedness().mean() > skewed.balancedness(balance.tokens()).mean() + 0.1
        assert await all_tokens(client, "c") == first


@pytest.mark.wide
async def test_tensor_parallel_ranks_move_together() -> None:
    """The follower gets orders from its leader's turns."""
    async with balanced(1, tensor_parallel_size=2) as client:
        await move_while_they_run(client)


@pytest.mark.wide
async def test_ranks_of_two_nodes_move() -> None:
    async with two_nodes(expert_parallel=True, enable_eplb=True, eplb_config=EplbConfig(**CONFIG)) as (client, _):
        await move_while_they_run(client)


@pytest.mark.wide
async def test_a_placement_outlives_the_engines() -> None:
    """An engine is killed while experts rest, and again while they move."""

    async def kill(rank: int) -> None:
        await kill_engine(client, rank=rank)
        assert await wait_for(lambda: client.pause is None)

    async with balanced(restarts=RestartLimits(3)) as client:
        balancer, loads = client.balancer, client.loads
        first = await all_tokens(client, "a")
        wanted = random_placement(random.Random(30), loads.placement)
        balancer.begin(wanted, range(4), MoveReason.INTERVAL)
        assert await wait_for(lambda: not balancer.moving)  # ranks that pause are woken
        assert loads.placement == wanted
        assert balancer.layers_moved == 4
        running = asyncio.create_task(all_tokens(client, "b"))
        await asyncio.sleep(0.2)
        await kill(1)
        assert await running == first
        assert await wait_for(lambda: loads.placement == wanted and not balancer.moving)
        assert balancer.rearrangements == {MoveReason.INTERVAL: 1, MoveReason.RESTORED: 1}

        other = random_placement(random.Random(31), wanted)
        running = asyncio.create_task(all_tokens(client, "c"))
        await asyncio.sleep(0.1)
        balancer.begin(other, range(4), MoveReason.INTERVAL)
        assert await wait_for(lambda: loads.placement != wanted)
        reached = loads.placement
        await kill(0)
        assert await running == first
        if not balancer.failed:  # it had ended
            reached = other
        assert await wait_for(lambda: not balancer.moving)
        assert balancer.rearrangements[MoveReason.RESTORED] == 2
        same = (loads.placement.experts == reached.experts).all(axis=1)
        assert all(same | (loads.placement.experts == other.experts).all(axis=1))
        assert await all_tokens(client, "d") == first
