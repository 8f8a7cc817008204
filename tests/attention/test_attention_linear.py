"""Linear attention in any chunks and any lanes equals the reference, a token at a time over whole requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_conformance import lanes_between
from c_kernels import KINDS, needs_c
from torch import Tensor
from torch.nn import functional as F
from triton_linear import heads_of, use_triton

from attention import CommonAttentionMetadata, GatedDeltaShape, StatePool, split_attn_metadata
from attention.lanes import make_linear_plan
from attention.linear import delta_rule
from attention.linear.delta_rule import reference_delta_rule
from attention.linear.plan import LinearPlan
from ubatch import ConfigError, ForwardMode

SHAPES = [GatedDeltaShape(2, 4, 8, 12, 4), GatedDeltaShape(3, 3, 4, 4, 2), GatedDeltaShape(1, 2, 6, 70, 1)]
LAYER = 1


class Layer:
    """Random inputs of a layer for a whole request, and what the reference makes of them."""

    def __init__(self, shape: GatedDeltaShape, conv: Tensor, length: int) -> None:
        self.qkv = torch.randn(length, shape.conv_dim)
        self.g, self.beta = -2 * torch.rand(length, shape.num_v_heads), torch.rand(length, shape.num_v_heads)
        padded = F.pad(self.qkv.T[None], (shape.conv_kernel - 1, 0))
        mixed = F.silu(F.conv1d(padded, conv.T[:, None], groups=shape.conv_dim))[0].T
        start = torch.zeros(shape.num_v_heads, shape.k_dim, shape.v_dim)
        self.expected, self.state = reference_delta_rule(*heads_of(mixed, shape), self.g, self.beta, start)


def described(
    shares: list[tuple[int, int, int]], padding: int, mode: ForwardMode = ForwardMode.MIXED, device: str = "cpu"
) -> CommonAttentionMetadata:
    """Metadata of (slot, computed, tokens) of each request."""
    lens = [count for _, _, count in shares]
    return CommonAttentionMetadata.build(
        lens,
        [done + count for _, done, count in shares],
        torch.zeros(len(shares), 1, dtype=torch.int32, device=device),
        torch.zeros(sum(lens) + padding, dtype=torch.int64, device=device),
        mode,
        state_slots=[slot for slot, _, _ in shares],
    )


MARKS: dict[str, tuple[Any, ...]] = {"torch": (), "triton": (), "best": (needs_c,), "8 lanes": (needs_c,)}
SEEDS = [
    pytest.param(kind, seed, marks=marks)
    for kind, marks in MARKS.items()
    for seed in range(3 if kind == "triton" else 12)
]


@pytest.fixture(params=[pytest.param(kind, marks=marks) for kind, marks in MARKS.items()])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        use_triton(monkeypatch)
        monkeypatch.setattr("attention.linear.triton_plan._FEW", 3)
    elif request.param == "torch":
        monkeypatch.setattr("attention.linear.plan.runs_in_c", lambda *tensors: False)
    else:
        defines = {name: value for name, value in KINDS[request.param].items() if name == "LANES"}
        compiled = delta_rule._kernel(**defines)
        monkeypatch.setattr(delta_rule, "_kernel", lambda: compiled)


@pytest.mark.wide_sample(4)
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("kernel", "seed"), SEEDS, indirect=["kernel"])
def test_any_chunks_and_lanes_equal_the_reference(seed: int) -> None:
    torch.manual_seed(seed)
    chance, shape = random.Random(seed), SHAPES[seed % len(SHAPES)]
    conv = torch.randn(shape.conv_kernel, shape.conv_dim)
    pool = StatePool(shape, 2, 7, torch.float32, torch.device("cpu"))
    for held in (*pool.windows, *pool.states):
        held.fill_(float("nan"))  # what requests before left behind
    requests = [Layer(shape, conv, chance.choice([1, 3, 40, 64, 150])) for _ in range(5)]
    slots, done = chance.sample(range(7), 5), [0] * 5
    straddled = 0
    while shares := [
        (index, len(each.qkv) - done[index]) for index, each in enumerate(requests) if done[index] < len(each.qkv)
    ]:
        shares = [(index, chance.choice([1, left, chance.randint(1, left)])) for index, left in shares]
        padding = chance.choice([0, 2])
        whole = described([(slots[index], done[index], count) for index, count in shares], padding)
        count = whole.num_actual_tokens
        edges = sorted(chance.randint(0, count) for _ in range(chance.randint(0, 2)))
        straddled += len(set(edges) - set(whole.query_start_loc_cpu))
        got = []
        inputs = [
            torch.cat([getattr(requests[index], name)[done[index] : done[index] + tokens] for index, tokens in shares])
            for name in ("qkv", "g", "beta")
        ]
        inputs = [torch.cat((each, each.new_full((padding, each.shape[1]), float("nan")))) for each in inputs]
        lanes = lanes_between(edges, whole)
        for piece, metadata in zip(lanes, split_attn_metadata(lanes, whole), strict=True):
            qkv, g, beta = (each[piece.token_slice] for each in inputs)
            got.append(make_linear_plan(pool, metadata).forward(qkv, g, beta, conv, LAYER))
        wanted = [requests[index].expected[done[index] : done[index] + tokens] for index, tokens in shares]
        out = torch.cat(got)
        torch.testing.assert_close(out[:count], torch.cat(wanted), atol=2e-5, rtol=1e-4)
        assert not out[count:].any()
        for index, tokens in shares:
            done[index] += tokens
    for index, each in enumerate(requests):
        torch.testing.assert_close(pool.states[LAYER][slots[index]], each.state, atol=2e-5, rtol=1e-4)
    assert straddled or seed not in (0, 1, 2)
    assert pool.states[0].isnan().all()  # the other layer's


@pytest.mark.usefixtures("kernel")
def test_a_request_that_is_not_finite_leaves_the_others_alone() -> None:
    shape, conv = SHAPES[0], torch.randn(SHAPES[0].conv_kernel, SHAPES[0].conv_dim)
    pool = StatePool(shape, 2, 3, torch.float32, torch.device("cpu"))
    lengths = (70, 1, 5)
    requests = [Layer(shape, conv, length) for length in lengths]
    requests[0].qkv[3] = float("nan")
    plan = make_linear_plan(pool, described([(slot, 0, length) for slot, length in enumerate(lengths)], 0))
    qkv, g, beta = (torch.cat([getattr(each, name) for each in requests]) for name in ("qkv", "g", "beta"))
    out = plan.forward(qkv, g, beta, conv, LAYER)
    assert out[:70].isnan().any()
    torch.testing.assert_close(out[70:], torch.cat([each.expected for each in requests[1:]]), atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("seed", range(2))
def test_states_see_accepted_drafts_only(seed: int) -> None:
    """Drafts from a request's first token on; some, all or none of them are right."""
    torch.manual_seed(seed)
    chance, shape, drafts = random.Random(seed), SHAPES[seed], 2
    conv = torch.randn(shape.conv_kernel, shape.conv_dim)
    pool = StatePool(shape, 1, 4, torch.float32, torch.device("cpu"), num_drafts=drafts)
    for held in (*pool.windows, *pool.states):
        held.fill_(float("nan"))
    requests, slots, done = [Layer(shape, conv, 20) for _ in range(3)], (3, 0, 1), [0, 0, 0]
    seen = set()
    while max(done) < 10:
        verify = not any(done) or chance.random() < 0.7
        counts = [1 + drafts if verify else chance.choice([1, 2]) for _ in requests]
        right = [chance.randint(1, count) if verify else count for count in counts]
        inputs = []
        for name in ("qkv", "g", "beta"):
            own = [getattr(each, name)[start : start + 3] for each, start in zip(requests, done, strict=True)]
            own = [each[:count].clone() for each, count in zip(own, counts, strict=True)]
            for each, count in zip(own, right, strict=True):
                each[count:] = torch.rand_like(each[count:])
            inputs.append(torch.cat(own))
        pool.follow(slots, done, counts, verify=verify)
        mode = ForwardMode.TARGET_VERIFY if verify else ForwardMode.MIXED
        qkv, g, beta = inputs
        plan = make_linear_plan(pool, described(list(zip(slots, done, counts, strict=True)), 0, mode))
        out = plan.forward(qkv, g, beta, conv, 0)
        for number, got in enumerate(out.split(counts)):
            start, count = done[number], right[number]
            wanted = requests[number].expected[start : start + count]
            torch.testing.assert_close(got[:count], wanted, atol=2e-5, rtol=1e-4)
            done[number] += count
            seen.add(count)
        assert pool.states[0][2].isnan().all()
    assert seen == {1, 2, 3}


