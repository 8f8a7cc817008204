"""Every Triton kernel once, against torch: on a GPU compiled, where it decides whether the rest makes sense, else
interpreted. Needs nothing but pytest, torch and Triton."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batches import make_batch, make_mla_batch
from moe_layers import settings_of
from repository import ROOT
from torch import Tensor
from triton_batches import DEVICE, moved, moved_cache

from attention import AttentionShape, MLAKVCache, MLAShape, make_attention_backend
from attention.kernels import decode as decode_kernels
from moe import SigmoidTopKRouter, dequantize_blocks, fp8_linear, make_experts, quantize_blocks
from ubatch.kernels import autotuner
from ubatch.kernels.triton_jit import INTERPRETED

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.long

LAYER = (4, 32, 16)
"""experts, hidden and intermediate size"""
CASES: dict[str, tuple[Callable[[], None], set[str]]] = {}


def launches(*kernels: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Mark a case with the kernels that it must launch, without the underscores and the word at their ends."""

    def register(case: Callable[[], None]) -> Callable[[], None]:
        CASES[case.__name__] = case, {f"_{kernel}_kernel" for kernel in kernels}
        return case

    return register


def there(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.cpu().float(), expected.cpu().float(), atol=tolerance, rtol=tolerance)


# --------------------------------------------------------------------------------------------------------------- moe


def layer() -> tuple[Tensor, Tensor]:
    experts, hidden, intermediate = LAYER
    return there(experts, 2 * intermediate, hidden) / hidden**0.5, there(experts, hidden, intermediate) / 4


@launches("map_and_count")
def slots_of_experts() -> None:
    from moe.expert_map import reference_map_and_count
    from moe.kernels import expert_map

    ids = torch.tensor([[0, 2], [1, -1], [2, 0]])
    table, turns = torch.tensor([[0, 1, 3, -1], [2, 1, 3, -1]], dtype=torch.int32), torch.tensor([2])
    expected, counts = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    slots = reference_map_and_count(ids, 3, (table, turns), expected)
    found = expert_map.map_and_count(ids.to(DEVICE), 3, (table.to(DEVICE), turns.to(DEVICE)), counts)
    assert found.tolist() == slots.tolist()
    assert counts.tolist() == expected.tolist()


