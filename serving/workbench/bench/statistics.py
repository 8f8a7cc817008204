"""Measuring for every benchmark: cores, arms interleaved A B B A, medians, paired ratios, a bootstrap interval."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from serving.progress import progress
from ubatch.process import num_cores

Rows = npt.NDArray[np.intp]
_RESAMPLES = 2000
_DRIFT_BLOCKS = 20
_FLAGS = (
    *("amx_tile", "amx_bf16", "amx_fp16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512f"),
    *("avx_vnni", "avx2", "fma", "bf16", "i8mm", "sve"),
)
"""Instructions, x86's and ARM's, that decide how fast a processor multiplies matrices."""


@dataclass(frozen=True)
class Interval:
    """A median, or what `resampled` was asked for, with its 95% bootstrap interval."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        spec = spec or ".3g"
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def resampled(count: int, value: Callable[[Rows], Any]) -> Interval:
    """A value of `count` rows, with its 95% interval under resampling of rows (seeded).

    Args:
        value: of the rows with these numbers, `[..., count]`; for each of the leading dimensions.
    """
    draws = np.random.default_rng(0).integers(0, count, size=(_RESAMPLES, count))
    low, high = np.percentile(value(draws), [2.5, 97.5])
    return Interval(float(value(np.arange(count))), float(low), float(high))


def bootstrap(values: Sequence[float]) -> Interval:
    """Median of `values` and the 95% interval of the median under resampling (seeded)."""
    sample = np.asarray(values, dtype=float)
    return resampled(len(sample), lambda rows: np.median(sample[rows], axis=-1))


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Median of the block-by-block ratios; drift of the machine affects both sides alike and cancels."""
    return bootstrap([a / b for a, b in zip(numerators, denominators, strict=True)])


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Ratio of the sums with its 95% interval, by resampling blocks of consecutive values (seeded)."""
    count = min(_DRIFT_BLOCKS, len(numerators))
    blocks = np.array_split(np.asarray([numerators, denominators]), count, axis=1)
    table = np.asarray([block.sum(axis=1) for block in blocks])

    def ratio(rows: Rows) -> Any:
        above, below = np.moveaxis(table[rows].sum(axis=-2), -1, 0)
        return above / below

    return resampled(count, ratio)


Arm = Callable[[], float | Mapping[str, float]]
"""Runs something once; returns its time, or several figures by name."""


def interleave_arms(
    arms: Mapping[str, Arm], blocks: int, *, label: str = "", show: bool = True
) -> dict[str, list[float]]:
    """Run every arm twice a block, forwards then backwards (A B B A); returns the block means per arm, or per figure of
    the arms that return several.

    One unrecorded round comes first.
    """
    for arm in arms.values():
        arm()
    measured: dict[str, list[float]] = {}
    for _ in progress(range(blocks), desc=label or "blocks", show=show):
        block: dict[str, list[float]] = {}
        for name in (*arms, *reversed(list(arms))):
            found = arms[name]()
            for what, value in (found if isinstance(found, Mapping) else {name: found}).items():
                block.setdefault(what, []).append(value)
        for name, values in block.items():
            measured.setdefault(name, []).append(sum(values) / len(values))
    return measured


def fastest(arms: Mapping[str, Sequence[float]], names: Iterable[str]) -> str:
    """Of these arms, the one with the smallest median."""
    return min(names, key=lambda name: float(np.median(arms[name])))


def timed(arm: Callable[[], object], synchronize: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """A function that runs `arm` and returns its milliseconds, from one `synchronize` to the next."""

    def run() -> float:
        synchronize()
        start = time.perf_counter()
        arm()
        synchronize()
        return (time.perf_counter() - start) * 1e3

    return run


def environment() -> dict[str, Any]:
    """Hardware and versions that the figures were measured with."""
    processor = _processor()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor.get("model name", platform.processor() or "unknown"),
        "processor_flags": [flag for flag in _FLAGS if flag in processor.get("flags", "").split()],
        "cores": num_cores(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def print_machine() -> None:
    """Print the processor, its cores and its instructions for products."""
    here = environment()
    print(f"{here['processor']}, {here['cores']} cores; {' '.join(here['processor_flags'])}")


def _processor() -> dict[str, str]:
    """What Linux says of the first core; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip().replace("Features", "flags"): value.strip() for name, _, value in pairs}


def overlap_figures(
    compute: Sequence[float], communication: Sequence[float], overlapped: Sequence[float]
) -> tuple[Interval, Interval]:
    """Efficiency and hidden share of steps that take T, from block-by-block values.

    efficiency: max(compute, communication) / T; hidden: (compute + communication - T) / min(compute, communication).
    """
    columns = list(zip(compute, communication, overlapped, strict=True))
    efficiency = bootstrap([max(c, m) / t for c, m, t in columns])
    return efficiency, bootstrap([(c + m - t) / min(c, m) for c, m, t in columns])


def columns(rows: Iterable[Sequence[str]], indent: int = 2) -> str:
    """A table as text, each column as wide as its widest cell; the first column is left-aligned, the others right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append(" " * indent + "  ".join(cells))
    return "\n".join(lines)


def table(head: Mapping[str, str], rows: Iterable[Sequence[object]], indent: int = 2) -> str:
    """A table as text. `head` has the name of every column, and how its values are written; None is a dash."""

    def shown(value: object, spec: str) -> str:
        return "-" if value is None else value if isinstance(value, str) else format(value, spec)

    cells = ([shown(*pair) for pair in zip(row, head.values(), strict=True)] for row in rows)
    return columns([list(head), *cells], indent)


def print_arms(arms: Mapping[str, Sequence[float]], spec: str, indent: int = 2, unit: str = "ms") -> None:
    """Print a line for every arm."""
    print(columns(((name, f"{bootstrap(values):{spec}} {unit}") for name, values in arms.items()), indent))


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write results with stable keys; a dataclass, such as an interval, is written as its fields, or by `as_json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if hasattr(value, "as_json"):
        return value.as_json()
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    return str(value)


def split_cores() -> tuple[Set[int], Set[int]]:
    """One core of those that this thread has, and the others: the same if it has one. Both are empty where threads have
    no masks."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    one = set(sorted(cores)[-1:])
    return one, cores - one or one


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """Run the block, and what it starts, on these cores; on any if there are none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
