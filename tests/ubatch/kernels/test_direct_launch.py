"""What reaches the driver, which is a function in C here that writes it down."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ubatch.errors import ConfigError
from ubatch.kernels import compile_c, why_not_c

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

from ubatch.kernels import quick_launch

pytestmark = pytest.mark.skipif(why_not_c() is not None, reason="kernels in C cannot be compiled here")

DRIVER = """
unsigned long long seen[16], driver_passed[16];
int driver_count, driver_error;
int driver(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
           unsigned shared, void *stream, void **params, void **extra) {
    const unsigned long long shape[] = {(unsigned long long)function, gx, gy, gz, bx, by, bz, shared,
                                        (unsigned long long)stream, !extra};
    memcpy(seen, shape, sizeof shape);
    for (int i = 0; i < driver_count; i++) driver_passed[i] = *(unsigned long long *)params[i];
    return driver_error;
}
"""
FUNCTION, STREAM = 0x1234, 0x5678


class Driver:
    """The driver's part in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._library = compile_c(DRIVER)
        address = ctypes.cast(self._library.driver, ctypes.c_void_p).value
        monkeypatch.setattr(quick_launch, "_driver_function", lambda: address)
        self.answer(0)
        self.expect(0)

    def answer(self, error: int) -> None:
        ctypes.c_int.in_dll(self._library, "driver_error").value = error
        self._numbers("seen")[:] = [0] * 16

    def expect(self, count: int) -> None:
        ctypes.c_int.in_dll(self._library, "driver_count").value = count

    def _numbers(self, name: str) -> Any:
        return (ctypes.c_ulonglong * 16).in_dll(self._library, name)

    @property
    def shape(self) -> list[int]:
        return list(self._numbers("seen"))[:10]

    @property
    def parameters(self) -> list[int]:
        return list(self._numbers("driver_passed"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def kernel_of(types: Sequence[Any], *, described: Sequence[Any] = (), ctas: int = 1, **launcher: Any) -> Any:
    """What Triton would have compiled."""
    return SimpleNamespace(
        run=SimpleNamespace(**launcher),
        src=SimpleNamespace(signature={f"argument_{number}": each for number, each in enumerate(types)}),
        packed_metadata=(4, ctas, 2048),
        function=FUNCTION,
        metadata=SimpleNamespace(tensordesc_meta=list(described)),
    )


def launch_of(*types: Any, **kernel: Any) -> quick_launch.Launch:
    return quick_launch.direct_launch(kernel_of(types, **kernel))


@pytest.mark.long
def test_the_driver_gets_the_grid_and_the_parameters(driver: Driver) -> None:
    types = ("*bf16", "constexpr", "*fp32", "i32", "i64", "u64", "fp32", "constexpr", "i1", "*i8")
    address = 2**63 + 32
    driver.expect(10)
    given = (address, 7, 64, -5, -(2**40), 2**64 - 1, 0.5, None, True, 48)
    assert launch_of(*types)(2, 3, 4, STREAM, *given) == 0
    assert driver.shape == [FUNCTION, 2, 3, 4, 128, 1, 1, 2048, STREAM, 1]
    passed = [number.to_bytes(8, "little") for number in driver.parameters[:10]]
    assert [int.from_bytes(passed[place], "little") for place in (0, 1, 7)] == [address, 64, 48]
    assert struct.unpack("<i4xqQf4x", b"".join(passed[2:6])) == (-5, -(2**40), 2**64 - 1, 0.5)
    assert passed[6][0] == 1
    assert passed[8:] == [bytes(8)] * 2, "scratch memory: none"


def test_an_empty_grid_launches_nothing(driver: Driver) -> None:
    assert launch_of("i32")(1, 0, 1, STREAM, 5) == 0
    assert not any(driver.shape)


def test_the_drivers_error_is_told(driver: Driver) -> None:
    driver.answer(700)
    assert launch_of("i32")(1, 1, 1, STREAM, 5) == 700


@pytest.mark.parametrize("given", [torch.zeros(4), None])
def test_what_is_no_address_is_for_triton(driver: Driver, given: Any) -> None:
    assert launch_of("*fp32", "i32")(1, 1, 1, STREAM, given, 5) == -1
    assert not any(driver.shape)


def test_wrong_arguments(driver: Driver) -> None:
    with pytest.raises(TypeError, match="5 arguments"):
        launch_of("i32", "i32")(1, 1, 1, STREAM, 5)
    with pytest.raises(TypeError, match="int"):
        launch_of("i32")(1, 1, 1, STREAM, None)
    with pytest.raises(TypeError, match="number"):
        launch_of("fp32")(1, 1, 1, STREAM, None)
    assert not any(driver.shape)


class Encoded:
    """Stands in for Triton's tensor map, which ends with the 128 bytes that the driver encoded, at a multiple of 64."""

    __slots__ = tuple(f"word_{number:02}" for number in range(30))

    @classmethod
    def aligned(cls, aligned: bool = True) -> Encoded:
        made: list[Encoded] = []  # all are kept, so that each is elsewhere
        while not made or ((id(made[-1]) + cls.__basicsize__) % 64 == 0) is not aligned:
            made.append(cls())
        found = made[-1]
        found.word_14 = DRIVER  # the first of the last 16 words
        return found


DESCRIBED = "tensordesc<bf16[64, 64]>"


def descriptor(base: torch.Tensor, rows: int = 8) -> Any:
    return SimpleNamespace(base=base, shape=[rows, 8], strides=[8, 1])


def test_tensor_maps_are_encoded_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, Any]] = []

    def encode(descriptor: Any, described: Any, _: None) -> list[Any]:
        made.append((descriptor, Encoded.aligned()))
        assert described == "known"
        return [made[-1][1], *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(quick_launch, "_encoder", lambda: (encode, (None,)))
    launch = launch_of("i32", DESCRIBED, "i32", described=["known"])
    memory = torch.zeros(16, 8)
    driver.expect(7)
    assert launch(1, 1, 1, STREAM, 5, descriptor(memory), 6) == 0
    assert driver.parameters[:7] == [5, id(DRIVER), 8, 8, 8, 1, 6], "the driver reads the map itself"
    launch(1, 1, 1, STREAM, 5, descriptor(memory), 6)
    assert len(made) == 1
    launch(1, 1, 1, STREAM, 5, descriptor(memory, 4), 6)
    launch(1, 1, 1, STREAM, 5, descriptor(memory[4:]), 6)
    assert len(made) == 3


@pytest.mark.parametrize("shape", [(8, 8), [1] * 6])
def test_a_descriptor_of_another_kind_is_for_triton(driver: Driver, shape: Any) -> None:
    other = SimpleNamespace(base=torch.zeros(8, 8), shape=shape, strides=[8, 1])
    assert launch_of(DESCRIBED, described=["known"])(1, 1, 1, STREAM, other) == -1


def test_an_error_of_the_encoder_reaches_the_caller(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no tensor map")

    monkeypatch.setattr(quick_launch, "_encoder", lambda: (fails, ()))
    with pytest.raises(RuntimeError, match="no tensor map"):
        launch_of(DESCRIBED, described=["known"])(1, 1, 1, STREAM, descriptor(torch.zeros(8, 8)))


def test_a_map_that_lies_elsewhere_is_for_triton(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (Encoded.aligned(False), 5):
        monkeypatch.setattr(quick_launch, "_encoder", lambda made=made: (lambda *_: [made, 8, 8, 8, 1], ()))
        launch = launch_of(DESCRIBED, described=["known"])
        assert launch(1, 1, 1, STREAM, descriptor(torch.zeros(8, 8))) == -1
    assert not any(driver.shape)


@pytest.mark.long
def test_maps_of_memory_that_is_long_gone_are_dropped(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def encode(descriptor: Any, _: Any) -> list[Any]:
        made.append(descriptor.shape[0])
        return [Encoded.aligned(), *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(quick_launch, "_encoder", lambda: (encode, ()))
    monkeypatch.setattr(quick_launch, "_MOST_MAPS", 2)
    quick_launch.launch_library.cache_clear()
    try:
        launch, base = launch_of(DESCRIBED, described=["known"]), torch.zeros(8, 8)
    finally:
        quick_launch.launch_library.cache_clear()
    for rows in (1, 2, 1, 2, 3, 1):
        assert launch(1, 1, 1, STREAM, descriptor(base, rows)) == 0
    assert made == [1, 2, 3, 1]


@pytest.mark.parametrize(
    "kernel",
    [
        kernel_of(["fp16"]),
        kernel_of(["i32"] * 127),
        kernel_of([("i32", "i32")]),
        kernel_of([DESCRIBED], described=[None]),
        kernel_of([DESCRIBED]),
        kernel_of(["i32"], ctas=2),
        kernel_of(["i32"], launch_cooperative_grid=True),
        kernel_of(["i32"], launch_pdl=True),
        kernel_of(["i32"], global_scratch_size=16),
        kernel_of(["i32"], profile_scratch_size=16),
    ],
)
def test_what_it_does_not_know_is_for_triton(driver: Driver, kernel: Any) -> None:
    assert quick_launch.direct_launch(kernel) is None


def test_without_a_compiler_triton_launches(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ConfigError("no C compiler is installed.")

    quick_launch.launch_library.cache_clear()
    monkeypatch.setattr(quick_launch, "compile_c", fails)
    try:
        assert quick_launch.direct_launch(kernel_of(["i32"])) is None
        assert quick_launch.direct_launch(kernel_of(["i32"])) is None
    finally:
        quick_launch.launch_library.cache_clear()
    (record,) = caplog.records
    assert "no C compiler" in record.getMessage()
