"""The DeepEP back ends under whole engines, over the stand-in: prefills of 2,048 tokens, captured decodes of 256.

Each rank serves 256 requests of 8 tokens: its first step is a prefill of 2,048 tokens, and the next ones are decodes of
256. Nothing says how large DeepEP's buffers are, or that it may go without counts: that follows from the steps.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import deep_ep_standin
import pytest
import static_attention
import torch
from deep_ep_standin_events import calls
from engine_mains import started, tokens_of
from fake_graphs import FakeGraphs
from runner_graph_cases import EXPERTS, TINY

from model_runner import ModelRunner, SamplingParams, make_random_qwen3_moe
from ranks import run_ranks
from serving.engine import EngineOptions
from serving.engine.rank.build import make_core, make_runner, warm_up
from serving.engine.rank.process import run_engine
from serving.engine.wire.rendezvous import Place
from serving.options import SERVE, read_layers, resolve_settings, to_engine_options
from serving.requests import RequestInput
from ubatch import CommGroup

pytestmark = pytest.mark.ranks

BACKENDS = ("deepep_high_throughput", "deepep_low_latency", "deepep_auto", "deepep_v2")
REQUESTS, PROMPT, NEW = 256, 8, 4
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
WIDE = replace(TINY, **SMALL, num_experts=8, moe_intermediate_size=8, hidden_size=2048)
"""The hidden size is the smallest that low latency has kernels for."""


def options_of(checkpoint: str, ranks: int, backend: str) -> EngineOptions:
    """The engine of `ubatch serve`, which captures on a CPU as on a GPU."""
    command = (
        *(checkpoint, "--data-parallel-size", str(ranks), "--enable-expert-parallel", "--enable-dbo"),
        *("--all2all-backend", backend, "--dtype", "bfloat16", "--no-enable-prefix-caching"),
        *("--kv-cache-memory", "16M"),
        *("--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "2"),  # so few steps decide nothing
    )
    settings = resolve_settings(*read_layers(SERVE, "ubatch serve", "", command)[0], gpus=0)
    return replace(
        to_engine_options(settings),
        attention_backend=static_attention.NAME,
        moe_backend=EXPERTS,
        cudagraph_mode="full",
        cudagraph_capture_sizes=(REQUESTS,),
    )


@contextmanager
def on_a_fake_gpu(*, captures: bool = True) -> Iterator[None]:
    """Runners record graphs, with back ends that can be recorded; `import deep_ep` finds the stand-in."""
    settings: dict[str, Any] = {"graphs": FakeGraphs()} if captures else {}
    with (
        deep_ep_standin.installed(),
        mock.patch("serving.engine.rank.build.ModelRunner", partial(ModelRunner, **settings)),
    ):
        yield


def requests_of(rank: int) -> list[RequestInput]:
    return [
        RequestInput(f"{rank}-{n}", [(7 * n + 11 * rank + 3 * place) % 60 + 1 for place in range(PROMPT)], PARAMS)
        for n in range(REQUESTS)
    ]


def serve(options: EngineOptions, rank: int, group: CommGroup) -> dict[str, Any]:
    """What an engine's process does, without its client."""
    with make_runner(options, group) as runner:
        warm_up(options, runner)
        core, before = make_core(options, runner), runner.statistics()
        tokens: dict[str, list[int]] = {}
        steps: list[set[str]] = []
        for request in requests_of(rank):
            core.add(request)
        while core.has_work or not core.idle:
            calls.clear()
            with group.step():
                for output in core.step():
                    tokens.setdefault(output.request_id, []).extend(output.token_ids)
            steps.append({what for what, _, _ in calls if what.endswith("dispatch") and "hook" not in what})
        statistics = runner.statistics()
        return {
            "tokens": [tokens[f"{rank}-{n}"] for n in range(REQUESTS)],
            "steps": steps,
            "engaged": statistics.engaged - before.engaged,
            "replays": statistics.graph_replays - before.graph_replays,
            "room": getattr(runner.all2all, "max_tokens_per_rank", None),
        }


def serve_on_rank(rank: int, world_size: int, options: EngineOptions) -> dict[str, Any]:
    group = CommGroup.from_process_group(timeout_s=60)
    results: dict[str, Any] = {}
    with on_a_fake_gpu(captures=False):
        eager = replace(options, all2all_backend="torch_dist", cudagraph_mode="none", cudagraph_capture_sizes=None)
        results["torch_dist"] = serve(eager, rank, group)
    for backend in BACKENDS:
        with on_a_fake_gpu():
            results[backend] = serve(replace(options, all2all_backend=backend), rank, group)
    return results


def make_wide(folder: Path) -> str:
    return str(make_random_qwen3_moe(folder, 5, size=WIDE, dtype=torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_back_end_serves_prefill_and_captured_decode(tmp_path: Path, ranks: int) -> None:
    options = options_of(make_wide(tmp_path / "wide"), ranks, "deepep_auto")
    for results in run_ranks(serve_on_rank, ranks, options, timeout_s=110):
        expected = results["torch_dist"]["tokens"]
        for backend in BACKENDS:
            result = results[backend]
            same = sum(mine == theirs for mine, theirs in zip(result["tokens"], expected, strict=True))
            assert same > 0.95 * REQUESTS, f"{backend}: {same} of {REQUESTS} are what torch_dist gives, within bfloat16"
            assert result["engaged"] == NEW, backend  # every step, the captured ones too
            assert result["replays"] == NEW - 1, backend
            low = {"low_latency_dispatch"} if backend == "deepep_low_latency" else {"dispatch"}
            assert result["steps"][0] == low, f"{backend}: prefill by {result['steps'][0]}"
        assert results["deepep_low_latency"]["room"] == REQUESTS
        assert results["deepep_v2"]["room"] == PROMPT * REQUESTS


def run_engine_on_a_fake_gpu(options: EngineOptions, rank: int, place: Place) -> None:
    with on_a_fake_gpu():
        run_engine(options, rank, place)


async def test_the_headline_command_serves(tmp_path: Path) -> None:
    """In engines of their own, with a client: two ranks, overlap, low latency."""
    options = options_of(make_wide(tmp_path / "wide"), 2, "deepep_low_latency")
    async with started(options, run_engine_on_a_fake_gpu) as client:
        requests = [each for rank in range(2) for each in requests_of(rank)]
        tokens = [tokens_of(client, each.request_id, each.token_ids, each.params) for each in requests]
        assert [len(each) for each in await asyncio.gather(*tokens)] == [NEW] * (2 * REQUESTS)
