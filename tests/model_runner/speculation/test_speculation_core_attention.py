"""Attention of draft models: accepted tokens taken in with ragged lengths, and decode steps planned all at once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import Batch, MLABatch, make_batch, make_mla_batch
from flashinfer_cases import install
from flashinfer_standin import StandIns
from torch import Tensor

from attention import (
    AttentionShape,
    CommonAttentionMetadata,
    GraphLimits,
    MLAShape,
    MultiStepDraftAttention,
    make_attention_backend,
)
from attention import lanes as attention_lanes
from model_runner import Step
from model_runner.drafting.runner import draft_extend_batch
from tests.support.shaped_steps import shaped_step
from ubatch import ConfigError, ForwardMode

MHA = AttentionShape(4, 2, 16)
MLA = MLAShape(num_heads=2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
PAGE = 32
OF_MHA, OF_MLA = ("torch", "auto", "triton", "trtllm_mha"), ("torch", "trtllm_mla")
BACKENDS = [*((name, False) for name in OF_MHA), *((name, True) for name in OF_MLA)]
PREFIXES, NODES = (9, 62, 1, 31), 4
ACCEPTED = ((0, 1, 2, 3), (4,), (8, 10), (12, 13, 15))
"""All of a chain, only a root, and paths through trees."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    install(monkeypatch, StandIns().find)


def make(requests: list[tuple[int, int]], mla: bool, **options: Any) -> Batch | MLABatch:
    if mla:
        return make_mla_batch(requests, shape=MLA, block_size=PAGE, **options)
    return make_batch(requests, shape=MHA, block_size=PAGE, **options)


def pick(batch: Batch | MLABatch, rows: Tensor, positions: Tensor, metadata: CommonAttentionMetadata) -> Any:
    """A batch of these rows of another, as `metadata` says."""
    if isinstance(batch, Batch):
        return replace(batch, metadata=metadata, q=batch.q[rows], k=batch.k[rows], v=batch.v[rows])
    inputs = batch.inputs
    chosen = {name: getattr(inputs, name)[rows] for name in ("q_nope", "q_rope", "latent", "k_rope")}
    rope = replace(inputs.rope, positions=positions)
    return replace(batch, metadata=metadata, inputs=replace(inputs, **chosen, rope=rope))


def forward(plan: Any, batch: Batch | MLABatch) -> Tensor:
    out: Tensor = (
        plan.forward(batch.q, batch.k, batch.v, 0) if isinstance(batch, Batch) else plan.forward(batch.inputs, 0)
    )
    return out


def step_of(metadata: CommonAttentionMetadata, positions: Tensor) -> Step:
    """A target's step, as far as a draft model looks at it."""
    rows = torch.arange(metadata.num_actual_tokens)
    step = shaped_step(metadata.query_lens_cpu, metadata.mode)
    return replace(step, input_ids=rows, positions=positions, metadata=metadata)


# -- draft extend ------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "mla"), BACKENDS)
def test_accepted_tokens_are_taken_in(name: str, mla: bool) -> None:
    """Ragged, behind each request's prefix; what lies behind them in the cache is never read."""
    batch = make([(prefix, NODES) for prefix in PREFIXES], mla, drafts="chain")
    assert batch.metadata.spec_verify is not None
    step = step_of(batch.metadata, batch.metadata.spec_verify.positions)
    extend = draft_extend_batch(step, ACCEPTED)
    assert extend.rows.tolist() == [0, 1, 2, 3, 4, 8, 10, 12, 13, 15]
    assert extend.positions.tolist() == [9, 10, 11, 12, 62, 1, 2, 31, 32, 33]
    assert extend.last_rows.tolist() == [3, 4, 6, 9]
    metadata = extend.metadata
    assert metadata.mode is ForwardMode.DRAFT_EXTEND
    assert metadata.query_lens_cpu == (4, 1, 2, 3)
    assert metadata.seq_lens_cpu == (13, 63, 3, 34)
    slots = batch.metadata.slot_mapping
    assert torch.equal(metadata.slot_mapping, slots[torch.tensor([0, 1, 2, 3, 4, 8, 9, 12, 13, 14])])

    drafted = pick(batch, extend.rows, extend.positions, metadata)
    plan = make_attention_backend(name, batch.shape, cache := drafted.new_cache()).plan(metadata)
    torch.testing.assert_close(forward(plan, drafted), drafted.expected(cache=(slow := drafted.new_cache())))
    for fast_pool, slow_pool in zip(cache._pools, slow._pools, strict=True):
        assert torch.equal(fast_pool.blocks(0), slow_pool.blocks(0))


