"""What is special about the `torch` back ends: how requests are grouped, their memory; the oracle; attention in parts.

`test_attention_conformance` compares the back ends with the oracle.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import Batch, fp8_scales, make_batch, make_mla_batch
from attention_conformance import OPTIONS, Bench, check

from attention import AttentionShape, MLAKVCache, MLAShape
from attention import lse as attention_lse
from attention.backends.native.mha import NativeAttentionBackend
from attention.backends.torch import groups as torch_groups
from attention.backends.torch import mla as torch_mla
from attention.backends.torch.mla import ExpandedGroup, TorchMLABackend, TorchMLAPlan
from attention.backends.torch.sdpa import TorchAttentionBackend
from attention.lse import merge_states, softmax_attention
from ubatch import ForwardMode
from ubatch.kernels.c_jit import why_not_c

pytestmark = pytest.mark.long

MHA, MLA = Bench("torch", False, TorchAttentionBackend), Bench("torch", True, TorchMLABackend)
MIXED = [(9, 4), (1, 2), (0, 4), (3, 1), (0, 7), (12, 1), (0, 0)]
BOTH = pytest.mark.parametrize("bench", [MHA, MLA], ids=["mha", "mla"])


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "num_calls"),
    [
        ([(0, 6)] * 4, 1),  # a batch of prompts
        ([(0, 1)] * 3, 1),
        ([(0, 5), (0, 9), (0, 2)], 1),  # ragged prompts, padded
        ([(5, 1), (9, 1), (2, 1), (18, 1)], 1),  # decode
        ([(7, 1), (7, 1)], 1),  # decode, whole blocks: no mask
        ([(4, 3), (4, 3)], 1),  # verify
        (MIXED, 3),  # fresh, decode, extend
        ([(0, 200), (0, 3)], 2),  # too ragged to pad
        ([(500, 1), (2, 1), (3, 1)], 2),
    ],
)
def test_few_calls(requests: list[tuple[int, int]], num_calls: int) -> None:
    assert len(check(MHA, make_batch(requests)).groups) == num_calls


def kinds(plan: TorchMLAPlan) -> tuple[int, int]:
    """Groups that attend to latents, and those that attend to expanded keys and values."""
    expanded = sum(isinstance(group, ExpandedGroup) for group in plan.groups)
    return len(plan.groups) - expanded, expanded


@pytest.mark.parametrize(
    ("requests", "options", "groups"),
    [
        ([(5, 1), (9, 1), (2, 1), (18, 1)], {}, (1, 0)),  # decode
        ([(0, 6)] * 4, {}, (0, 1)),  # prompts
        ([(0, 5), (0, 9), (0, 2)], {}, (0, 1)),
        ([(7, 5), (20, 4)], {}, (0, 1)),  # chunked prefill
        ([(20, 2), (20, 2)], {}, (1, 0)),  # few queries, long prefix
        ([*MIXED, (30, 5)], {}, (1, 2)),
        ([(0, 200), (0, 3)], {}, (0, 2)),
        ([(0, 6), (3, 6)], {"drafts": "tree"}, (1, 0)),
    ],
)
def test_few_groups_of_latents(requests: Any, options: dict[str, Any], groups: tuple[int, int]) -> None:
    assert kinds(check(MLA, make_mla_batch(requests, **options))) == groups


def test_gathers_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit on gathered bytes gives more calls and the same result."""
    batch = make_batch([(11, 1), (14, 1), (9, 1), (12, 1), (13, 1), (10, 1)])
    for limit, num_calls in ((32 * 2 * 8 * 4, 3), (1, 6)):
        monkeypatch.setattr(torch_groups, "_GATHER_BYTES", limit)
        assert len(check(MHA, batch).groups) == num_calls


@pytest.mark.parametrize("window", [1, 16, 17, 40, 200])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_windows_that_begin_anywhere_in_a_block(window: int, block_size: int) -> None:
    shape = AttentionShape(2, 1, 8, sliding_window=window)
    check(MHA, make_batch([(95, 1), (79, 1), (64, 3), (0, 30), (5, 1)], shape=shape, block_size=block_size))


def test_a_window_gathers_only_the_blocks_it_touches() -> None:
    batch = make_batch([(1000, 1), (900, 1)], shape=AttentionShape(2, 1, 8, sliding_window=32), block_size=16)
    backend = MHA.make(batch)
    batch.forward(backend.plan(batch.metadata))
    assert backend.nbytes <= 2 * 2 * (3 * 16) * 8 * 4 * 2  # 3 blocks of each request, rounded up to a power of two


