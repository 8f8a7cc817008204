"""A launch is found by what Triton compiles by; everything else is an argument."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from ubatch.kernels import quick_launch, why_not_c  # noqa: E402
from ubatch.kernels.quick_launch import QuickFunction  # noqa: E402

pytestmark = pytest.mark.skipif(why_not_c() is not None, reason="kernels in C cannot be compiled here")


def kernel(
    x: tl.tensor, scales: tl.tensor, size: tl.tensor, most: tl.tensor, factor: tl.tensor, N: tl.constexpr
) -> None:
    pass


class Recorder:
    """Stands in for Triton: compiles nothing, and notes what is compiled and what is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.device = 0
        active = SimpleNamespace(get_current_device=lambda: self.device, get_current_stream=lambda _: "stream")
        monkeypatch.setattr(quick_launch, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(JITFunction, "run", self._compile)
        self.direct: Callable[..., int] | None = None
        monkeypatch.setattr(quick_launch, "direct_launch", lambda _: self.direct)
        self.function = QuickFunction(kernel, ["most"])

    def _compile(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.compiled.append(args)
        launch = lambda *values: self.launched.append(values)  # noqa: E731
        return SimpleNamespace(run=launch, function="function", packed_metadata="metadata")

    def launch(self, *args: Any, grid: Any = (2, 3), **kwargs: Any) -> bool:
        """Launch; returns whether that was Triton's."""
        before = len(self.compiled)
        self.function[grid](*args, **kwargs)
        return len(self.compiled) > before


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


MEMORY = torch.zeros(64)
assert MEMORY.data_ptr() % 16 == 0
GIVEN = (MEMORY, None, 32, 5, 0.5, 4)


def test_the_second_launch_passes_all_arguments_in_order(recorder: Recorder) -> None:
    x, other = MEMORY[:8], MEMORY[8:]
    assert recorder.launch(x, None, 32, 5, 0.5, N=4, num_warps=8)
    assert not recorder.launch(other, None, 48, 6, factor=0.25, N=4, num_warps=8)
    assert not recorder.launch(torch.nn.Parameter(x), None, 48, 2**20 + 1, 0.5, N=4, num_warps=8)
    fixed = (2, 3, 1, "stream", "function", "metadata", None, None, None)
    assert recorder.launched[0] == (*fixed, other, None, 48, 6, 0.25, 4)


@pytest.mark.parametrize("status", [0, 700])
def test_launches_are_direct_unless_they_fail(recorder: Recorder, status: int) -> None:
    """Then Triton's launch says what is wrong."""
    passed: list[tuple[Any, ...]] = []
    recorder.direct = lambda *values: passed.append(values) or status  # type: ignore[func-returns-value]
    assert recorder.launch(*GIVEN)
    assert not passed
    assert not recorder.launch(*GIVEN)
    assert passed == [(2, 3, 1, "stream", *GIVEN)]
    assert len(recorder.launched) == (status != 0)


class OnGPU(torch.Tensor):
    """As if it were there."""

    is_cuda = True


def test_of_a_tensor_on_a_gpu_the_address_is_launched(recorder: Recorder) -> None:
    """Triton would ask the driver about each. Others it asks about: it refuses what a kernel cannot read."""
    here, there = MEMORY[:16], MEMORY[16:].as_subclass(OnGPU)
    assert recorder.launch(there, here, 32, 5, 0.5, 4)
    assert not recorder.launch(there, here, 32, 5, 0.5, 4)
    address, scales, *_ = recorder.launched[-1][-6:]
    assert address == there.data_ptr()
    assert scales is here


CHANGES: dict[str, dict[str, Any]] = {
    "an address that is no multiple of 16": {"x": MEMORY[1:]},
    "another dtype": {"x": MEMORY.bfloat16()},
    "a tensor instead of none": {"scales": MEMORY},
    "one": {"size": 1},
    "no multiple of 16": {"size": 33},
    "64 bits": {"size": 2**31},
    "64 bits, unsigned": {"size": 2**63},
    "64 bits, unspecialized": {"most": 2**31},
    "a constant": {"N": 8},
    "an option": {"num_warps": 4},
    "a descriptor": {"x": TensorDescriptor(MEMORY.view(8, 8), [8, 8], [8, 1], [4, 4])},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_what_triton_compiles_by_is_compiled_anew(recorder: Recorder, changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {"x": MEMORY, "scales": None, "size": 32, "most": 5, "factor": 0.5, "N": 4, "num_warps": 8}
    assert recorder.launch(**given)
    assert recorder.launch(**{**given, **changed})
    assert not recorder.launch(**given)
    assert not recorder.launch(**{**given, **changed})


def test_descriptors_count_by_their_block(recorder: Recorder) -> None:
    def described(rows: int, block: int) -> TensorDescriptor:
        return TensorDescriptor(MEMORY[: 8 * rows].view(rows, 8), [rows, 8], [8, 1], [block, 8])

    rest = (None, 32, 5, 0.5, 4)
    assert recorder.launch(described(8, 4), *rest)
    assert not recorder.launch(described(4, 4), *rest)
    assert recorder.launch(described(8, 2), *rest)


def test_an_unspecialized_argument_may_lie_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    recorder.function = QuickFunction(kernel, ["x", "most"])
    assert recorder.launch(MEMORY, None, 32, 1, 0.5, 4)
    assert not recorder.launch(MEMORY[1:], None, 32, 16, 0.5, 4)


def test_devices_are_apart(recorder: Recorder) -> None:
    assert recorder.launch(*GIVEN)
    recorder.device = 1
    assert recorder.launch(*GIVEN)


def test_a_profiler_sees_every_launch(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.launch(*GIVEN)
    for switches, name, value, seen in (
        (knobs.runtime, "launch_enter_hook", print, True),
        (knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]), True),
        (knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[]), False),
        (knobs.runtime, "launch_exit_hook", print, True),
        (knobs.runtime, "launch_exit_hook", None, False),
        (knobs.compilation, "instrumentation_mode", "consan", True),
        (knobs.compilation, "instrumentation_mode", "", False),
    ):
        monkeypatch.setattr(switches, name, value)
        assert recorder.launch(*GIVEN) == seen, (name, value)
    recorder.function.add_pre_run_hook(print)
    assert recorder.launch(*GIVEN)


def test_what_is_compiled_for_a_debugger_is_not_kept(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert recorder.launch(*GIVEN)
    monkeypatch.setattr(knobs.runtime, "debug", False)
    assert recorder.launch(*GIVEN)
    assert not recorder.launch(*GIVEN)


UNKNOWN: dict[str, dict[str, Any]] = {
    "a dictionary": {"x": {}},
    "another name": {"other": 5},
    "an option": {"num_ctas": 2},
    "too few": {"N": None},
    "a list": {"grid": [2, 3]},
    "a function": {"grid": lambda _: (2, 3)},
    "four sides": {"grid": (2, 3, 1, 1)},
    "65 bits": {"size": 2**64},
    "-64 bits": {"size": -(2**63) - 1},
}


@pytest.mark.parametrize("given", UNKNOWN.values(), ids=UNKNOWN)
def test_what_it_does_not_know_is_for_triton(recorder: Recorder, given: dict[str, Any]) -> None:
    """Which refuses it, or launches it as always."""
    known = {"x": MEMORY, "scales": None, "size": 32, "most": 5, "factor": 0.5, "N": 4}
    arguments = {name: value for name, value in {**known, **given}.items() if value is not None or name == "scales"}
    assert recorder.launch(**arguments)
    assert recorder.launch(**arguments)


def test_an_argument_that_is_given_twice_is_for_triton(recorder: Recorder) -> None:
    for _ in range(2):
        assert recorder.launch(MEMORY, None, 32, 5, 0.5, 4, x=MEMORY)


def test_keywords_may_come_in_any_order(recorder: Recorder) -> None:
    given = {"x": MEMORY, "scales": None, "size": 32, "most": 5, "factor": 0.5, "N": 4, "num_warps": 8}
    assert recorder.launch(**given)
    assert not recorder.launch(**dict(reversed(given.items())))
    assert not recorder.launch(MEMORY, None, **dict(list(given.items())[2:]))
    assert [each[-6:] for each in recorder.launched] == [(MEMORY, None, 32, 5, 0.5, 4)] * 2


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_default(x: tl.tensor, size: tl.tensor = 32, N: tl.constexpr = 4) -> None:
        pass

    recorder = Recorder(monkeypatch)
    recorder.function = QuickFunction(with_default, [])
    assert recorder.launch(MEMORY)
    assert not recorder.launch(MEMORY, 32, N=4)
    assert recorder.launch(MEMORY, N=8)
    assert recorder.launched[0][-3:] == (MEMORY, 32, 4)


def test_launches_keep_neither_arguments_nor_addresses(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    address = 2**40 + 64
    monkeypatch.setattr(OnGPU, "data_ptr", lambda _: address)
    here, there = torch.zeros(64), MEMORY.as_subclass(OnGPU)
    before = [sys.getrefcount(each) for each in (here, there, address)]
    for _ in range(10):
        recorder.launch(there, here, 32, 5, 0.5, N=4, num_warps=8)
    recorder.launched.clear()
    recorder.compiled.clear()
    assert [sys.getrefcount(each) for each in (here, there, address)] == before


VALUES: list[Any] = [
    *(None, True, False, 0.5, -1, 0, 1, 2, 15, 16, 17, -16, -15, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1),
    *(-(2**31), -(2**31) - 1, 2**63 - 1, 2**63 - 16, 2**63, 2**63 + 1, 2**64 - 1, -(2**63)),
    *(MEMORY, MEMORY[1:], MEMORY[4:], MEMORY.bfloat16(), MEMORY.bfloat16()[1:], MEMORY.byte()),
    *(TensorDescriptor(MEMORY.view(8, 8), [8, 8], [8, 1], [rows, 4]) for rows in (4, 8)),
    TensorDescriptor(MEMORY.view(8, 8), [8, 8], [8, 1], [4, 4], "nan"),
    TensorDescriptor(MEMORY.bfloat16().view(8, 8), [8, 8], [8, 1], [4, 4]),
]


def test_launches_that_share_a_kernel_are_compiled_alike_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's own rules, for an argument that is specialized and for one that is not."""

    def one(x: tl.tensor, most: tl.tensor) -> None:
        pass

    recorder = Recorder(monkeypatch)
    for number, unspecialized in enumerate(([], ["x"])):
        recorder.function = QuickFunction(one, unspecialized)
        binder = create_function_from_signature(
            recorder.function.signature, recorder.function.params, make_backend(GPUTarget("cuda", 90, 32))
        )
        found = [(recorder.function[1,](value, 5), binder(value, 5)[1]) for value in VALUES]
        for kernel_of, compiled_by in found:
            assert all(other == compiled_by for same, other in found if same is kernel_of), number
        assert len({id(each) for each, _ in found}) < len(VALUES)


@pytest.mark.parametrize("fails", ["device", "stream", "launch"])
def test_errors_reach_the_caller(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no device")

    recorder.direct = failing if fails == "launch" else None
    recorder.launch(*GIVEN)
    if fails != "launch":
        monkeypatch.setattr(quick_launch.driver.active, f"get_current_{fails}", failing)
    with pytest.raises(RuntimeError, match="no device"):
        recorder.launch(*GIVEN)


def test_without_a_compiler_launches_are_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_launch, "launch_library", lambda *_: None)
    recorder = Recorder(monkeypatch)
    for _ in range(2):
        assert recorder.launch(MEMORY, None, 32, 5, 0.5, 4)
