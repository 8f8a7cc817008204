"""Requests of one batch that share blocks while one of them still computes them."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint_fixture
from torch import Tensor

from attention import (
    AttentionShape,
    CommonAttentionMetadata,
    PagedKVCache,
    UBatchAttention,
    reads_of_later_writes,
    split_attn_metadata,
)
from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, Step, build_input_batch, make_offer
from tests.support.shaped_steps import shaped_step
from ubatch import Decision, DeclineReason, ForwardMode, SplitCost, UBatchConfig, UBatchSlice

pytestmark = pytest.mark.long

PREFIX = [7, 3, 9, 1, 4, 4, 2, 8]  # two blocks of 4


checkpoint = checkpoint_fixture(num_hidden_layers=2)


def make_runner(checkpoint: Path) -> ModelRunner:
    config = UBatchConfig(dbo_prefill_token_threshold=2, tbo_token_distribution_threshold=0.0)
    return ModelRunner(checkpoint, dbo=config, block_size=4, num_kv_blocks=64)


def make_step(runner: ModelRunner, late_writer: int) -> Step:
    """Four requests; request 0 has the blocks of request `late_writer` as its prefix, which computes them only now."""
    prompts = [[*PREFIX, 10, 11, 12], [5, 6, 7, 8], [21, 22, 23], [31, 32, 33, 34, 35]]
    prompts[late_writer] = [*PREFIX, 41, 42]
    requests = [Request(index, prompt, SamplingParams()) for index, prompt in enumerate(prompts)]
    writer = requests[late_writer]
    for request in requests[1:]:
        runner.admit(request, request.num_tokens)
    assert writer.row is not None
    reader = requests[0]
    reader.row = runner.request_table.add_row()
    runner.request_table.append(reader.row, runner.request_table.blocks(writer.row)[:2])
    runner.request_table.append(reader.row, runner.allocator.allocate(1))
    reader.num_computed_tokens = len(PREFIX)
    shares = [ScheduledRequest(request, request.num_uncomputed_tokens) for request in requests]
    return build_input_batch(shares, runner.request_table, runner.kv_cache.spec)


@torch.inference_mode()
def logits_of(runner: ModelRunner, step: Step) -> Tensor:
    runner.kv_cache.key_pool.memory.zero_()
    runner.kv_cache.value_pool.memory.zero_()
    return runner.forward(step)


def unsplit(batch: Step) -> Step:
    return replace(batch, decision=Decision(False, DeclineReason.DISABLED, 0, ((batch.num_tokens,),)))


@pytest.mark.parametrize("late_writer", [1, 3])
def test_the_split_moves_until_no_lane_reads_what_a_later_one_writes(checkpoint: Path, late_writer: int) -> None:
    with make_runner(checkpoint) as runner:
        batch = make_step(runner, late_writer)
        assert batch.late_reads() == ((0, late_writer),)
        expected = logits_of(runner, unsplit(batch))

        # As if nobody had looked: lane 0 is request 0 alone, and attends to keys that lane 1 has not written yet.
        naive = (UBatchSlice(slice(0, 1), slice(0, 3)), UBatchSlice(slice(1, 4), slice(3, batch.num_tokens)))
        decision = Decision(True, None, None, (tuple(piece.num_tokens for piece in naive),))
        schedule = runner.dbo.for_mode(batch.mode).schedule
        wrong = logits_of(runner, replace(batch, decision=decision, slices=naive, schedule=schedule))
        assert not torch.allclose(wrong[0], expected[0], atol=1e-2)
        assert wrong[0].argmax() != expected[0].argmax()

        agreed = runner.agree(batch)
        if late_writer == 3:  # the pair spans the whole batch: no place to cut
            assert agreed.decision.reason is DeclineReason.KV_ORDER
            assert agreed.slices is None
        else:
            assert agreed.slices is not None
            assert agreed.slices[0].num_requests >= 2
        torch.testing.assert_close(logits_of(runner, agreed), expected, atol=1e-4, rtol=1e-4)
        assert runner.statistics().engaged == 1 + (late_writer == 1)


def test_a_long_request_with_a_late_reader_is_not_torn() -> None:
    shape = shaped_step([8, 1000, 8], ForwardMode.PREFILL, late_reads=lambda: ((1, 2),))
    free, _ = make_offer(UBatchConfig(), replace(shape, late_reads=tuple))
    assert free.tokens == (508, 508)
    bound, slices = make_offer(UBatchConfig(), shape)
    assert slices is not None
    assert bound.tokens == (8, 1008)


def test_split_by_cost_is_used_when_asked_for() -> None:
    """The model's own cost: a chunk behind a long prefix weighs more than fresh prompts."""
    shape = shaped_step([128] * 8, ForwardMode.PREFILL, prefix_lens=[50_000] + [0] * 7)
    config = UBatchConfig(tbo_token_distribution_threshold=0.0)
    by_tokens, _ = make_offer(config, shape)
    assert by_tokens.tokens == (512, 512)
    dear = SplitCost(1.0, 0.001)
    by_cost, _ = make_offer(replace(config, split_by="cost"), shape, dear)
    assert by_cost.tokens == (128, 896)
    cut, slices = make_offer(replace(config, split_by="cost", tbo_token_distribution_threshold=0.48), shape, dear)
    assert slices is not None
    assert slices[0].token_slice.stop < 128  # inside the dear one
    assert sum(cut.tokens) == 1024


