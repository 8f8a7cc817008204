"""Each Triton kernel of the experts against its reference, and how their tiles are chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layers import make_layer, make_tokens
from torch import Tensor
from triton_batches import DEVICE

from moe import make_experts, quantize_blocks
from moe.all2all.host_loopback_batched import sum_pairs
from moe.experts import triton_batched
from moe.experts.triton import TritonExperts
from moe.kernels import gemm_configs as configs_module
from moe.kernels.align import align_pairs, reference_align_pairs, tile_batches
from moe.kernels.gemm_configs import GemmConfig, RowTile, gemm_configs, row_tiles
from moe.kernels.grouped_gemm import (
    Rows,
    Weights,
    project_down,
    project_up,
    reference_project_down,
    reference_project_up,
)
from moe.kernels.quantize import quantize_rows, quantize_weights
from moe.kernels.reduce import sum_choices
from ubatch.kernels.autotuner import Autotuner, CudaTimer
from ubatch.kernels.triton_jit import descriptor
from ubatch.streams.streams import SMBudget

FP8 = torch.float8_e4m3fn


@settings(max_examples=10)
@given(
    tokens=st.integers(1, 90),
    top_k=st.integers(1, 5),
    num_experts=st.sampled_from([1, 3, 8, 33]),
    first=st.integers(0, 3),
    spread=st.integers(1, 40),
    rows=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_pairs_are_aligned(
    tokens: int, top_k: int, num_experts: int, first: int, spread: int, rows: int, dtype: torch.dtype
) -> None:
    ids = torch.randint(-1, spread, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).to(dtype)
    found = align_pairs(ids.to(DEVICE), first, num_experts, rows)
    pairs, tiles = reference_align_pairs(ids, first, num_experts, rows)
    assert found.pair_of_row[: len(pairs)].tolist() == pairs
    count = int(found.tiles.counters[0])
    assert count <= found.tiles.most
    assert [tuple(tile) for tile in found.tiles.table[:count].tolist()] == tiles


@pytest.mark.parametrize("ids", [[[2**40, -(2**40)]], [[2**32 + 1, 1]]], ids=["far", "wraps"])
def test_ids_are_not_cut_to_32_bits(ids: list[list[int]]) -> None:
    found = align_pairs(torch.tensor(ids, device=DEVICE), 0, 4, 16)
    assert int(found.tiles.counters[0]) == sum(0 <= expert < 4 for expert in ids[0])


def test_batches_are_cut_into_tiles() -> None:
    counts = torch.tensor([3, 0, 20, 7], dtype=torch.int32, device=DEVICE)
    found = tile_batches(counts, 20, 8)
    expected = [[0, 0, 3], [2, 40, 48], [2, 48, 56], [2, 56, 60], [3, 60, 67]]
    assert int(found.counters[0]) == 5
    assert found.table[:5].tolist() == expected
    assert found.most == 12


@pytest.mark.parametrize("top_k", [1, 3])
def test_choices_are_summed(top_k: int) -> None:
    rows, ids = torch.randn(6, top_k, 40), torch.randint(-1, 6, (6, top_k))
    ids[4] = 9
    rows[(ids < 1) | (ids >= 4)] = float("nan")
    found = sum_choices(rows.to(DEVICE), ids.to(DEVICE), 1, 3).cpu()
    torch.testing.assert_close(found, sum_pairs(rows, ids - 1, torch.ones(6, top_k), 3))
    assert not found[4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantized_as_in_torch(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 400)[:, :384] * torch.logspace(-6, 3, 384)).to(dtype)
    x[2] = 0
    found, scales = quantize_rows(x.to(DEVICE))
    expected, expected_scales = quantize_blocks(x)
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=1e-6, atol=0)
    if DEVICE == "cpu":  # a GPU may divide by a hair differently, and so round to the next number
        assert torch.equal(found.float(), expected.float())
    torch.testing.assert_close(found.float().cpu(), expected.float(), rtol=0.13, atol=2**-9)


def test_quantized_rows_of_batches_stop_at_the_counts() -> None:
    x = torch.randn(6, 128, device=DEVICE)
    found, scales = quantize_rows(x, torch.tensor([2, 0], dtype=torch.int32, device=DEVICE))
    expected, expected_scales = quantize_rows(x[:2])
    assert torch.equal(found[:2].float(), expected.float())
    assert torch.equal(scales[:2], expected_scales)


@pytest.mark.sample(6)
@pytest.mark.parametrize("swap", [False, True], ids=["", "swap"])
@pytest.mark.parametrize("claimed", [False, True], ids=["dealt", "claimed"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 48), (40, 20), (13, 7)], ids=["tma", "masks", "pointers"])
def test_projections_of_one_expert(swap: bool, claimed: bool, hidden: int, intermediate: int) -> None:
    """Every row of two tiles against the formula, on both ways to read; more programs than tiles, and fewer."""
    x, w13, w2 = torch.randn(20, hidden), torch.randn(1, 2 * intermediate, hidden), torch.randn(1, hidden, intermediate)
    assert (descriptor(w13[0].to(DEVICE), (16, 32)) is None) == (hidden == 13)
    weights = torch.rand(20, 1)
    alignment = align_pairs(torch.zeros(20, 1, dtype=torch.int64, device=DEVICE), 0, 1, 16)
    config = GemmConfig(32, 32, 2, swap=swap, claimed=claimed, group=2)
    for programs in (1, 3, 99):
        up = project_up(Rows(x.to(DEVICE)), Weights(w13.to(DEVICE)), alignment, 1, config, programs)
        down = project_down(up, Weights(w2.to(DEVICE)), alignment, weights.to(DEVICE), torch.float32, config, programs)
        expected = reference_project_up(x, w13[0])
        torch.testing.assert_close(up.x.cpu(), expected, atol=1e-4, rtol=1e-4)
        expected = reference_project_down(expected, w2[0], weights[:, 0])
        torch.testing.assert_close(down.cpu(), expected, atol=1e-3, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------- choice of tiles


@pytest.mark.parametrize(("rows", "best"), [(1, 16), (4, 16), (16, 16), (20, 32), (64, 64), (4000, 128)])
def test_tiles_suit_the_rows(monkeypatch: pytest.MonkeyPatch, rows: int, best: int) -> None:
    monkeypatch.setattr(configs_module, "INTERPRETED", False)
    tiles = [tile.rows for tile in row_tiles.__wrapped__(rows, torch.bfloat16)]
    assert tiles[0] == best
    assert len(tiles) == len(set(tiles)) <= 3
    assert all(16 <= tile <= 128 and best / 2 <= tile <= 2 * best for tile in tiles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_configs_are_consistent(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, gated: bool, rows: int) -> None:
    monkeypatch.setattr(configs_module, "INTERPRETED", False)
    configs = gemm_configs.__wrapped__(rows, dtype, gated=gated)
    assert len(configs) == len(set(configs)) >= 1
    alone = gemm_configs.__wrapped__(rows, dtype, gated=gated, one_per_sm=True)
    assert {config.per_sm for config in alone} == {1}
    assert len(alone) == len(set(alone))
    claimed = gemm_configs.__wrapped__(rows, dtype, gated=gated, claimed=True)
    assert all(config.claimed for config in claimed)
    for config in configs:
        assert math.log2(config.columns).is_integer()
        assert math.log2(config.depth).is_integer()
        if dtype == FP8:
            assert config.columns == config.depth == 128  # the blocks of the scales
        if config.swap:
            assert config.columns >= 64  # what a tensor core instruction takes


class EveryConfig(CudaTimer):
    """A timer that finds the last config fastest, and says what was tuned."""

    def __init__(self) -> None:
        self.now = 1.0

    def tunes(self, device: torch.device) -> bool:
        return True

    def can_time(self, device: torch.device) -> bool:
        return True

    def fingerprint(self, device: torch.device) -> str:
        return "GPU"

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        run()
        self.now /= 2
        return self.now


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_both_gemms_and_their_tiles_are_tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fp8: bool) -> None:
    """With made-up choices, because the interpreter has one; on a balanced batch, though this one is not."""
    tuner = Autotuner(EveryConfig(), tmp_path / "autotune.json")
    base = gemm_configs(16, FP8 if fp8 else torch.float32, gated=True)[0]
    monkeypatch.setattr(triton_batched, "row_tiles", lambda rows, dtype: (RowTile(16), RowTile(32)))
    monkeypatch.setattr(triton_batched, "gemm_configs", lambda *_, **__: (base, replace(base, swap=True)))
    monkeypatch.setattr(triton_batched, "autotune", tuner.choose)
    aligned: list[Tensor] = []

    def watch(ids: Tensor, *rest: int) -> object:
        aligned.append(ids)
        return align_pairs(ids, *rest)

    monkeypatch.setattr("moe.experts.triton.align_pairs", watch)
    hidden, intermediate = (128, 128) if fp8 else (32, 20)
    layer = make_layer(4, hidden, intermediate)
    routed = make_tokens(layer, 12, 2, only=range(1, 3))
    moved = (routed.x.to(DEVICE), routed.ids.to(DEVICE), routed.weights.to(DEVICE))
    experts = make_experts(
        "triton", layer.w13.to(DEVICE), layer.w2.to(DEVICE), quantize="fp8" if fp8 else None, num_experts=8
    )
    actual = experts(*moved).cpu()
    tolerance = 0.2 if fp8 else 1e-5
    torch.testing.assert_close(actual, layer.expected(routed), atol=tolerance, rtol=tolerance)
    [entries] = tuner._stored.values() if tuner._stored else []
    tuned = sorted(key.split(",")[0] for key in entries)
    assert tuned == ["moe down by 16", "moe down by 32", "moe rows", "moe up by 16", "moe up by 32"]
    assert all("16 tokens x 2, E=4/8 " in key for key in entries)
    assert entries[next(key for key in entries if "rows" in key)] == {"rows": 32}
    assert all(entry["swap"] for key, entry in entries.items() if "by" in key)
    *alike, own = aligned
    assert torch.equal(own, moved[1])
    assert alike
    assert all(int(ids.max()) > 2 for ids in alike)  # other experts than the batch's own
    before = len(aligned)
    experts(*moved)
    assert len(aligned) == before + 1  # nothing is tuned again

    counts = torch.tensor([1, 0, 5, 2], dtype=torch.int32, device=DEVICE)
    x = torch.randn(4, 6, hidden, device=DEVICE)
    found = experts.run_batched(x, counts)
    expected = make_experts("reference", layer.w13, layer.w2).run_batched(x.cpu(), counts.cpu())
    torch.testing.assert_close(found[2, :5].cpu(), expected[2, :5], atol=tolerance, rtol=tolerance)
    assert sum("batches of 8" in key for key in tuner._stored["GPU"]) == 5  # type: ignore[index]


def test_the_sm_budget_is_kept_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two SMs for the GEMMs: not more than two programs, one for each."""
    told: list[tuple[str, bool]] = []
    grids: list[int] = []
    monkeypatch.setattr(triton_batched, "current_sm_budget", lambda: SMBudget(total=5, comm=3))
    monkeypatch.setattr(triton_batched, "report_sm_use", lambda user, obeys: told.append((user, obeys)))
    for name, project in (("project_up", project_up), ("project_down", project_down)):

        def watch(*args: object, project: Callable[..., object] = project, **options: object) -> object:
            grids.append(args[-1] * args[-2].per_sm)  # type: ignore[attr-defined, operator]
            return project(*args, **options)

        monkeypatch.setattr(triton_batched, name, watch)
    layer = make_layer(4, 32, 20)
    routed = make_tokens(layer, 12)
    experts = TritonExperts(layer.w13.to(DEVICE), layer.w2.to(DEVICE))
    actual = experts(routed.x.to(DEVICE), routed.ids.to(DEVICE), routed.weights.to(DEVICE)).cpu()
    torch.testing.assert_close(actual, layer.expected(routed), atol=1e-5, rtol=1e-5)
    assert told == [("triton experts", True)]
    assert grids == [2, 2]


def test_weights_are_quantized_by_blocks() -> None:
    w = torch.randn(2, 256, 128)
    w[0, :128] *= 100
    quantized, scales = quantize_weights(w)
    assert scales.shape == (2, 2, 1)
    assert scales[0, 0, 0] > 20 * scales[0, 1, 0]
    spread = scales.repeat_interleave(128, 1)
    torch.testing.assert_close(quantized.float() * spread, w, rtol=0.07, atol=float(scales[0, 1, 0]))