@launches("count", "place", "grouped_gemm", "sum")
def experts_of_tokens() -> None:
    from moe.kernels import align

    w13, w2 = layer()
    for tokens in (20, align._FEW_PAIRS // 2 + 1):  # pairs that every program counts, and more
        x, ids = there(tokens, LAYER[1]), torch.randint(-1, LAYER[0], (tokens, 2), device=DEVICE)
        weights = torch.rand(tokens, 2, device=DEVICE)
        close(make_experts("triton", w13, w2)(x, ids, weights), make_experts("grouped", w13, w2)(x, ids, weights), 1e-2)


@launches("tile_batches", "grouped_gemm")
def experts_of_batches() -> None:
    w13, w2 = layer()
    x, counts = there(LAYER[0], 6, LAYER[1]), torch.tensor([6, 0, 3, 1], dtype=torch.int32, device=DEVICE)
    real = torch.arange(6, device=DEVICE) < counts[:, None]
    found, expected = (
        make_experts(name, w13, w2).run_batched(x, counts)  # type: ignore[attr-defined]
        for name in ("triton_batched", "grouped")
    )
    close(found[real], expected[real], 1e-2)


@launches("quantize")
def rows_in_fp8() -> None:
    from moe.kernels.quantize import quantize_rows

    x = there(5, 256)
    found, scales = quantize_rows(x)
    expected, expected_scales = quantize_blocks(x.cpu())
    close(scales, expected_scales, 1e-6)
    close(found, expected, 0.13)


@launches("quantize", "fp8_linear")
def projection_in_fp8() -> None:
    from moe.kernels.quantize import quantize_rows, quantize_weights

    x = there(20, 256)
    (weight,), (scales,) = quantize_weights(there(1, 384, 256))
    rows = dequantize_blocks(*quantize_rows(x), torch.float32).cpu()
    meant = weight.cpu().float() * scales.cpu().repeat_interleave(128, 0).repeat_interleave(128, 1)
    close(fp8_linear(x, weight, scales), rows @ meant.T, 1e-2)


@launches("down_signalling", "copy_signalled")
def blocks_that_signal() -> None:
    from moe.kernels.signals import copy_signalled, make_signals, project_down_signalling

    x, w2 = there(2, 70, 16), there(2, 130, 16) / 4
    counts = torch.tensor([70, 3], dtype=torch.int32, device=DEVICE)
    signals = make_signals(2, 70, 130, DEVICE)
    y = project_down_signalling(x, w2, counts, signals, 2)
    out = torch.full_like(y, -7.0)
    copy_signalled(y, counts, signals, out, 2)
    expected = x @ w2.transpose(1, 2)
    close(out[0], expected[0], 1e-2)
    close(out[1, :3], expected[1, :3], 1e-2)
    assert (out[1, 3:] == -7).all()
    signals.check()


@launches("copy")
def bytes_on_sms() -> None:
    from moe.kernels.copy import copy_on_sms

    x = torch.arange(999, device=DEVICE).to(torch.uint8)
    out = torch.zeros_like(x)
    copy_on_sms(out, x, 2)
    assert torch.equal(out, x)


@launches("topk")
def routing() -> None:
    from moe.kernels.router import route_topk

    bias = torch.randn(32)
    router = SigmoidTopKRouter(4, num_groups=4, top_groups=2, scale=2.5, correction_bias=bias)
    logits = torch.stack([torch.randperm(32) for _ in range(5)]) / 4 - 4.0
    weights, ids = router(logits)
    settings = {**settings_of(router), "bias": bias.to(DEVICE)}
    found, found_ids = route_topk(logits.to(DEVICE), **settings)
    assert torch.equal(found_ids.cpu(), ids)
    close(found, weights)


# --------------------------------------------------------------------------------------------------------- attention


def attend(requests: list[tuple[int, int]], **options: Any) -> None:
    batch = make_batch(requests, shape=AttentionShape(4, 2, 16), padding=1, **options)
    cache = moved_cache(batch)
    plan = make_attention_backend("triton", batch.shape, cache).plan(moved(batch.metadata))
    close(plan.forward(*(x.to(DEVICE) for x in (batch.q, batch.k, batch.v)), 0)[:-1], batch.expected()[:-1], 1e-2)


@launches("write", "attention", "reduce")
def decode() -> None:
    attend([(90, 1), (7, 1)])


@launches("write", "tiles", "attention")
def prefill() -> None:
    attend([(0, 9), (11, 5)])


@launches("mask_offsets")
def tree_of_drafts() -> None:
    attend([(20, 4), (7, 4)], drafts="tree")


@launches("write_latent", "latent_split", "reduce")
def latent_decode() -> None:
    batch = make_mla_batch([(90, 1), (7, 1)], shape=MLAShape(4, 32, 16, 16, 16), padding=1)
    store = batch.new_cache()
    cache = MLAKVCache(batch.spec, batch.num_blocks, DEVICE)
    cache.pool.memory.copy_(store.pool.memory)
    names = ("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv")
    inputs = {name: getattr(batch.inputs, name).to(DEVICE) for name in names}
    plan = make_attention_backend("triton", batch.shape, cache).plan(moved(batch.metadata))
    out = plan.forward(replace(batch.inputs, **inputs, rope=moved(batch.inputs.rope)), 0)
    close(out[:-1], batch.expected()[:-1], 1e-2)


@launches("pad")
def ragged_rows() -> None:
    from attention.kernels.batch import pad_ragged, unpad_ragged

    starts, x = torch.tensor([0, 3, 4], dtype=torch.int32, device=DEVICE), there(4, 2, 8)
    padded = pad_ragged(x, starts, 3)
    assert torch.equal(padded[1, 0], x[3])
    assert not padded[1, 1:].any()
    assert torch.equal(unpad_ragged(padded, starts, 4), x)


@launches("list_pages")
def pages() -> None:
    from attention.kernels.batch import list_pages

    table = torch.tensor([[3, 1, 9], [2, 9, 9]], dtype=torch.int32, device=DEVICE)
    starts, lens = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0, 1, 2], [5, 2]))
    found = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    list_pages(found, table, starts, lens, block_size=4, most_pages=2)
    assert found.tolist() == [3, 1, 2, -1]