def test_after_a_step_without_drafts_all_rows_are_taken_in() -> None:
    batch = make([(5, 3), (0, 2), (9, 1)], mla=False)
    step = step_of(batch.metadata, torch.tensor([5, 6, 7, 0, 1, 9]))
    extend = draft_extend_batch(step, [()] * 3)
    assert extend.metadata is batch.metadata
    assert (extend.rows.tolist(), extend.last_rows.tolist()) == ([0, 1, 2, 3, 4, 5], [2, 4, 5])


@pytest.mark.parametrize("rows", [[(0,), ()], [(0, 1), (3,)], [(0,)]])
def test_rows_that_are_no_path_from_the_root(rows: list[tuple[int, ...]]) -> None:
    batch = make([(5, 2), (3, 2)], mla=False, drafts="chain")
    with pytest.raises(ConfigError, match=r"are its rows \[0, 2\]; accepted rows are"):
        draft_extend_batch(step_of(batch.metadata, torch.arange(4)), rows)


# -- steps in a row ----------------------------------------------------------------------------------------------------

STEPS = 3
CAPTURED = [("triton", False), ("trtllm_mha", False), ("trtllm_mla", True)]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "mla", "captured"), [*((*each, False) for each in BACKENDS), *((*each, True) for each in CAPTURED)]
)
def test_steps_that_are_planned_at_once(name: str, mla: bool, captured: bool) -> None:
    """Step i sees what steps 0 to i wrote; some requests get into their next page on the way.

    Plans for a graph have room for more requests, and were captured with the shortest: every step has its own buffers.
    """
    count, room = len(PREFIXES), len(PREFIXES) + 2 * captured
    batch = make([(prefix, STEPS) for prefix in PREFIXES], mla)
    slots, table = batch.metadata.slot_mapping.view(count, STEPS).T.contiguous(), batch.metadata.block_table
    fast, slow = batch.new_cache(), batch.new_cache()
    states = MultiStepDraftAttention(batch.shape, fast, STEPS, name)
    if captured:
        states.init_graph_buffers(GraphLimits(room, room, 4 * PAGE))
        nothing = torch.zeros(room, 1, dtype=torch.int32), torch.full((room,), -1)
        shortest = CommonAttentionMetadata.build([1] * room, [1] * room, *nothing, ForwardMode.DECODE)
        plans = states.plan_for_graph(shortest)
        states.replan(plans, PREFIXES, table, slots)
    else:
        plans = states.plan(PREFIXES, table, slots)
    assert len(plans) == STEPS
    for step, plan in enumerate(plans):
        lens = [prefix + step + 1 for prefix in PREFIXES]
        metadata = CommonAttentionMetadata.build([1] * count, lens, table, slots[step], ForwardMode.DECODE)
        rows, positions = torch.arange(count) * STEPS + step, torch.tensor(PREFIXES) + step
        padded = pick(batch, *(torch.cat((each, each[: room - count])) for each in (rows, positions)), metadata)
        expected = pick(batch, rows, positions, metadata).expected(cache=slow)
        torch.testing.assert_close(forward(plan, padded)[:count], expected, atol=1e-5, rtol=1e-5)


def test_every_step_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One decode back end each, with a workspace of its own, and none for prefills."""
    made = []

    def counted(*args: Any) -> Any:
        made.append(make_attention_backend(*args))
        return made[-1]

    monkeypatch.setattr(attention_lanes, "make_attention_backend", counted)
    rng = random.Random(0)
    batch = make([(rng.randrange(1, 40), STEPS) for _ in range(3)], mla=False)
    states = MultiStepDraftAttention(batch.shape, batch.new_cache(), STEPS, "torch")
    assert (states.num_steps, states.backend_name, len(set(map(id, made)))) == (STEPS, "torch", STEPS)
    lens = [seq - STEPS for seq in batch.metadata.seq_lens_cpu]
    slots = batch.metadata.slot_mapping.view(3, STEPS).T
    assert len(states.plan(lens, batch.metadata.block_table, slots[:2])) == 2
    held = states.memory()
    assert list(held) == [f"step {step}/torch" for step in range(STEPS)]
    assert [number > 0 for number in held.values()] == [True, True, False]
    assert len({state._workspace._memory.data_ptr() for state in made[:2]}) == 2
    assert not any(state._workspace._memory.any() for state in made)

    with pytest.raises(ConfigError, match="4 draft steps were planned, but there are states for 3"):
        states.plan(lens, batch.metadata.block_table, torch.zeros(4, 3, dtype=torch.int64))
    with pytest.raises(ConfigError, match="at least 1 step in a row, not 0"):
        MultiStepDraftAttention(batch.shape, batch.new_cache(), 0)