def sharing_requests(rng: random.Random, block: int) -> tuple[list[tuple[int, int]], list[list[int]], int]:
    """Requests (tokens in the cache, new tokens) with their blocks, some with another one's blocks as their prefix.

    What is read may itself be written in this step, before or behind its reader. Also how many blocks there are.
    """
    requests = [(rng.choice([0, 0, rng.randint(1, 10)]), rng.randint(1, 9)) for _ in range(rng.randint(2, 7))]
    free = iter(range(1000))
    tables = [[next(free) for _ in range(-(-sum(request) // block))] for request in requests]
    readers: set[int] = set()
    for reader, writer in enumerate(rng.choices(range(len(requests)), k=len(requests))):
        whole_blocks = sum(requests[writer]) // block
        if rng.random() < 0.5 or writer == reader or writer in readers or not whole_blocks:
            continue
        readers.add(reader)
        shared, new = rng.randint(1, whole_blocks), requests[reader][1]
        requests[reader] = (shared * block, new)
        tables[reader] = tables[writer][:shared] + [next(free) for _ in range(-(-new // block))]
    return requests, tables, next(free)


def test_whatever_is_shared_lanes_equal_the_whole_batch() -> None:
    """Through the split as it is made: by tokens or cost, through requests or between them, in two to four lanes."""
    shape = AttentionShape(2, 1, 8)
    engaged = moved = refused = 0
    for seed in range(300):
        rng = random.Random(seed)
        block, lanes = rng.choice([1, 4]), rng.choice([2, 2, 3, 4])
        requests, tables, num_blocks = sharing_requests(rng, block)
        table = torch.tensor([row + [0] * (30 - len(row)) for row in tables], dtype=torch.int32)
        prefixes, query_lens = [list(column) for column in zip(*requests, strict=True)]
        seq_lens = [sum(request) for request in requests]
        slots = [
            row[place // block] * block + place % block
            for row, (prefix, new) in zip(tables, requests, strict=True)
            for place in range(prefix, prefix + new)
        ]
        late = reads_of_later_writes(query_lens, seq_lens, table, block)
        config = UBatchConfig(
            dbo_prefill_token_threshold=lanes,
            num_ubatches=lanes,
            split_by=rng.choice(["tokens", "cost"]),
            tbo_token_distribution_threshold=rng.choice([0.0, 0.3, 0.5]) if lanes == 2 else 0.0,
        )
        step, cost = shaped_step(query_lens, ForwardMode.PREFILL, prefixes), SplitCost(1.0, 0.1)
        offer, slices = make_offer(config, replace(step, late_reads=partial(tuple, late)), cost)
        refused += offer.reason is DeclineReason.KV_ORDER
        if slices is None:
            continue
        engaged += 1
        moved += slices != make_offer(config, step, cost)[1]
        torch.manual_seed(seed)
        q, k, v = torch.randn(sum(query_lens), 4, 8).split([2, 1, 1], dim=1)
        cached = torch.randn(2, (num_blocks + 1) * block, 1, 8)
        metadata = CommonAttentionMetadata.build(query_lens, seq_lens, table, torch.tensor(slots))
        attention, lane_attention = (UBatchAttention(shape, filled(shape, block, cached)) for _ in range(2))
        plans = lane_attention.plan_lanes(split_attn_metadata(slices, metadata))
        rows = [piece.token_slice for piece in slices]
        found = torch.cat([plan.forward(q[own], k[own], v[own], 0) for plan, own in zip(plans, rows, strict=True)])
        expected = attention.plan(metadata).forward(q, k, v, 0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=lambda text, s=seed: f"seed {s}: {text}")
    assert min(engaged - moved, moved, refused) > 20


def filled(shape: AttentionShape, block: int, numbers: Tensor) -> PagedKVCache:
    cache = PagedKVCache(shape.cache_spec(1, block, torch.float32), numbers.shape[1] // block)
    cache.write(0, *numbers, torch.arange(numbers.shape[1]))
    return cache
