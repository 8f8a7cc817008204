"""Random requests through every kind of scheduler.

Whatever is cut, shared, evicted, retracted, drafted or aborted, each request gets the tokens that it would get alone
(`Loop.run` compares them), no step reads KV that is not its own, and no block is lost.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_proposer import FakeProposer
from fake_runner import VOCAB, Loop, be_optimistic, hashed, make_loop, repeating
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduler import SchedulingPolicy, kv_manager

pytestmark = pytest.mark.long


def random_params(rng: random.Random) -> dict[str, object]:
    return {
        "max_tokens": rng.choice([1, 2, 5, 20, 60]),
        "ignore_eos": rng.random() < 0.5,
        "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1]))),
        "min_tokens": rng.choice([0, 0, 1]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.0]),  # its sampling is delayed
        "logprobs": rng.choice([None, None, 0]),
        "prompt_logprobs": rng.choice([None] * 8 + [0]),
    }


class Traffic:
    """Requests that come and go while a loop runs."""

    def __init__(self, loop: Loop, rng: random.Random, max_prompt: int) -> None:
        self.loop, self.rng = loop, rng
        # Few beginnings and few tokens, so that prompts share prefixes of many lengths.
        self.stems = [[rng.randrange(VOCAB) for _ in range(max_prompt)] for _ in range(3)]
        self.max_prompt = max_prompt

    def prompt(self) -> list[int]:
        stem = self.rng.choice(self.stems)[: self.rng.randint(0, self.max_prompt - 1)]
        tail = [self.rng.randrange(VOCAB) for _ in range(self.rng.choice([1, 1, 2, 9]))]
        return (stem + tail)[-self.max_prompt :]

    def add(self) -> None:
        prompt, params = self.prompt(), random_params(self.rng)
        known = self.loop.requests
        group = self.rng.choice(["", f"g{len(known)}", "always"])
        for _ in range(self.rng.choice([1, 1, 3])):  # as with `n`
            self.loop.add(f"r{len(known)}", prompt, priority=self.rng.randrange(3), group=group, **params)

    def abort(self) -> None:
        self.loop.abort(f"r{self.rng.randrange(len(self.loop.requests) + 1)}")


@contextmanager
def often_kept() -> Iterator[None]:
    """Snapshots at every page border that a prompt has, and every few tokens of an output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_manager, "SNAPSHOT_WORTH", 1)
        patch.setattr(kv_manager, "SNAPSHOT_INTERVAL", 8)
        yield


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1 << 30),
    drafts=st.sampled_from(["", "", "ngram", "chain", "tree"]),
    chunked=st.booleans(),
    optimistic=st.booleans(),
    snapshots=st.sampled_from([0, 1, 3, 20]),
    config=st.fixed_dictionaries(
        {
            "overlapped": st.booleans(),
            "block_size": st.sampled_from([1, 4, 16]),
            "enable_prefix_caching": st.sampled_from([True, True, False]),
            "prefill_first": st.booleans(),
            "policy": st.sampled_from(list(SchedulingPolicy)),
        }
    ),
)
def test_every_request_gets_its_own_tokens(
    seed: int, drafts: str, chunked: bool, optimistic: bool, snapshots: int, config: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    max_model_len = rng.choice([48, 96])
    max_num_seqs = rng.choice([1, 4, 12])
    cache_tokens = rng.choice([32, 64, 128, 1024])
    next_token, tree = repeating if drafts == "ngram" else hashed, drafts == "tree"
    proposer = FakeProposer(
        lambda request, tokens: next_token(tokens), trees=tree, silent=0.3, places=5 if tree else 0, seed=seed
    )
    loop = make_loop(
        **config,
        num_blocks=cache_tokens // config["block_size"],
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([16, 24, 64]) if chunked else max_model_len,
        enable_chunked_prefill=chunked,
        num_speculative_tokens=3 if drafts else 0,
        num_draft_places=5 if tree else 0,
        num_state_snapshots=0 if tree else snapshots,
        proposer=proposer if drafts in ("chain", "tree") else None,
        prompt_lookup_min=1,
        next_token=next_token,
    )
    proposer.table = loop.runner.table
    if optimistic:
        be_optimistic(loop)
    traffic = Traffic(loop, rng, max_prompt=min(30, max_model_len - 1))
    with often_kept():
        for _ in range(60):
            if rng.random() < 0.4:
                traffic.add()
            if rng.random() < 0.1:
                traffic.abort()
            loop.step()
            loop.scheduler.check()
        loop.run()
    assert not proposer.known  # every request has ended


@pytest.mark.parametrize("snapshots", [0, 4])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_long_run_in_a_tiny_cache_retracts_and_evicts(overlapped: bool, snapshots: int) -> None:
    rng = random.Random(5)
    sizes = {"num_blocks": 20, "max_model_len": 64, "max_num_batched_tokens": 32}
    loop = make_loop(**sizes, overlapped=overlapped, num_state_snapshots=snapshots)
    be_optimistic(loop)
    traffic = Traffic(loop, rng, max_prompt=30)
    with often_kept():
        for _ in range(400):
            if loop.scheduler.num_waiting < 5:
                traffic.add()
            if rng.random() < 0.05:
                traffic.abort()
            loop.step()
            loop.scheduler.check()
        loop.run()
    statistics = loop.scheduler.statistics()
    assert (loop.runner.num_restored > 20) == (snapshots > 0)
    assert statistics.preemptions > 10
    assert statistics.prefix_hits > 100
