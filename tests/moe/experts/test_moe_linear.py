"""The linear layers of inference: the same numbers, whichever library computes them.

And the products that native experts are made of: threads, refusals, and which are chosen.
"""

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import Mock, call

import pytest
import torch
import torch.nn.functional as F
from c_kernels import needs_c
from torch import Tensor

from moe import (
    NativeLinear,
    PackedLinear,
    cpu_linear,
    fastest_cpu_experts,
    grouped_linear,
    linear,
    make_experts,
    packing_pays,
)
from moe.cpu_linear import kernel_rows
from moe.experts import cpu, registry
from moe.grouped_linear import GroupedLinear
from ubatch import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Either outcome of the measurement."""
    chosen: bool = request.param
    if chosen and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN, which its x86 builds have: nothing to choose")
    monkeypatch.setattr(cpu_linear, "_onednn_is_faster", lambda _: chosen)
    monkeypatch.setattr(cpu_linear, "_packed_is_faster", lambda _: chosen)
    return chosen


@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (7, 48), (130, 48), (2, 5, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_a_linear_layer(onednn: bool, shape: tuple[int, ...], bias: bool) -> None:
    x, weight, b = torch.randn(shape), torch.randn(3, 40, 48)[1], torch.randn(40) if bias else None
    for inputs in (x, torch.randn(*shape[:-1], 96)[..., 48:], torch.randn(*shape[:-1], 96)[..., ::2]):
        with torch.inference_mode():
            torch.testing.assert_close(linear(inputs, weight, b), F.linear(inputs, weight, b), atol=1e-4, rtol=1e-4)


def test_gradients_autocast_and_other_dtypes_are_torchs_own(onednn: bool) -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(6, -1))
    with torch.inference_mode():
        assert linear(x.double(), weight.double()).dtype is torch.float64
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x, weight).dtype is torch.bfloat16


ONEDNN_BF16 = cpu_linear._onednn_takes_bfloat16()
needs_onednn_bf16 = pytest.mark.skipif(not ONEDNN_BF16, reason="oneDNN has no kernels of bfloat16 for this processor")


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        ("_onednn_is_faster", [True]),
        ("_onednn_is_faster", [False]),
        ("_packed_is_faster", [torch.float32]),
        pytest.param("_packed_is_faster", [torch.bfloat16], marks=needs_onednn_bf16),
    ],
)
def test_the_faster_library_is_found_by_measuring(
    question: str, asked: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([[2.0, 1.0], [1.0, 1.0]])  # torch's own, oneDNN
    monkeypatch.setattr(cpu_linear, "best_times", lambda _: next(measured))
    measure = getattr(cpu_linear, question).__wrapped__
    available = torch.backends.mkldnn.is_available()
    assert measure(*asked) is available
    assert measure(*asked) is False


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), pytest.param(torch.bfloat16, 2e-2, marks=needs_onednn_bf16)]
)
def test_a_packed_linear_layer(
    onednn: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For oneDNN rows are padded to one of few numbers, which changes no result."""
    weight, padded = torch.randn(3, 40, 48, dtype=dtype)[1], Mock(side_effect=kernel_rows)
    monkeypatch.setattr(cpu_linear, "kernel_rows", padded)
    packed, sizes = PackedLinear(weight), (0, 1, 7, 17, 64, 65, 130, 257)
    for rows in sizes:
        x = torch.randn(rows, 48, dtype=dtype)
        torch.testing.assert_close(packed(x), F.linear(x, weight), atol=tolerance, rtol=tolerance)
    assert padded.call_args_list == [call(rows) for rows in sizes]
    assert packing_pays(dtype, CPU) is onednn
    assert not packing_pays(torch.float16, CPU)
    assert not packing_pays(dtype, torch.device("cuda"))
    with pytest.raises(ConfigError, match=rf"takes {dtype} \[\.\.\., 48\], not {dtype} \[2, 47\]"):
        packed(torch.randn(2, 47, dtype=dtype))
    with pytest.raises(ConfigError, match=r"not torch\.float64"):
        packed(torch.randn(2, 48).double())
    with pytest.raises(ConfigError, match="no gradients"):
        packed(torch.randn(2, 48, dtype=dtype, requires_grad=True))
    with pytest.raises(ConfigError, match="only float32 weights on a CPU can be packed, and bfloat16"):
        PackedLinear(weight.half())


