"""What only a GPU shows of the Triton experts: tensor cores in every dtype, every choice of tiles, graphs, tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import dequantize_blocks, make_experts, quantize_blocks

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

FP8 = torch.float8_e4m3fn
E, H, INTERMEDIATE, K = 16, 512, 384, 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2, FP8: 9e-2}
"""Of the norm of the difference to that of the answer, which is computed in float32 from the same weights."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "autotune.json"
    monkeypatch.setenv("UBATCH_AUTOTUNE_CACHE", str(path))
    return path


def weights(dtype: torch.dtype, experts: int = E) -> tuple[Tensor, Tensor]:
    w13 = torch.randn(experts, 2 * INTERMEDIATE, H, device="cuda") / H**0.5
    w2 = torch.randn(experts, H, INTERMEDIATE, device="cuda") / INTERMEDIATE**0.5
    return w13.to(dtype), w2.to(dtype)


def tokens(count: int, dtype: torch.dtype, spread: int = E) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, H, device="cuda").to(dtype)
    weights, ids = torch.rand(count, spread, device="cuda").topk(K)
    ids[torch.rand(count, K, device="cuda") < 0.1] = -1
    return x, ids, weights / weights.sum(1, keepdim=True)


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    assert (found.float() - expected.float()).norm() <= TOLERANCE[dtype] * expected.float().norm()


def answer(w13: Tensor, w2: Tensor, x: Tensor, ids: Tensor, weights: Tensor, first: int = 0) -> Tensor:
    return make_experts("grouped", w13.float(), w2.float(), first)(x.float(), ids, weights)


def experts_of(dtype: torch.dtype, first: int = 0, **options: Any) -> tuple[Any, Tensor, Tensor]:
    w13, w2 = weights(torch.bfloat16 if dtype == FP8 else dtype)
    quantize = "fp8" if dtype == FP8 else None
    return make_experts("triton", w13, w2, first, quantize=quantize, **options), w13, w2


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("count", [1, 64, 700])
def test_tokens(dtype: torch.dtype, count: int) -> None:
    first = 3 if count == 64 else 0
    experts, w13, w2 = experts_of(dtype, first, num_experts=2 * E)
    x, ids, routed = tokens(count, experts.dtype, E + 6)
    check(experts(x, ids, routed), answer(w13, w2, x, ids, routed, first), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("arrives_in_fp8", [False, True], ids=["", "fp8 arrives"])
def test_batches(dtype: torch.dtype, arrives_in_fp8: bool) -> None:
    experts, w13, w2 = experts_of(dtype)
    counts = torch.randint(0, 40, (E,), dtype=torch.int32, device="cuda")
    counts[3] = 0
    x = torch.randn(E, 48, H, device="cuda").to(experts.dtype)
    scales = None
    exact = x
    if arrives_in_fp8:
        x, scales = quantize_blocks(x)
        exact = dequantize_blocks(x, scales, experts.dtype)
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)
    x.view(torch.int8)[torch.arange(48, device="cuda") >= counts[:, None]] = -1  # nan in every dtype
    found = experts.run_batched(x, counts, scales)
    expected = make_experts("grouped", w13.float(), w2.float()).run_batched(exact.float(), counts)
    real = torch.arange(48, device="cuda") < counts[:, None]
    check(found[real], expected[real], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8], ids=str)
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("gated", [True, False], ids=["up", "down"])
@pytest.mark.parametrize("claimed", [False, True], ids=["dealt", "claimed"])
def test_every_choice_of_tiles_is_right(dtype: torch.dtype, rows: int, gated: bool, claimed: bool) -> None:
    """The autotuner looks at nothing but the time."""
    from moe.kernels.align import align_pairs
    from moe.kernels.gemm_configs import gemm_configs
    from moe.kernels.grouped_gemm import Rows, Weights, project_down, project_up
    from moe.kernels.quantize import quantize_rows, quantize_weights
    from moe.kernels.reduce import sum_choices

    base = torch.bfloat16 if dtype == FP8 else dtype
    w13, w2 = weights(base)
    x, ids, routed = tokens(400, base)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    work = align_pairs(ids, 0, E, rows)
    if dtype == FP8:
        up, down, tokens_in = Weights(*quantize_weights(w13)), Weights(*quantize_weights(w2)), Rows(*quantize_rows(x))
    else:
        up, down, tokens_in = Weights(w13), Weights(w2), Rows(x)
    default_up, default_down = (gemm_configs(rows, dtype, gated=which)[0] for which in (True, False))
    expected = answer(w13, w2, x, ids, routed)
    for config in gemm_configs(rows, dtype, gated=gated, claimed=claimed):
        for programs in (sms, 7):
            h = project_up(tokens_in, up, work, K, config if gated else default_up, programs)
            y = project_down(h, down, work, routed, base, default_down if gated else config, programs)
            found = sum_choices(y.unflatten(0, (400, K)), ids, 0, E)
            try:
                check(found, expected, dtype)
            except AssertionError as error:
                raise AssertionError(f"wrong with {config} on {programs} SMs") from error
    assert not work.tiles.counters[1:].any()