@pytest.mark.parametrize(
    "bench",
    [MHA, MLA, *([] if why_not_c() else [Bench("native", False, NativeAttentionBackend)])],
    ids=lambda bench: bench.kind.name,
)
@pytest.mark.parametrize("number", [1, 4])
def test_any_mask_is_obeyed_also_a_row_that_sees_nothing(bench: Bench, number: int) -> None:
    batch = bench.batch([(9, number), (0, number), (20, number)], drafts="tree")
    verify: Any = batch.metadata.spec_verify
    mask = torch.rand(verify.custom_mask.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[: 9 + number] = False  # the first draft
    batch = replace(batch, metadata=replace(batch.metadata, spec_verify=replace(verify, custom_mask=mask)))
    assert not batch.forward(check(bench, batch))[0].any()


def test_a_chain_equals_a_tree_without_branches() -> None:
    chain = make_batch([(9, 3), (4, 3)], drafts="chain")
    causal = make_batch([(9, 3), (4, 3)], mode=ForwardMode.PREFILL)
    assert torch.equal(chain.expected(), causal.expected())


@BOTH
def test_fp8_is_read_with_its_scales(bench: Bench) -> None:
    """Against the unquantised batch: a scale that is forgotten is off by a factor of ten."""
    batch: Any = bench.batch([(40, 1), (0, 9), (11, 3)], fp8=True)
    exact: Any = bench.batch([(40, 1), (0, 9), (11, 3)])
    assert fp8_scales(0) != (1.0, 1.0)
    error = (batch.forward(bench.make(batch).plan(batch.metadata)) - exact.expected()).abs()
    assert error.max() < 0.3
    assert error.mean() > 1e-3  # it is quantised


# -- absorbed or expanded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "new", "absorbed"),
    [
        (1000, 1, True),  # decode
        (1000, 8, True),  # verify
        (4000, 160, True),
        (4000, 200, False),
        (0, 1, False),
        (0, 2000, False),  # prefill
        (64, 512, False),
    ],
)
def test_deepseek_takes_the_way_that_multiplies_less(prefix: int, new: int, absorbed: bool) -> None:
    """Counted here term by term, for one head."""
    shape = MLAShape(16, 512, 128, 64, 128)
    pairs = sum(prefix + i + 1 for i in range(new))
    into_latents = new * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
    cost_absorbed = into_latents + pairs * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim)
    expanding = (prefix + new) * shape.kv_lora_rank * (shape.qk_nope_head_dim + shape.v_head_dim)
    cost_expanded = expanding + pairs * (shape.qk_head_dim + shape.v_head_dim)
    assert (cost_absorbed < cost_expanded) == absorbed
    metadata = make_batch([(prefix, new)], heads=(1, 1, 1), block_size=64).metadata
    cache = MLAKVCache(shape.cache_spec(1, 64, torch.float32), 1)  # only the plan is looked at
    assert kinds(TorchMLABackend(shape, cache).plan(metadata)) == ((1, 0) if absorbed else (0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("absorbs", [True, False])
def test_both_ways_give_the_same(absorbs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_mla.LatentStep, "absorbs", lambda step, request: absorbs)
    assert bool(kinds(check(MLA, make_mla_batch([(20, 6), (9, 3), (40, 1)])))[0]) == absorbs


@pytest.mark.parametrize("chunk", [1, 8, 16])
def test_prefixes_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an empty chunk of one request beside a full one of another."""
    monkeypatch.setattr(torch_mla, "_CHUNK_TOKENS", chunk)
    for fp8 in (False, True):
        check(MLA, make_mla_batch([(30, 5), (2, 5), (25, 5)], fp8=fp8))


# -- memory and state --------------------------------------------------------------------------------------------------


def test_memory_is_bounded_by_the_chunk_not_by_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_mla, "_CHUNK_TOKENS", 32)
    held = set()
    for prefix in (64, 256, 512):
        batch = make_mla_batch([(prefix, 4), (prefix, 4)])
        backend = MLA.make(batch)
        torch.testing.assert_close(batch.forward(backend.plan(batch.metadata)), batch.expected(), atol=5e-6, rtol=1e-5)
        held.add(backend.nbytes)
    assert held == {1024 * 4}  # 32 rows of 20 numbers, rounded up to a power of two


def test_the_workspace_is_zeroed_and_grows_only_when_needed() -> None:
    """The second plan grew it after the first was made; both run."""
    small, large = make_batch([(9, 1)], seed=1), make_batch([(70, 1), (64, 1)], num_layers=2)
    backend = MHA.make(large)
    with torch.inference_mode():
        first = backend.plan(small.metadata)
        held = backend.nbytes
        assert held >= 2 * 12 * 2 * 8 * 4
        plan = backend.plan(large.metadata)
        assert backend.nbytes > held
        assert not backend._workspace.take(backend.nbytes // 4).any()
        small.forward(first, 1)
        large.forward(plan)
    held, workspace = backend.nbytes, backend._workspace.take(1).data_ptr()
    out = large.forward(backend.plan(large.metadata))  # outside of inference mode, too
    torch.testing.assert_close(out, large.expected(), atol=2e-6, rtol=1e-5)
    assert (backend.nbytes, backend._workspace.take(1).data_ptr()) == (held, workspace)


# -- the oracle, and attention in parts --------------------------------------------------------------------------------


def dense(batch: Batch, shape: AttentionShape, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention of one fresh prompt by explicit matrices, one per head, without any paging."""
    length = len(batch.q)
    scores = torch.einsum("qhd,khd->hqk", batch.q, batch.k.repeat_interleave(shape.group_size, 1)) * shape.softmax_scale
    if shape.soft_cap is not None:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores[:, (distance < 0) | (distance >= (shape.sliding_window or length))] = -torch.inf
    extra = torch.zeros(shape.num_heads) - torch.inf if sinks is None else sinks
    weights = torch.cat((scores, extra[:, None, None].expand(-1, length, 1)), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, batch.v.repeat_interleave(shape.group_size, 1))


@pytest.mark.parametrize("option", OPTIONS)
def test_the_reference_equals_dense_attention(option: str) -> None:
    batch = make_batch([(0, 12)], shape=AttentionShape(4, 2, 8, **OPTIONS[option]))
    torch.testing.assert_close(batch.expected(), dense(batch, batch.shape, batch.sinks), atol=2e-6, rtol=1e-5)


def test_the_reference_follows_a_tree() -> None:
    """Each draft's result is what it had alone at the end of its own branch."""
    batch = make_batch([(6, 5)], drafts="tree", seed=3)
    verify: Any = batch.metadata.spec_verify
    mask, out = verify.mask_of(0), batch.expected()
    for draft in range(5):
        branch = mask[draft, 6:].nonzero().flatten()
        alone = make_batch([(6, len(branch))], seed=3)
        alone = replace(
            alone, q=batch.q[branch], k=batch.k[branch], v=batch.v[branch], past_k=batch.past_k, past_v=batch.past_v
        )
        torch.testing.assert_close(alone.expected()[-1], out[draft], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -2.0, 1.0, 0.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("score_bytes", [1, 64 << 20], ids=["row-by-row", "at-once"])
def test_parts_merge_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, sinks: torch.Tensor | None, score_bytes: int
) -> None:
    """Keys cut in three, one part empty, scores so large that exponents overflow unless they are shifted."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 3, 8, generator=generator) * 30
    k, v = torch.randn(2, 2, 2, 10, 8, generator=generator)
    mask = torch.zeros(2, 1, 3, 10)
    mask[0, :, :, 4:7] = -torch.inf  # one request's second part is empty
    whole, whole_lse = softmax_attention(q, k, v, scale=1.0, mask=mask, sinks=sinks)
    monkeypatch.setattr(attention_lse, "_SCORE_BYTES", score_bytes)
    state: Any = None
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        keys, values, hidden = k[:, :, start:stop], v[:, :, start:stop], mask[..., start:stop]
        part = softmax_attention(q, keys, values, scale=1.0, mask=hidden, sinks=sinks if start == 0 else None)
        state = part if state is None else merge_states(*state, *part)
    torch.testing.assert_close(state, (whole, whole_lse), atol=2e-6, rtol=1e-5)


def test_an_empty_state_weighs_nothing_whatever_it_holds() -> None:
    out, lse = torch.ones(3, 2, 4), torch.tensor([[0.0, 1.0], [-torch.inf, 2.0], [-torch.inf, -torch.inf]])
    other = torch.full((3, 2, 4), torch.nan)
    merged, merged_lse = merge_states(out, lse, other, torch.full((3, 2), -torch.inf))
    assert torch.equal(merged_lse, lse)
    assert torch.equal(merged, torch.where(lse.isneginf()[..., None], 0.0, out))
    swapped, _ = merge_states(other, torch.full((3, 2), -torch.inf), out, lse)
    assert torch.equal(swapped, merged)
