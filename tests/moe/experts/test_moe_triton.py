"""Triton experts in graphs, in fp8, and while others hold SMs; against the plain loop they are in conformance tests.

Without a GPU shapes are small, and tiles too. With one, the same tests run compiled; `test_moe_triton_gpu` adds the
dtypes, sizes and tiles that only a GPU has. While kernels hold SMs, programs that never start leave no tile, and no
long day to others.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from fp8_checkpoints import blockwise, dequantize, rounded
from graph_cases import graphed
from interpreted_device import Device
from lanes import alone
from moe_layers import Layer, Routed, make_layer, make_tokens
from torch import Tensor
from triton_batches import DEVICE

from moe import make_experts, quantize_blocks
from moe.experts import triton_batched
from moe.experts.triton import TritonExperts
from moe.experts.triton_batched import share_of
from moe.kernels.align import align_pairs, tile_batches
from moe.kernels.gemm_configs import gemm_configs
from moe.kernels.grouped_gemm import Rows, Weights, project_up, reference_project_down, reference_project_up
from moe.kernels.quantize import BLOCK, quantize_weights
from ubatch import ConfigError, GradientError, dbo_yield, get_schedule
from ubatch.kernels.triton_jit import INTERPRETED


def on_device(name: str, layer: Layer, first: int = 0, **options: Any) -> Any:
    return make_experts(name, layer.w13.to(DEVICE), layer.w2.to(DEVICE), first, **options)


def run(experts: Any, routed: Routed, x: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
    x, ids = routed.x if x is None else x, routed.ids if ids is None else ids
    return experts(x.to(DEVICE), ids.to(DEVICE), routed.weights.to(DEVICE)).cpu()


def batches(layer: Layer, rows: list[int], capacity: int) -> tuple[Tensor, Tensor]:
    """`[E, capacity, H]` with NaN behind the rows, and how many there are."""
    x = torch.full((layer.num_experts, capacity, layer.hidden_size), float("nan"))
    for expert, count in enumerate(rows):
        x[expert, :count] = torch.randn(count, layer.hidden_size)
    return x.to(DEVICE), torch.tensor(rows, dtype=torch.int32, device=DEVICE)


class Routing(torch.nn.Module):
    """A router, and experts in one of both layouts."""

    def __init__(self, layer: Layer, batched: bool) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(layer.hidden_size, layer.num_experts)
        self.experts = make_experts("triton_batched" if batched else "triton", layer.w13, layer.w2)
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(1).topk(2)
        dbo_yield()
        if not self.batched:
            return x + self.experts(x, ids, weights)
        counts = (ids == torch.arange(self.gate.out_features, device=x.device)[:, None, None]).sum((1, 2)).int()
        batch = x.expand(len(counts), *x.shape).contiguous()
        y = self.experts.run_batched(batch, counts.clamp(max=len(x)))
        filled = torch.arange(len(x), device=x.device) < counts[:, None]
        return x + torch.where(filled[:, :, None], y, 0.0).sum(0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("batched", [False, True], ids=["tokens", "batches"])
def test_a_graph_of_two_lanes_follows_the_routing(batched: bool) -> None:
    """Nothing is read on the host, and nothing of a captured routing stays."""
    with graphed(Routing(make_layer(4, 8, 20), batched), device=DEVICE, num_ubatches=2) as case, torch.no_grad():
        case.wrapper.capture(case.x(12))
        for scale in (1.0, 30.0, -30.0):  # few experts get almost everything
            x = scale * case.x(12)
            torch.testing.assert_close(case.wrapper(x), case.eager(x))
        assert case.wrapper.statistics().graph_replays == 3


# ----------------------------------------------------------------------------------------------------------------- fp8


def quantized(layer: Layer, first: int = 0, name: str = "triton") -> Any:
    (w13, w13_scale), (w2, w2_scale) = quantize_weights(layer.w13), quantize_weights(layer.w2)
    fp8 = {"w13_scale": w13_scale.to(DEVICE), "w2_scale": w2_scale.to(DEVICE), "dtype": torch.float32}
    return make_experts(name, w13.to(DEVICE), w2.to(DEVICE), first, **fp8)  # type: ignore[arg-type]


def expected_fp8(layer: Layer, x: Tensor, expert: int) -> Tensor:
    """One expert's rows, with every operand rounded as the kernels round it."""
    w13, w2 = (
        dequantize(*(each[0] for each in quantize_weights(w[expert : expert + 1])), blockwise(BLOCK, BLOCK))
        for w in (layer.w13, layer.w2)
    )
    return reference_project_down(rounded(reference_project_up(rounded(x), w13)), w2)


