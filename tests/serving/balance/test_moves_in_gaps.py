"""Experts travel while steps wait for their own transfers: what a move computes and launches lies in a step's gaps."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_mains import core_over
from repository import TINY_MOE

from model_runner import ModelRunner, SamplingParams
from moe import EmulatedLink
from moe.balance import EplbConfig
from ranks import run_ranks
from serving.requests import RequestInput
from ubatch import CommGroup, UBatchConfig, tracing
from ubatch.trace.spans import SpanKind, Trace

pytestmark = pytest.mark.ranks

PROMPTS, NEW = 4, 40


def on_a_rank(rank: int, _: int, lanes: bool) -> tuple[Trace, set[str]]:
    group = CommGroup.from_process_group(timeout_s=20)
    dbo = UBatchConfig(enable_dbo=lanes, dbo_decode_token_threshold=4, dbo_prefill_token_threshold=8)
    config = EplbConfig(move_bytes_per_step=150_000)
    options: dict[str, Any] = {"kv_cache_memory": 8 << 20, "max_num_seqs": 8, "dbo": dbo}
    options |= {"all2all_backend": "torch_dist", "link": EmulatedLink(0.003, 1e9)}  # slow, so that steps wait
    with ModelRunner(TINY_MOE, group=group, enable_eplb=True, eplb_config=config, **options) as runner:
        mover, rng = runner.mover, random.Random(3)
        core = core_over(runner, max_num_seqs=8, max_model_len=160, max_num_batched_tokens=64)
        for number in range(PROMPTS):
            tokens = [rng.randrange(3, 2000) for _ in range(20)]
            core.add(RequestInput(str(number), tokens, SamplingParams(max_tokens=NEW, ignore_eos=True)))
        here = mover.placement
        mover.begin(1, replace(here, experts=np.roll(here.experts, here.slots_per_rank, axis=1)))
        with tracing() as trace:
            while core.has_work or not core.idle:
                core.step()
        assert not any(news.failure for news in mover.take_news())
        return trace, set(core.statistics().steps)


@pytest.mark.parametrize("lanes", [True, False], ids=["lanes", "unsplit"])
def test_experts_are_sent_in_the_gaps_of_steps(lanes: bool) -> None:
    for trace, steps in run_ranks(on_a_rank, 2, lanes):
        assert any(key.endswith("/engaged") for key in steps) == lanes, steps
        moves = [span for span in trace.spans if span.kind is SpanKind.TRANSFER and "experts of layer" in span.name]
        assert len(moves) > 10
        waits = [span for span in trace.spans if span.kind is SpanKind.WAIT and "experts of layer" not in span.name]
        inside = [any(wait.start <= span.start <= wait.end for wait in waits) for span in moves]
        assert sum(inside) > 0.8 * len(moves)
        of_step = [sum(note.start <= span.start <= note.end for span in moves) for note in trace.notes]
        assert max(of_step) == 1
        assert sum(of_step) > 0.8 * len(moves)  # before the first step nothing waits; and one may arrive late