STEPS = [  # slot, tokens before, tokens; verified or not
    ([(3, 0, 140), (0, 0, 1), (5, 0, 20)], ForwardMode.MIXED),
    ([(0, 1, 3), (3, 140, 3), (5, 20, 3)], ForwardMode.TARGET_VERIFY),
    ([(5, 21, 90), (3, 142, 1), (0, 4, 1)], ForwardMode.MIXED),
]


def outputs(shape: GatedDeltaShape, dtype: torch.dtype, device: str, patch: pytest.MonkeyPatch, *, triton: bool) -> Any:
    """What `STEPS` give, and what they leave in the pool."""
    patch.setattr("attention.lanes.runs_in_triton", lambda device: triton)
    torch.manual_seed(0)
    pool = StatePool(shape, 1, 6, dtype, torch.device(device), num_drafts=2)
    conv, results = torch.randn(shape.conv_kernel, shape.conv_dim).to(device), []
    for shares, mode in STEPS:
        slots, done, counts = zip(*shares, strict=True)
        pool.follow(slots, done, counts, verify=mode is ForwardMode.TARGET_VERIFY)
        tokens, heads = sum(counts), shape.num_v_heads
        qkv, a, b = (torch.randn(tokens, size).to(device, dtype) for size in (shape.conv_dim, heads, heads))
        plan = make_linear_plan(pool, described(shares, 0, mode, device))
        gates = plan.gates(a, b, torch.full((heads,), -0.3, device=device), torch.zeros(heads, device=device))
        results.append(plan.forward(qkv, *gates, conv, 0))
    return [*results, pool.states[0], pool.windows[0]]


