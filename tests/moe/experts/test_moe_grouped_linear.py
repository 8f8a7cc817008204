"""The products that native experts are made of: threads, refusals, and which are chosen."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from c_kernels import needs_c
from torch import Tensor

from moe import NativeLinear, fastest_cpu_experts, grouped_linear, make_experts
from moe.experts import registry
from moe.grouped_linear import GroupedLinear
from ubatch import ConfigError

CPU = torch.device("cpu")


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
    with pytest.raises(ConfigError, match=r"takes torch.float32 \[..., 24\]"):
        layer(torch.randn(2, 23))
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(ConfigError, match=r"takes torch.float32 \[..., 24\]"):
            layer(torch.randn(2, 24, dtype=dtype))
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
