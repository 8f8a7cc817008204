"""`host_loopback_batched`: rows by expert and back, what crosses, and what it refuses. What it does for a layer whose
combines are signalled is in `test_moe_signalled`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layers import make_layer, make_tokens

from moe import BatchedDispatch, EmulatedLink, make_all2all
from moe.all2all.host_loopback_batched import HostLoopbackBatchedAll2All, sort_pairs, sum_pairs
from moe.all2all.layouts import blocks_of

# -------------------------------------------------------------------------------------------------- by expert, and back


@settings(max_examples=20)
@given(
    tokens=st.integers(0, 9),
    top_k=st.integers(1, 4),
    experts=st.integers(4, 6),
    unrouted=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_every_pair_has_its_row(tokens: int, top_k: int, experts: int, unrouted: float, seed: int) -> None:
    layer = make_layer(experts, seed=seed)
    routed = make_tokens(layer, tokens, top_k, seed, unrouted=unrouted)
    ids = torch.where(torch.rand(routed.ids.shape) < 0.1, experts + 3, routed.ids)  # no expert's, either
    batches = sort_pairs(routed.x, ids, experts)
    assert batches.hidden_states.shape == (experts, tokens, layer.hidden_size)
    assert batches.hidden_states.is_contiguous()
    assert batches.rows_per_expert.dtype is torch.int32
    assert not batches.overflowed.any()
    rows = batches.row_of_pair.tolist()
    for expert in range(experts):
        pairs = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]
        assert batches.rows_per_expert[expert] == len(pairs)
        assert [rows[pair] for pair in pairs] == [expert * tokens + nth for nth in range(len(pairs))]
        for nth, pair in enumerate(pairs):
            assert torch.equal(batches.hidden_states[expert, nth], routed.x[pair // top_k])
    nowhere = [pair for pair, chosen in enumerate(ids.flatten().tolist()) if not 0 <= chosen < experts]
    assert all(rows[pair] == experts * tokens for pair in nowhere)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_summed_in_its_own_order(dtype: torch.dtype) -> None:
    """Bit by bit as alone, whoever is next to it; what nobody wrote is NaN, and counts for nothing."""
    rows, weights = torch.randn(7, 5, 33).to(dtype), torch.rand(7, 5)
    ids = torch.randint(-1, 4, (7, 5))
    rows[ids < 0], weights[ids < 0] = float("nan"), float("inf")
    whole = sum_pairs(rows, ids, weights, 4)
    for token in range(7):
        alone = slice(token, token + 1)
        assert torch.equal(sum_pairs(rows[alone], ids[alone], weights[alone], 4), whole[alone])
        total = torch.zeros(33)
        for choice in range(5):
            if ids[token, choice] >= 0:
                total = total + rows[token, choice].float() * weights[token, choice]
        assert torch.equal(whole[token], total.to(dtype))
    for gave_up in (0, 1):
        found = sum_pairs(rows, ids, weights, 4, torch.tensor([gave_up], dtype=torch.int32))
        assert found.isnan().all() if gave_up else torch.equal(found, whole)


def test_the_kernel_sums_as_torch_does() -> None:
    pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")
    from triton_batches import DEVICE

    from moe.kernels.reduce import sum_choices

    rows, weights, ids = torch.randn(6, 3, 40), torch.rand(6, 3), torch.randint(-1, 5, (6, 3))
    rows[ids < 0], weights[ids < 0] = float("nan"), float("nan")
    given = [each.to(DEVICE) for each in (rows, ids, weights)]
    for gave_up in (None, 0, 1):
        flag = None if gave_up is None else torch.tensor([gave_up], dtype=torch.int32)
        told = None if flag is None else flag.to(DEVICE)
        found = sum_choices(given[0], given[1], 0, 5, given[2], told).cpu()
        torch.testing.assert_close(found, sum_pairs(rows, ids, weights, 5, flag), equal_nan=True)
        assert bool(found.isnan().all()) is bool(gave_up)


def test_a_token_that_chooses_an_expert_too_often_is_not_lost_silently() -> None:
    layer = make_layer(4)
    kernel = layer.kernel(HostLoopbackBatchedAll2All(num_experts=4))
    x, weights = torch.randn(3, layer.hidden_size), torch.ones(3, 2)
    ids = torch.tensor([[1, 1], [1, 2], [1, 3]])  # four rows for an expert that has room for three tokens
    output = kernel(x, weights, ids)
    assert output.isnan().all(1).tolist() == [False, False, True]
    expected = make_layer(4).kernel(make_all2all("local", group=None, num_experts=4))(x, weights, ids)
    torch.testing.assert_close(output[:2], expected[:2])


# ------------------------------------------------------------------------------------------------------- the transport


def transport(num_experts: int = 8, **options: Any) -> HostLoopbackBatchedAll2All:
    made = make_all2all("host_loopback_batched", group=None, num_experts=num_experts, **options)
    assert isinstance(made, HostLoopbackBatchedAll2All)
    return made


def test_what_crosses() -> None:
    """Tokens once, results one by one."""
    layer, there = make_layer(), transport(bytes_factor=1.5)
    routed = make_tokens(layer, 5, 3)
    sent = there.dispatch(routed.x, routed.ids, routed.weights)
    assert sent.bytes_sent == round(1.5 * (routed.x.nbytes + 5 * 3 * 8))
    arrived = sent.wait()
    assert isinstance(arrived, BatchedDispatch)
    assert arrived.hidden_states.shape == (8, 5, layer.hidden_size)
    home = there.combine(torch.ones_like(arrived.hidden_states), arrived.handle)
    assert home.bytes_sent == round(1.5 * 3 * routed.x.nbytes)
    torch.testing.assert_close(home.wait(), torch.ones_like(routed.x))  # weights sum to 1
    assert there.pinned_bytes == 1 << (round(3 * routed.x.nbytes) - 1).bit_length()


@pytest.mark.parametrize("cut", [False, True], ids=["dispatches", "one_dispatch"])
def test_chunks_have_their_own_experts_rows(cut: bool) -> None:
    layer, there = make_layer(), transport()
    routed = make_tokens(layer, 6, 3, unrouted=0.2)
    blocks = blocks_of(8, 3)
    given = routed.x, routed.ids, routed.weights, blocks
    chunks = there.dispatch_cut(*given).wait() if cut else [each.wait() for each in there.dispatch_chunks(*given)]
    total = torch.zeros_like(routed.x)
    for number, (chunk, block) in enumerate(zip(chunks, blocks, strict=True)):
        assert chunk.handle.chunk == number
        counts = [int((routed.ids == expert).sum()) if expert in block else 0 for expert in range(8)]
        assert chunk.rows_per_expert.tolist() == counts
        y = torch.full_like(chunk.hidden_states, float("nan"))
        for expert, count in enumerate(counts):
            y[expert, :count] = chunk.hidden_states[expert, :count]
        total += there.combine(y, chunk.handle).wait()
    here = ((routed.ids >= 0) * routed.weights).sum(1, keepdim=True)
    torch.testing.assert_close(total, here * routed.x)


def test_an_emulated_link_delays_it_and_signals_nothing() -> None:
    layer = make_layer()
    link = make_all2all(
        "emulated_link", group=None, num_experts=8, link=EmulatedLink(1e-5, 1e9), inner="host_loopback_batched"
    )
    assert link.traits.batched
    assert not link.traits.signals
    routed = make_tokens(layer, 4)
    torch.testing.assert_close(layer.kernel(link)(routed.x, routed.weights, routed.ids), layer.expected(routed))