def test_a_processor_without_onednns_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "_onednn_takes_bfloat16", lambda: False)
    assert not packing_pays(torch.bfloat16, CPU)
    with pytest.raises(ConfigError, match="bfloat16 ones where oneDNN has kernels"):
        PackedLinear(torch.randn(8, 8, dtype=torch.bfloat16))
    assert fastest_cpu_experts(torch.bfloat16, CPU) in ("native", "grouped")


def test_packed_experts_stay_what_they_are() -> None:
    experts = make_experts("packed", torch.randn(4, 12, 8), torch.randn(4, 8, 6))
    assert not list(experts.parameters())
    assert experts.eval().to("cpu").float() is experts
    with pytest.raises(ConfigError, match=r"cannot become torch.bfloat16 on cpu"):
        experts.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(experts)


@pytest.mark.parametrize("cached_bytes", [0, 1 << 20])
@torch.inference_mode()
def test_packed_experts_expert_by_expert_and_all_at_once(cached_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert by expert with many rows; one has none, one needs padding, one has the last rows."""
    monkeypatch.setattr(cpu, "_CACHED_BYTES", cached_bytes)
    w13, w2 = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    ids = torch.tensor([[0, 3]] * 21 + [[0, 2]] * 2)
    x, weights = torch.randn(23, 8), torch.rand(23, 2)
    expected = make_experts("reference", w13, w2)(x, ids, weights)
    torch.testing.assert_close(make_experts("packed", w13, w2)(x, ids, weights), expected, atol=1e-4, rtol=1e-4)


def test_few_numbers_of_rows_reach_onednn() -> None:
    """It keeps a kernel for each of them."""
    given = [kernel_rows(rows) for rows in range(2049)]
    assert all(rows <= padded <= max(rows + 3, rows * 1.3) for rows, padded in enumerate(given))
    assert given[:17] == list(range(17))
    assert len(set(given)) < 100


@needs_c
def test_a_new_thread_has_as_many_compute_threads_as_torch() -> None:
    """One that has computed nothing yet would get OpenMP's default."""
    linear, asked = GroupedLinear(torch.randn(1, 32, 8)), []
    real = linear._kernel
    linear._kernel = replace(real, run=lambda *args: asked.append(args[-1]) or real.run(*args))  # type: ignore[func-returns-value]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x, rows = torch.randn(2, 8), torch.tensor([0, 2])
        thread = threading.Thread(target=linear, args=(x, rows))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert asked == [3]


@needs_c
def test_what_a_layer_refuses() -> None:
    weight = torch.randn(40, 24)
    layer = NativeLinear(weight)
    for x in (torch.randn(2, 23), torch.randn(2, 24).double(), torch.randn(2, 24).bfloat16()):
        with pytest.raises(ConfigError, match=r"takes torch.float32 \[..., 24\]"):
            layer(x)
    with pytest.raises(ConfigError, match="no gradients"):
        layer(torch.randn(2, 24, requires_grad=True))
    with pytest.raises(ConfigError, match="weights must be float32 or bfloat16"):
        NativeLinear(weight.half())


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_experts_stay_what_they_are(dtype: torch.dtype) -> None:
    experts = make_experts("native", torch.randn(2, 32, 24, dtype=dtype), torch.randn(2, 24, 16, dtype=dtype))
    assert not list(experts.state_dict())
    assert experts.to(dtype) is experts
    with pytest.raises(ConfigError, match=rf"are {dtype} on the CPU for good and cannot become torch\.float16"):
        experts.half()
    x, ids, weights = torch.randn(3, 24, requires_grad=True), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    x = x.to(dtype)
    with pytest.raises(ConfigError, match="no gradients"):
        experts(x, ids, weights)


@needs_c
def test_inputs_on_another_device_are_refused() -> None:
    """In C their addresses would be read."""
    w13, w2 = torch.randn(2, 32, 24).bfloat16(), torch.randn(2, 24, 16).bfloat16()
    experts = make_experts("native", w13, w2)
    given = torch.randn(3, 24).bfloat16(), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    for place in range(3):
        moved = [x.to("meta") if place == index else x for index, x in enumerate(given)]
        with pytest.raises(ConfigError, match="on the CPU, but their input is on meta"):
            experts(*moved)


@needs_c
def test_the_weights_of_choices_get_their_gradient_or_a_refusal() -> None:
    ids = torch.tensor([[0], [1], [0]])
    for dtype in (torch.float32, torch.bfloat16):
        experts = make_experts("native", torch.randn(2, 32, 24, dtype=dtype), torch.randn(2, 24, 16, dtype=dtype))
        x, weights = torch.randn(3, 24, dtype=dtype), torch.ones(3, 1, requires_grad=True)
        if dtype is torch.float32:
            experts(x, ids, weights).sum().backward()
            assert weights.grad is not None
            continue
        with pytest.raises(ConfigError, match="no gradients"):
            experts(x, ids, weights)
        with pytest.raises(ConfigError, match="no gradients"):
            list(experts.run_blocks(x, ids, weights, [range(1), range(1, 2)]))


def test_who_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastest_cpu_experts(torch.float16, CPU) == "grouped"
    assert fastest_cpu_experts(torch.float32, torch.device("cuda")) == "grouped"
    monkeypatch.setattr(registry, "packing_pays", lambda *_: True)
    monkeypatch.setattr(registry, "_native_is_faster", lambda than, dtype: than == "packed")
    monkeypatch.setattr(registry, "why_not_c", lambda: None)
    assert fastest_cpu_experts(torch.float32, CPU) == "native"
    assert fastest_cpu_experts(torch.bfloat16, CPU) == "native"
    monkeypatch.setattr(registry, "packing_pays", lambda *_: False)
    assert fastest_cpu_experts(torch.float32, CPU) == "grouped"
    monkeypatch.setattr(registry, "_native_is_faster", lambda than, dtype: True)
    monkeypatch.setattr(registry, "why_not_c", lambda: "no compiler")
    assert fastest_cpu_experts(torch.float32, CPU) == "grouped"


def test_a_kernel_that_cannot_be_compiled_is_not_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dtype: torch.dtype) -> None:
        raise ConfigError("the C compiler failed")

    monkeypatch.setattr(grouped_linear, "_kernel", refuse)
    monkeypatch.setattr(registry, "_native_is_faster", cache(registry._native_is_faster.__wrapped__))
    monkeypatch.setattr(registry, "why_not_c", lambda: None)
    assert fastest_cpu_experts(torch.float32, CPU) in ("packed", "grouped")


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_measured_by_running_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(side_effect=registry.best_times)
    monkeypatch.setattr(registry, "best_times", measure)
    monkeypatch.setattr(registry, "_native_is_faster", cache(registry._native_is_faster.__wrapped__))
    assert fastest_cpu_experts(dtype, CPU) in ("native", "packed", "grouped")
    assert measure.call_count == len(registry._TOKENS)


