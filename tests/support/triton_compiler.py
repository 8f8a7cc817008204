"""Compiles Triton kernels for a GPU that need not be there, as their launchers would launch them.

    launches = Launches(frozenset({"experts"}), lambda place: True)
    launches.begin(90)                       from here on a launch compiles, and does not run
    with launches.named(Label("experts", "Qwen3-30B-A3B", "up", "64/128/3/4")):
        project_up(...)
    launches.rows                            what each kernel takes of an SM, by the launch's name

Not in the interpreter, and never undone, so in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from ubatch.kernels.quick_launch import QuickFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TILED = {"_attention_kernel", "_latent_split_kernel", "_scan_kernel", "_grouped_gemm_kernel", "_fp8_linear_kernel"}
"""Kernels whose tiles the autotuner chooses. The others are launched beside them, the same with every tile."""
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tma": r"cp\.async\.bulk\.tensor",
    "cp_async": r"cp\.async\.c[ag]",
}


@dataclass(frozen=True)
class Label:
    """What a launch is for.

    Attributes:
        part: of the table.
        model: whose sizes it has.
        case: what distinguishes it from the model's other launches, but for the tile.
        tile: the tile and how it is pipelined.
        default: whether this tile is used where nothing was measured.
        per_sm: programs that are to share an SM.
    """

    part: str
    model: str
    case: str = ""
    tile: str = ""
    default: bool = True
    per_sm: int = 1


@dataclass(frozen=True)
class Figures:
    """What a compiled kernel takes, and how often its PTX has each instruction that makes it fast.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread in local memory.
        shared: bytes of a program.
        wgmma, mma: products on Hopper's tensor cores, and in the older way.
        tma, cp_async: copies to shared memory by the tensor memory accelerator, and by threads.
        in_flight: groups of such copies that are on the way while the kernel waits for one.
    """

    registers: int
    spilled: int
    shared: int
    wgmma: int
    mma: int
    tma: int
    cp_async: int
    in_flight: int

    @classmethod
    def of(cls, compiled: Any) -> Figures:
        ptx = compiled.asm["ptx"]
        counts = {name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()}
        in_flight = max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0)
        return cls(*_resources(compiled.asm["cubin"]), compiled.metadata.shared, **counts, in_flight=in_flight)


@dataclass(frozen=True)
class Row:
    """A kernel of the table: how it is launched, and its figures if it was compiled."""

    default: bool
    per_sm: int
    threads: int
    figures: Figures | None = None


class Nobody:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@dataclass
class Launches:
    """Collects launches. Those that would compile to the same are one.

    Args:
        parts: of the table; launches of others are left out.
        wanted: whether the n-th one is compiled; the others are only listed, which takes no time.
    """

    parts: frozenset[str]
    wanted: Callable[[int], bool]
    rows: dict[str, Row] = field(default_factory=dict)
    _seen: set[object] = field(default_factory=set)
    _label: Label | None = None

    def begin(self, capability: int) -> None:
        """From here on launches are collected, and none runs; for the rest of the process.

        No number matters, so nothing is drawn at random: that would take most of the time.
        """
        triton.runtime.driver.set_active(Nobody(capability))
        torch.randn = lambda *size, generator=None, **options: torch.zeros(*size, **options)
        QuickFunction.__getitem__ = lambda kernel, grid: lambda *args, **kwargs: self._add(kernel, grid, args, kwargs)

    @contextmanager
    def named(self, label: Label) -> Iterator[None]:
        """Launches have this label."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def _add(self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, label = kernel.fn.__name__, self._label
        assert label is not None, f"{name} is launched without a label"
        if label.part not in self.parts:
            return
        tiled = name in TILED
        same = (label.model, label.case, label.tile) if tiled else ()
        identity = (label.part, name, *same, _specialization(kernel, args, kwargs))
        if identity in self._seen:
            return
        self._seen.add(identity)
        words = (label.part, label.model, name, label.case, label.tile) if tiled else (label.part, label.model, name)
        base = key = " ".join(filter(None, words))
        count = 1
        while key in self.rows:
            count += 1
            key = f"{base} #{count}"
        figures = None
        if self.wanted(len(self.rows)):
            figures = Figures.of(kernel.warmup(*args, grid=grid, **kwargs))
        default, per_sm = (label.default, label.per_sm) if tiled else (True, 1)
        self.rows[key] = Row(default, per_sm, 32 * kwargs.get("num_warps", 4), figures)


def numbers_of(figures: Figures) -> list[int]:
    return list(asdict(figures).values())


def _specialization(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """What Triton compiles a kernel for, as far as launches of one kernel differ in it."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    fixed = {param.name for param in kernel.params if param.is_constexpr}
    free = {param.name for param in kernel.params if param.do_not_specialize}

    def kind(name: str, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype, name in free or value.data_ptr() % 16 == 0
        if isinstance(value, TensorDescriptor):
            return value.base.dtype, tuple(value.block_shape)
        if name in fixed or name not in kernel.arg_names or value is None:
            return value
        if isinstance(value, int) and name not in free:
            return value == 1, value % 16 == 0
        return type(value).__name__

    return tuple((name, kind(name, value)) for name, value in sorted(given.items()))


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return registers, stack + local