@pytest.mark.wide
def test_triton_leaves_the_same_states(monkeypatch: pytest.MonkeyPatch) -> None:
    use_triton(monkeypatch)
    wanted, got = (outputs(SHAPES[0], torch.float32, "cpu", monkeypatch, triton=kind) for kind in (False, True))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_leaves_the_same_states_compiled(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heads of Qwen3-Next. bfloat16 rounds what the convolution gives, once, and in some places otherwise."""
    shape, near = GatedDeltaShape(16, 32, 128, 128, 4), 1e-4 if dtype is torch.float32 else 2e-2
    wanted, got = (outputs(shape, dtype, "cuda", monkeypatch, triton=kind) for kind in (False, True))
    torch.testing.assert_close(got, wanted, atol=near, rtol=near)


def test_gates_in_triton_equal_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StatePool(SHAPES[0], 1, 1, torch.float32, torch.device("cpu"))
    fused, bias = torch.linspace(-90, 90, 9 * 48).view(9, 48).bfloat16(), torch.randn(4)
    a, b, rate = fused[:, 3:7], fused[:, 40:44], -torch.rand(4)
    wanted = make_linear_plan(pool, described([(0, 0, 9)], 0)).gates(a, b, rate, bias)
    use_triton(monkeypatch)
    got = make_linear_plan(pool, described([(0, 0, 9)], 0)).gates(a, b, rate, bias)
    torch.testing.assert_close(got, wanted, atol=0.0, rtol=2e-6)


def test_what_cannot_run_is_refused() -> None:
    pool = StatePool(SHAPES[0], 1, 1, torch.float32, torch.device("cpu"))
    empty = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ConfigError, match="state_slots"):
        LinearPlan(pool, CommonAttentionMetadata.build([1], [1], *empty))
    verify = CommonAttentionMetadata.build([1], [1], *empty, ForwardMode.TARGET_VERIFY, state_slots=[0])
    with pytest.raises(ConfigError, match="keeps the inputs of 0 tokens"):
        LinearPlan(pool, verify)
    with pytest.raises(ConfigError, match="3 value heads cannot share 2"):
        GatedDeltaShape(2, 3, 4, 4, 4)
    with pytest.raises(ConfigError, match="at least 1"):
        StatePool(SHAPES[0], 0, 4, torch.float32, torch.device("cpu"))
