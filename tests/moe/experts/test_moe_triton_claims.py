"""The grouped GEMM while kernels hold SMs: programs that never start leave no tile, and no long day to others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from lanes import alone
from moe_layers import make_layer, make_tokens
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

from interpreted_device import Device

from moe import make_experts
from moe.experts import triton_batched
from moe.experts.triton_batched import share_of
from moe.kernels.align import align_pairs, tile_batches
from moe.kernels.gemm_configs import gemm_configs
from moe.kernels.grouped_gemm import Rows, Weights, project_up
from ubatch import get_schedule
from ubatch.kernels.triton_jit import INTERPRETED

if not INTERPRETED:
    pytest.skip("only the interpreter can hold programs back", allow_module_level=True)

KERNEL = "_grouped_gemm_kernel"
PROGRAMS = 7
SINGLE = get_schedule("single_batch")
ABSENT: dict[str, Callable[[int], Collection[int]]] = {
    "none": lambda programs: (),
    "the first three": lambda programs: range(min(3, programs - 1)),
    "the last six": lambda programs: range(1, programs),
    "every other": lambda programs: range(0, programs - 1, 2),
}


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_batched, "_INTERPRETED_SMS", PROGRAMS)


def tiles_of(device: Device, tiles: list[int]) -> list[list[int]]:
    """Per launch, how many tiles each program that started computed."""
    assert len(device.launches) == len(tiles)
    return [
        [sum(claim < count for claim in claims) for claims in launch.atomics.values()]
        for launch, count in zip(device.launches, tiles, strict=True)
    ]


@pytest.mark.sample(6)
@pytest.mark.parametrize("absent", ABSENT.values(), ids=ABSENT)
def test_programs_that_never_start_leave_no_tile(absent: Callable[[int], Collection[int]]) -> None:
    """Both projections, in a lane that overlaps."""
    layer = make_layer(5, 72, 80)
    routed = make_tokens(layer, 60, 2, unrouted=0.1)
    experts = make_experts("triton", layer.w13, layer.w2)
    with Device(KERNEL, absent) as device:
        output, _ = alone(None, SINGLE, lambda: experts(routed.x, routed.ids, routed.weights))
    torch.testing.assert_close(output, layer.expected(routed), atol=1e-4, rtol=1e-4)

    rows = int(align_pairs(routed.ids, 0, 5, 16).tiles.counters[0])
    for counts, tiles in zip(tiles_of(device, [rows * 3, rows * 3]), (rows * 3, rows * 3), strict=True):  # 32 columns
        assert sum(counts) == tiles
        assert max(counts) <= tiles / len(counts) + 1


def test_batches_too() -> None:
    layer = make_layer(3, 40, 40)
    experts: Any = make_experts("triton_batched", layer.w13, layer.w2)
    x, rows = torch.randn(3, 40, 40), torch.tensor([33, 0, 5], dtype=torch.int32)
    with Device(KERNEL, ABSENT["the first three"]) as device:
        found, _ = alone(None, SINGLE, lambda: experts.run_batched(x, rows))
    expected = experts.run_batched(x, rows)
    assert torch.equal(found[0, :33], expected[0, :33])
    assert torch.equal(found[2, :5], expected[2, :5])
    assert [sum(counts) for counts in tiles_of(device, [8, 8])] == [8, 8]  # 3 + 1 tiles of rows by 2 of columns


def test_without_overlap_tiles_are_dealt() -> None:
    """Nothing holds an SM then, and the loop over them may be flat."""
    layer = make_layer(3, 40, 40)
    routed = make_tokens(layer, 20)
    experts = make_experts("triton", layer.w13, layer.w2)
    with Device(KERNEL, ABSENT["none"]) as device:
        found = experts(routed.x, routed.ids, routed.weights)
    torch.testing.assert_close(found, layer.expected(routed), atol=1e-4, rtol=1e-4)
    assert not any(claims for launch in device.launches for claims in launch.atomics.values())


@pytest.mark.parametrize("empty", [False, True], ids=["tiles", "no tiles"])
def test_the_counter_is_ready_for_the_next_launch(empty: bool) -> None:
    """The autotuner, too, launches several configs on the same tiles."""
    layer = make_layer(2, 40, 40)
    x, counts = torch.randn(40, 40), torch.tensor([0, 0] if empty else [20, 3], dtype=torch.int32)
    tiles = tile_batches(counts, 20, 16)
    (config,) = gemm_configs(16, torch.float32, gated=True, claimed=True)
    for programs in (1, 5, 99):
        with Device(KERNEL, ABSENT["none"]) as device:
            found = project_up(Rows(x), Weights(layer.w13), tiles, 1, config, programs).x
        assert tiles.counters.tolist() == [0 if empty else 3, 0, 0]
        (launch,) = device.launches
        assert sum(len(claims) for claims in launch.atomics.values()) == launch.count + (0 if empty else 6)
        alone = project_up(Rows(x), Weights(layer.w13), tiles, 1, gemm_configs(16, torch.float32, gated=True)[0], 2).x
        assert torch.equal(found, alone)


def test_copies_and_moves_keep_no_descriptors_of_weights() -> None:
    layer, routed = make_layer(2, 40, 40), make_tokens(make_layer(2, 40, 40), 5)
    experts: Any = make_experts("triton", layer.w13, layer.w2)

    def run() -> None:
        experts(routed.x, routed.ids, routed.weights)
        assert set(experts._held) == {"w13", "w2"}
        assert experts._choices

    run()
    for copied in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert not copied._held
        assert not copied._choices
        assert torch.equal(copied(routed.x, routed.ids, routed.weights), experts(routed.x, routed.ids, routed.weights))
    experts.to("cpu")
    assert not experts._held
    assert not experts._choices
    run()


def test_what_is_tuned_is_named() -> None:
    """A choice for tiles that are claimed is not one for tiles that are dealt."""
    layer = make_layer(2, 40, 40)
    experts: Any = make_experts("triton", layer.w13, layer.w2)
    keys: list[str] = [experts._key("up", "16 tokens", share_of(experts.w13.device))]

    def note() -> Tensor:
        keys.append(experts._key("up", "16 tokens", share_of(experts.w13.device)))
        return torch.zeros(1)

    for schedule in (SINGLE, get_schedule("serial")):
        alone(None, schedule, note)
    assert keys[0] == keys[2] != keys[1] == f"{keys[0]}, tiles claimed"
