"""The table of what every Triton kernel takes of a Hopper GPU: `kernels_sm90.json`, a line per kernel, model and tile.

    PYTHONPATH=. python tests/support/kernels_sm90.py write              compiles all, and writes the figures of the
                                                                         Triton that is installed; minutes
    PYTHONPATH=. python tests/support/kernels_sm90.py write linear       one part only
    PYTHONPATH=. python tests/support/kernels_sm90.py print [PART...]    the same on standard output; the table stays
    ... print --every 50 --from 3                                        compiles the 4th kernel and every 50th after
                                                                         it, and lists the others

A line has what a launch is (`triton_compiler.Row`) and, by Triton's version, its `triton_compiler.Figures`. Those of
other versions stay as long as the kernel is still launched. `tests/system/test_triton_sm90.py` compares.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton_compiler import Figures, Launches, numbers_of

TABLE = Path(__file__).with_name("kernels_sm90.json")
CAPABILITY = 90
PROCESSES, FEW = 2, 20
"""Each process lists every launch, which takes longer than to compile few of them."""
PARTS = ("attention", "latents", "linear", "models", "routing", "experts", "signals", "projections")

Line = dict[str, Any]


def read_table() -> dict[str, Line]:
    """The committed lines, by launch."""
    return json.loads(TABLE.read_text())["kernels"]


def part_of(name: str) -> str:
    """The part of the table that a line is in."""
    return name.split()[0]


def kernel_of(name: str) -> str:
    """The kernel that a line is about."""
    return next(word for word in name.split() if word.startswith("_"))


def compile_parts(parts: frozenset[str], wanted: Callable[[int], bool]) -> dict[str, Line]:
    """Lines of these parts, with the figures of those kernels that are wanted."""
    launchers = _launchers()
    launches = Launches(parts, wanted)
    launches.begin(CAPABILITY)
    for compile_part, its_parts in {
        launchers.compile_attention: {"attention"},
        launchers.compile_latents: {"latents"},
        launchers.compile_linear: {"linear"},
        launchers.compile_small_kernels: {"models"},
        launchers.compile_experts: {"routing", "experts"},
        launchers.compile_signals: {"signals"},
        launchers.compile_projections: {"projections"},
    }.items():
        if parts & its_parts:
            compile_part(launches)
    in_order = sorted(launches.rows.items(), key=lambda item: PARTS.index(part_of(item[0])))
    lines = {}
    for name, row in in_order:
        line = asdict(row)
        line["figures"] = None if row.figures is None else numbers_of(row.figures)
        lines[name] = line
    return lines


def _launchers() -> ModuleType:
    """They import the project's kernels, which tests that read the table do not need."""
    import compile_triton

    return compile_triton


def _share(task: tuple[frozenset[str], int, int, int, int]) -> dict[str, Line]:
    """What one of the processes compiles."""
    parts, every, first, process, processes = task
    return compile_parts(parts, lambda place: place % every == first and place // every % processes == process)


def compile_all(parts: frozenset[str], every: int, first: int) -> dict[str, Line]:
    """Lines of these parts; every `every`th has figures, from `first` on."""
    _launchers()  # once, before the fork
    processes = PROCESSES if len(read_table()) // every > FEW else 1
    tasks = [(parts, every, first, process, processes) for process in range(processes)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        shares = pool.map(_share, tasks, chunksize=1)
    return {
        name: next((share[name] for share in shares if share[name]["figures"]), shares[0][name]) for name in shares[0]
    }


def version() -> str:
    """Of Triton, without its last number."""
    return ".".join(triton.__version__.split(".")[:2])


def write_table(parts: frozenset[str], lines: Mapping[str, Line]) -> None:
    """Replace these parts of the table, but for other versions' figures."""
    before = read_table() if TABLE.exists() else {}
    kept = {name: line for name, line in before.items() if part_of(name) not in parts}
    for name, line in lines.items():
        of_others = {key: value for key, value in before.get(name, {}).items() if key[0].isdigit()}
        figures = line.pop("figures")
        kept[name] = {**line, **dict(sorted((of_others | {version(): figures}).items()))}
    in_order = sorted(kept.items(), key=lambda item: PARTS.index(part_of(item[0])))
    names = json.dumps([field.name for field in fields(Figures)])
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(line)}" for name, line in in_order)
    TABLE.write_text(f'{{"figures": {names},\n"kernels": {{\n{text}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["print", "write"])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--every", type=int, default=1, help="compile every n-th kernel; `print` only")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    given = parser.parse_args()
    parts = frozenset(given.parts or PARTS)
    if unknown := parts - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if given.action == "write" and given.every != 1:
        parser.error("a table with every n-th figure is of no use; leave out --every")
    lines = compile_all(parts, given.every, given.first)
    if given.action == "write":
        write_table(parts, lines)
    else:
        print(json.dumps({"version": version(), "kernels": lines}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
