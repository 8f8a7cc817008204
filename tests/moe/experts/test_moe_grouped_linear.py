"""The products that native experts are made of, against one product per expert."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import cast
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from c_kernels import needs_c
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe import NativeLinear, fastest_cpu_experts, grouped_linear, make_experts
from moe.experts import fastest
from moe.experts.grouped import GroupedExperts
from moe.grouped_linear import GroupedLinear
from moe.segments import segment_offsets
from ubatch import ConfigError

CPU = torch.device("cpu")


def reference(x: Tensor, weight: Tensor, rows: list[int], gated: bool) -> Tensor:
    outs = []
    for part, own in zip(x.split(rows), weight, strict=True):
        out = part.double() @ own.double().T
        if gated:
            gate, up = out.chunk(2, dim=-1)
            out = F.silu(gate) * up
        outs.append(out.float())
    return torch.cat(outs)


@pytest.mark.long
@needs_c
@given(
    rows=st.lists(st.one_of(st.integers(0, 30), st.integers(470, 500)), min_size=1, max_size=4),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    gated=st.booleans(),
    scattered=st.booleans(),
    lanes=st.sampled_from([8, 16]),
)
def test_against_one_product_per_expert(
    rows: list[int], inputs: int, outputs: int, gated: bool, scattered: bool, lanes: int
) -> None:
    total = sum(rows)
    weight = torch.randn(len(rows), outputs * (2 if gated else 1), inputs)
    kernel = grouped_linear._kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_linear, "_kernel", lambda dtype: kernel(dtype, LANES=lanes))
        linear = GroupedLinear(weight, gated=gated)
    given_rows = torch.randn(total + 3, inputs + 5)[:, :inputs] * inputs**-0.5
    source = torch.randint(0, total + 3, (total,))
    first_row = segment_offsets(torch.tensor(rows))
    taken = given_rows[source] if scattered else given_rows[:total]
    out = linear(given_rows if scattered else taken, first_row, source if scattered else None)
    assert out.shape == (total, outputs)
    torch.testing.assert_close(out, reference(taken, weight, rows, gated), atol=2e-5, rtol=2e-5)


@needs_c
def test_a_row_does_not_depend_on_its_company() -> None:
    """Bit by bit: alone, among others, and by one thread or two."""
    weight, x = torch.randn(3, 64, 100), torch.randn(40, 100)
    linear = GroupedLinear(weight, gated=True)
    whole = linear(x, torch.tensor([0, 13, 13, 40]))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(linear(x, torch.tensor([0, 13, 13, 40])), whole)
            for row in (0, 12, 13, 39):
                alone = linear(x[row : row + 1], torch.tensor([0, 1]), first_expert=0 if row < 13 else 2)
                assert torch.equal(alone[0], whole[row])
    finally:
        torch.set_num_threads(before)


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
def test_the_gate_of_large_and_strange_numbers() -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, 1.0, -1.0, 20.0, -20.0, 87.5, -87.5, 1e4, -1e4, 1e30, -1e30])
    weight = torch.eye(13).repeat(2, 1)[None]
    gates = torch.diag(values)
    out = GroupedLinear(weight, gated=True)(gates, torch.tensor([0, 13])).diagonal()
    expected = F.silu(values.double()) * values.double()
    finite = expected.abs() < 1e38
    torch.testing.assert_close(out[finite], expected[finite].float(), atol=1e-30, rtol=1e-6)
    assert out[~finite].isinf().all()
    nan = GroupedLinear(weight, gated=True)(torch.full((1, 13), torch.nan), torch.tensor([0, 1]))
    assert nan.isnan().all()


@needs_c
def test_a_layer() -> None:
    weight = torch.randn(40, 24)
    layer = NativeLinear(weight)
    for shape in ((0, 24), (24,), (1, 24), (2, 9, 24), (70, 24)):
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), F.linear(x, weight), atol=2e-5, rtol=2e-5)
    across = torch.randn(24, 5).T
    torch.testing.assert_close(layer(across), F.linear(across, weight), atol=2e-5, rtol=2e-5)
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
@pytest.mark.parametrize("tokens", [0, 1, 50, 300])
@torch.inference_mode()
def test_a_layer_of_experts_in_one_call(tokens: int) -> None:
    """As the plain loop and, bit by bit, as products and sums one after the other, alone and in blocks."""
    w13, w2, x = torch.randn(4, 80, 70) / 7, torch.randn(4, 70, 40) / 7, torch.randn(tokens, 140)[:, :70]
    ids, weights = torch.rand(tokens, 9).topk(3).indices, torch.rand(tokens, 3)
    ids[ids == 8] = -1
    experts = make_experts("native", w13.clone(), w2.clone(), 2)
    out = experts(x, ids, weights)
    expected = make_experts("reference", w13, w2, 2)(x, ids, weights)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(GroupedExperts.forward(cast(GroupedExperts, experts), x, ids, weights), out)
    for row in range(0, tokens, 49):
        assert torch.equal(experts(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])[0], out[row])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(experts(x.contiguous(), ids.int(), weights), out)
    finally:
        torch.set_num_threads(threads)


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
    monkeypatch.setattr(fastest, "packing_pays", lambda *_: True)
    monkeypatch.setattr(fastest, "_native_is_faster", lambda than, dtype: than == "packed")
    monkeypatch.setattr(fastest, "why_not_c", lambda: None)
    assert fastest_cpu_experts(torch.float32, CPU) == "native"
    assert fastest_cpu_experts(torch.bfloat16, CPU) == "native"
    monkeypatch.setattr(fastest, "packing_pays", lambda *_: False)
    assert fastest_cpu_experts(torch.float32, CPU) == "grouped"
    monkeypatch.setattr(fastest, "_native_is_faster", lambda than, dtype: True)
    monkeypatch.setattr(fastest, "why_not_c", lambda: "no compiler")
    assert fastest_cpu_experts(torch.float32, CPU) == "grouped"


def test_a_kernel_that_cannot_be_compiled_is_not_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dtype: torch.dtype) -> None:
        raise ConfigError("the C compiler failed")

    monkeypatch.setattr(grouped_linear, "_kernel", refuse)
    monkeypatch.setattr(fastest, "_native_is_faster", cache(fastest._native_is_faster.__wrapped__))
    monkeypatch.setattr(fastest, "why_not_c", lambda: None)
    assert fastest_cpu_experts(torch.float32, CPU) in ("packed", "grouped")


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_measured_by_running_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Mock(side_effect=fastest.best_times)
    monkeypatch.setattr(fastest, "best_times", measure)
    monkeypatch.setattr(fastest, "_native_is_faster", cache(fastest._native_is_faster.__wrapped__))
    assert fastest_cpu_experts(dtype, CPU) in ("native", "packed", "grouped")
    assert measure.call_count == len(fastest._TOKENS)


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