def test_without_c_native_experts_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_linear, "why_not_c", lambda: "no C compiler is installed.")
    monkeypatch.setattr(grouped_linear, "_kernel", cache(grouped_linear._kernel.__wrapped__))
    with pytest.raises(ConfigError, match="no C compiler is installed"):
        make_experts("native", torch.randn(2, 32, 24), torch.randn(2, 24, 16))


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_is_not_kept_lives_as_long_as_the_call(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large calls: a freed block of that size is unmapped, and the kernel would write nowhere."""
    taken: list[weakref.ref[Tensor]] = []
    scratch = grouped_linear._scratch

    def noted(num_bytes: int) -> Tensor:
        memory = scratch(num_bytes)
        taken.append(weakref.ref(memory))
        return memory

    def alive(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            assert all(memory() is not None for memory in taken)
            function(*arguments)

        return call

    monkeypatch.setattr(grouped_linear, "_KEPT_BYTES", 0)
    monkeypatch.setattr(grouped_linear, "_scratch", noted)
    up = GroupedLinear(torch.randn(4, 32, 16, dtype=dtype), gated=True)
    down = GroupedLinear(torch.randn(4, 16, 16, dtype=dtype))
    kernel = replace(up._kernel, run=alive(up._kernel.run), run_layer=alive(up._kernel.run_layer))
    up._kernel = down._kernel = kernel
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    grouped_linear.run_layer(up, down, torch.randn(3, 16, dtype=dtype), ids, weights, 0)
    assert taken
    taken.clear()
    down.all_rows(torch.randn(3, 16, dtype=dtype))