@launches("fill")
def static_batch() -> None:
    from attention.kernels.batch import fill_batch

    batch = moved(make_batch([(5, 1), (2, 1)], block_size=4).metadata)
    starts, lens = (torch.full((9,), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    slots = torch.full((9,), 7, device=DEVICE)
    table = torch.full((8, 4), 7, dtype=torch.int32, device=DEVICE)
    fill_batch(
        (starts, lens, table, slots),
        (batch.query_start_loc, batch.seq_lens, batch.block_table, batch.slot_mapping),
        num_real=2,
        num_actual_tokens=2,
        num_reqs=3,
        num_tokens=3,
        block_size=4,
        seq_len_fill=1,
        hidden_slot=99,
    )
    assert starts[:4].tolist() == [0, 1, 2, 2]
    assert lens[:3].tolist() == [6, 3, 1]
    assert slots[:3].tolist() == [*batch.slot_mapping.tolist(), 99]


# ------------------------------------------------------------------------------------------------------------ models


@launches("norm")
def norms() -> None:
    from model_runner.decoder import ops
    from model_runner.kernels.layer_ops import add_rms_norm, rms_norm

    x, residual, weight = torch.randn(3, 24), torch.randn(3, 24), torch.randn(24)
    there, residual_there, weight_there = (each.to(DEVICE) for each in (x, residual, weight))
    close(rms_norm(there, weight_there, 1e-6), ops.rms_norm(x, weight, 1e-6))
    normed, summed = add_rms_norm(there, residual_there, weight_there, 1e-6)
    close(summed, x + residual)
    close(normed, ops.rms_norm(x + residual, weight, 1e-6))


@launches("silu_mul", "sigmoid_mul")
def activation() -> None:
    from model_runner.kernels.layer_ops import sigmoid_mul, silu_mul

    x = torch.randn(3, 20)
    close(silu_mul(x.to(DEVICE)), torch.nn.functional.silu(x[:, :10]) * x[:, 10:])
    close(sigmoid_mul(x[:, :1].to(DEVICE), x.to(DEVICE)), torch.sigmoid(x[:, :1]) * x)


@launches("rotate")
def rope() -> None:
    from model_runner.decoder import ops
    from model_runner.decoder.rope import RotaryEmbedding
    from model_runner.kernels.layer_ops import rotate_heads
    from model_runner.models import Rope

    for share in (1.0, 0.5):
        embedding = RotaryEmbedding(Rope(10_000.0, partial_rotary_factor=share), 16, torch.device("cpu"))
        turn = embedding(torch.arange(3))
        heads, weight = torch.randn(3, 4, 16), torch.randn(4, 16)
        found = heads.to(DEVICE, copy=True)
        rotate_heads(found, turn.cos.to(DEVICE), turn.sin.to(DEVICE), weight.to(DEVICE), 1e-6)
        close(found, ops.normalise_and_rotate(heads, turn, weight, 1e-6))


@launches("resolve", "store")
def tokens_to_come() -> None:
    from model_runner.kernels.tokens import resolve_tokens, store_tokens

    future, places = torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.tensor([3, 1], device=DEVICE)
    store_tokens(future, places, torch.tensor([70, 50], device=DEVICE))
    assert resolve_tokens(torch.tensor([4, -1, -3], device=DEVICE), future).tolist() == [4, 50, 70]


@launches("place")
def lane_of_a_graph() -> None:
    from model_runner.kernels.tokens import place_lane

    ids, positions, valid = (torch.full((8,), 7, device=DEVICE) for _ in range(3))
    place_lane((ids, positions, valid), (torch.arange(9, device=DEVICE),) * 2, slice(2, 5), 4, 4, 1)
    assert ids.tolist() == [7] * 4 + [2, 3, 4, 0]
    assert valid.tolist() == [7, 3] + [7] * 6


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that are launched."""
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor as Launcher

        method = "__call__"
    else:
        from ubatch.kernels.quick_launch import QuickFunction as Launcher

        method = "__getitem__"
    names: set[str] = set()
    launch = getattr(Launcher, method)

    def note(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(kernel.fn.__name__)
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(Launcher, method, note)
    return names


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", list(CASES))
def test_once(case: str, launched: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotuner.CudaTimer, "tunes", lambda *_: False)  # the default tiles: tuning takes a minute
    monkeypatch.setattr(decode_kernels, "MIN_KEYS_PER_SPLIT", 16)
    run, kernels = CASES[case]
    run()
    assert kernels <= launched


def test_no_kernel_is_left_out() -> None:
    folders = (ROOT / floor / "kernels" for floor in ("moe", "attention", "model_runner"))
    files = [path for folder in folders for path in folder.glob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    kernels = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}
    assert len(kernels) > 20
    assert kernels == set().union(*(kernels for _, kernels in CASES.values()))