def check_fp8(found: Tensor, expected: Tensor) -> None:
    """Sums in another order may move a number to the next fp8, so as a whole."""
    assert (found - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("arrives", ["as it is", "in fp8"])
def test_fp8_weights_and_activations(arrives: str) -> None:
    layer = make_layer(3, 256, 128)
    routed = make_tokens(layer, 20, 2, unrouted=0.2)
    experts = quantized(layer)
    if arrives == "in fp8":
        x, scales = quantize_blocks(routed.x)
        actual = experts(x.to(DEVICE), routed.ids.to(DEVICE), routed.weights.to(DEVICE), scales.to(DEVICE)).cpu()
    else:
        actual = run(experts, routed)
    expected = torch.zeros(20, 256)
    for expert in range(3):
        weight = torch.where(routed.ids == expert, routed.weights, 0.0).sum(1, keepdim=True)
        expected += weight * expected_fp8(layer, routed.x, expert)
    assert actual.dtype is torch.float32
    check_fp8(actual, expected)


@pytest.mark.parametrize("arrives", ["as it is", "in fp8"])
def test_fp8_batches(arrives: str) -> None:
    layer = make_layer(3, 256, 128)
    rows = [18, 0, 3]
    x, counts = batches(layer, rows, 20)
    scales = None
    arrived = x
    if arrives == "in fp8":
        arrived, scales = quantize_blocks(x.nan_to_num())
        scales = scales.transpose(1, 2).contiguous().transpose(1, 2)  # as DeepEP's are: rows densely
    found = quantized(layer, name="triton_batched").run_batched(arrived, counts, scales).cpu()
    for expert, count in enumerate(rows):
        if count:
            check_fp8(found[expert, :count], expected_fp8(layer, x[expert, :count].cpu(), expert))


def test_quantize_is_the_same_as_fp8_weights() -> None:
    layer = make_layer(2, 128, 128)
    routed = make_tokens(layer, 5)
    ours = on_device("triton", layer, quantize="fp8")
    assert ours.w13.dtype is torch.float8_e4m3fn
    assert torch.equal(run(ours, routed), run(quantized(layer), routed))


# ------------------------------------------------------------------------------------------------------------ refusals


def test_bad_weights_are_refused() -> None:
    w13, w2 = torch.zeros(2, 256, 128), torch.zeros(2, 128, 128)
    (fp8_13, scale_13), (fp8_2, scale_2) = quantize_weights(w13), quantize_weights(w2)
    fp8 = r"torch\.float8_e4m3fn"
    refused: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((w13.double(), w2.double()), {}, r"float32 or fp8, not in torch\.float64"),
        ((fp8_13, fp8_2), {}, r"w13_scale \[2, 2, 1\] float32, not None"),
        ((fp8_13, fp8_2, 0, scale_13, scale_13), {}, r"w2_scale \[2, 1, 1\] float32, not torch\.float32 \[2, 2, 1\]"),
        ((w13, w2, 0, scale_13, scale_2), {}, rf"w13_scale is for weights in {fp8}, not torch\.float32"),
        ((fp8_13[:, :, :96], fp8_2[:, :96], 0, scale_13, scale_2), {}, "multiples of 128, not hidden 96 and"),
        ((w13, w2), {"dtype": torch.bfloat16}, r"dtype=torch\.bfloat16 is for fp8"),
        ((w13, w2), {"quantize": "int4"}, r"quantize must be 'fp8'.* not 'int4'"),
        ((w13, w2, 3), {"num_experts": 4}, "num_experts is 4, but experts 3 to 4 are here"),
    ]
    for given, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            TritonExperts(*given, **options)
    with pytest.raises(ConfigError, match=r"in blocks of 128 x 128, not torch\.float32 \[2, 128, 96\]"):
        quantize_weights(w2[:, :, :96])
    with pytest.raises(ConfigError, match="'grouped' does not compute in fp8 and takes no quantize, w2_scale"):
        make_experts("grouped", w13, w2, quantize="fp8", w2_scale=scale_2)
    make_experts("grouped", w13, w2, num_experts=8)  # a hint, for who can use it


def test_bad_input_is_refused() -> None:
    layer = make_layer(2, 32, 20)
    experts = on_device("triton", layer)
    routed = make_tokens(layer, 4)
    with pytest.raises(ConfigError, match="hidden_states are on meta, the experts on"):
        experts(routed.x.to("meta"), routed.ids, routed.weights)
    with pytest.raises(GradientError, match="no backward"):
        run(experts, routed, routed.x.requires_grad_())
    with torch.no_grad():
        run(experts, routed)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe.experts.triton_batched.INTERPRETED", False)
    layer = make_layer(2, 32, 20)
    routed = make_tokens(layer, 4)
    with pytest.raises(ConfigError, match="triton experts run on CUDA, not on cpu"):
        make_experts("triton", layer.w13, layer.w2)(routed.x, routed.ids, routed.weights)


pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")


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