def test_no_tile_waits_for_an_sm_that_is_held() -> None:
    """A copy holds all SMs but a few; the products next to it are done first."""
    from moe.kernels.align import align_pairs
    from moe.kernels.copy import copy_on_sms
    from moe.kernels.gemm_configs import gemm_configs
    from moe.kernels.grouped_gemm import Rows, Weights, project_up

    (w13, _), (x, ids, _) = weights(torch.bfloat16), tokens(2000, torch.bfloat16)
    work, (config, *_) = align_pairs(ids, 0, E, 128), gemm_configs(128, torch.bfloat16, gated=True, claimed=True)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    there, host = (
        torch.zeros(1 << 28, dtype=torch.uint8, device="cuda"),
        torch.empty(1 << 28, dtype=torch.uint8).pin_memory(),
    )
    side, (begun, held, done) = torch.cuda.Stream(), (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def products() -> Tensor:
        return project_up(Rows(x), Weights(w13), work, K, config, sms).x

    expected = products()
    copy_on_sms(host, there, sms - 8)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        begun.record()
        copy_on_sms(host, there, sms - 8)
        held.record()
    begun.synchronize()
    found = products()
    done.record()
    torch.cuda.synchronize()
    rows = int((ids >= 0).sum())
    assert torch.equal(found[:rows], expected[:rows])
    assert done.elapsed_time(held) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("batched", [False, True], ids=["tokens", "batches"])
def test_a_captured_graph_follows_the_routing(dtype: torch.dtype, batched: bool) -> None:
    experts, _, _ = experts_of(dtype)
    arguments: list[tuple[Tensor, ...]] = []
    for spread in (E, 5, E):
        if batched:
            counts = torch.randint(0, spread, (E,), dtype=torch.int32, device="cuda")
            arguments.append((torch.randn(E, 32, H, device="cuda", dtype=torch.bfloat16), counts))
        else:
            arguments.append(tokens(100, torch.bfloat16, spread))
    run = experts.run_batched if batched else experts
    static = tuple(argument.clone() for argument in arguments[0])
    run(*static)  # compiles and tunes
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*static)
    for fresh in arguments:
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        graph.replay()
        eager = run(*fresh)
        real = torch.arange(32, device="cuda") < fresh[1][:, None] if batched else slice(None)
        assert torch.equal(out[real], eager[real])


def test_what_was_tuned_is_written(cache: Path) -> None:
    experts, w13, w2 = experts_of(torch.bfloat16)
    x, ids, routed = tokens(200, torch.bfloat16)
    check(experts(x, ids, routed), answer(w13, w2, x, ids, routed), torch.bfloat16)
    [(gpu, entries)] = json.loads(cache.read_text()).items()
    assert torch.cuda.get_device_name() in gpu
    kinds = {key.split(",")[0].split(" by ")[0] for key in entries}
    assert kinds == {"moe rows", "moe up", "moe down"}
    assert all("256 tokens x 4" in key for key in entries)


def test_a_shape_that_the_tma_cannot_read() -> None:
    w13 = torch.randn(4, 2 * 50, 100, device="cuda", dtype=torch.bfloat16) / 10
    w2 = torch.randn(4, 100, 50, device="cuda", dtype=torch.bfloat16) / 7
    x = torch.randn(30, 100, device="cuda", dtype=torch.bfloat16)
    routed, ids = torch.rand(30, 4, device="cuda").topk(2)
    found = make_experts("triton", w13, w2)(x, ids, routed)
    check(found, answer(w13, w2, x, ids, routed), torch.bfloat16)
