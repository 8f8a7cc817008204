"""Every Triton kernel compiles for a Hopper GPU, on a machine that has none, to what `kernels_sm90.json` holds.

That table has every tile that the autotuner may choose for the models of its lines, by Triton's version. Where a change
is meant, rewrite it or a part of it: the command is in `tests/support/kernels_sm90.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import groupby

import pytest
from repository import ROOT, SUPPORT

pytest.importorskip("triton", reason="Triton is not installed; `make test` installs it")

from kernels_sm90 import Line, kernel_of, read_table
from triton_compiler import Figures

from attention.linear.triton_plan import _SHARED_MEMORY

OTHER = "UBATCH_TRITON_36"
SAMPLED, SHARES = 60, 24
"""`make test-wide` compiles every 60th, and `make test-slow` all, in shares of which none takes minutes."""
FOLDERS = ("attention/kernels", "attention/linear/kernels", "model_runner/kernels", "moe/kernels")
SHARED_MEMORY, SHARED_MEMORY_OF_SM, RESERVED = 227 << 10, 228 << 10, 1 << 10
REGISTERS, THREADS = 64 << 10, 2048
SPILLED = 64  # bytes that may go to local memory: a few numbers of tiles that fill the registers
MORE_REGISTERS = 8  # of a thread, which compilers give and take
SPILLS = {
    "latents DeepSeek-V3 _latent_split_kernel 128 heads, 1 over bf16 64/32/8/3": "3.9",
    "latents DeepSeek-V3 _latent_split_kernel 128 heads, 4 over bf16 64/32/8/3": "3.9",
    "latents DeepSeek-V3 _latent_split_kernel 128 heads, few keys": "3.9",
    "latents DeepSeek-V3 _latent_split_kernel 16 heads, 4 over bf16 64/32/8/3": "3.9",
    "experts DeepSeek-V3 _grouped_gemm_kernel up float8_e4m3fn 128 rows batched 128/128/16/3 x1": "3.9",
}
"""Defaults that spill more by one version of Triton: a tile that spills by neither is smaller, or there is none."""
READS_KEYS = {"_attention_kernel", "_latent_split_kernel"}
TABLE = read_table()


def compile_kernels(python: str, *options: str) -> tuple[str, dict[str, Line]]:
    """The version of this interpreter's Triton, and the lines that `kernels_sm90.py` prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", OTHER)}
    environment.setdefault("TRITON_CACHE_DIR", str(ROOT / ".cache" / "triton"))
    done = subprocess.run(
        [python, "-W", "ignore", str(SUPPORT / "kernels_sm90.py"), "print", *options],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    return told["version"], told["kernels"]


def figures_of(line: Line) -> dict[str, Figures]:
    """A line's figures by Triton's version."""
    return {key: Figures(*numbers) for key, numbers in line.items() if key[0].isdigit()}


def worse(found: Figures, held: Figures) -> list[str]:
    """What a kernel takes more of than the table says, or has fewer of."""
    may_grow = {"registers": MORE_REGISTERS, "spilled": 0, "shared": 0}
    return [
        f"{name} {value}, not {expected}"
        for name, value in vars(found).items()
        for expected in [getattr(held, name)]
        if (value > expected + may_grow[name] if name in may_grow else value < expected)
    ]


def check_figures(version: str, lines: dict[str, Line]) -> None:
    """No kernel that was compiled is worse than in the table."""
    if not any(version in line for line in TABLE.values()):
        pytest.skip(f"the table has no figures of Triton {version}; kernels_sm90.py writes them")
    compiled = {name: Figures(*line["figures"]) for name, line in lines.items() if line["figures"]}
    found = {name: worse(figures, figures_of(TABLE[name])[version]) for name, figures in compiled.items()}
    assert compiled
    assert not {name: complaints for name, complaints in found.items() if complaints}


@pytest.fixture(scope="module")
def sampled() -> tuple[str, dict[str, Line]]:
    return compile_kernels(sys.executable, "--every", str(SAMPLED))


@pytest.mark.wide
def test_the_table_has_every_launch(sampled: tuple[str, dict[str, Line]]) -> None:
    """In the order in which tiles are tried, with the same default."""

    def launch(line: Line) -> Line:
        return {key: value for key, value in line.items() if key != "figures" and not key[0].isdigit()}

    _, lines = sampled
    assert [(name, launch(line)) for name, line in lines.items()] == [
        (name, launch(line)) for name, line in TABLE.items()
    ]


@pytest.mark.wide
def test_a_sample_is_as_in_the_table(sampled: tuple[str, dict[str, Line]]) -> None:
    check_figures(*sampled)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_kernel_is_as_in_the_table(share: int) -> None:
    check_figures(*compile_kernels(sys.executable, "--every", str(SHARES), "--from", str(share)))


@pytest.mark.slow
@pytest.mark.skipif(OTHER not in os.environ, reason=f"{OTHER} names no interpreter that has Triton 3.6")
@pytest.mark.parametrize("share", range(SHARES))
def test_every_kernel_is_as_in_the_table_by_an_older_triton(share: int) -> None:
    version, lines = compile_kernels(os.environ[OTHER], "--every", str(SHARES), "--from", str(share))
    assert version == "3.6"
    check_figures(version, lines)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"registers": 108}, None),
        ({"registers": 109}, "registers 109, not 100"),
        ({"spilled": 8}, "spilled 8, not 0"),
        ({"shared": 1025}, "shared 1025, not 1024"),
        ({"wgmma": 3}, "wgmma 3, not 4"),
        ({"tma": 0}, "tma 0, not 2"),
        ({"cp_async": 7, "registers": 10}, "cp_async 7, not 8"),
        ({"in_flight": 1}, "in_flight 1, not 2"),
        ({"wgmma": 5, "shared": 0}, None),
    ],
)
def test_what_is_worse(change: dict[str, int], complaint: str | None) -> None:
    held = Figures(registers=100, spilled=0, shared=1024, wgmma=4, mma=0, tma=2, cp_async=8, in_flight=2)
    assert worse(replace(held, **change), held) == ([complaint] if complaint else [])


# ----------------------------------------------------------------------------------------- what the table has to show


def test_every_kernel_of_the_sources_is_in_the_table() -> None:
    sources = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    functions = (
        node.name
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    )
    assert {kernel_of(name) for name in TABLE} == {name for name in functions if name.endswith("_kernel")}


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_every_line_has_figures(version: str) -> None:
    assert not [name for name, line in TABLE.items() if version not in line]


def test_every_tile_fits_an_sm() -> None:
    """As often as it is to: shared memory and registers of all its programs there."""
    for name, line in TABLE.items():
        per_sm, threads = line["per_sm"], line["threads"]
        assert per_sm * threads <= THREADS, name
        for figures in figures_of(line).values():
            assert figures.shared <= SHARED_MEMORY, name
            assert per_sm * (figures.shared + RESERVED) <= SHARED_MEMORY_OF_SM, name
            assert per_sm * threads * figures.registers <= REGISTERS, name


def test_chunks_of_linear_attention_fit_where_they_are_taken() -> None:
    found = [
        figures.shared
        for name, line in TABLE.items()
        if "_scan_kernel bf16 by 64" in name
        for figures in figures_of(line).values()
    ]
    assert max(found) <= _SHARED_MEMORY <= SHARED_MEMORY


def test_no_default_spills() -> None:
    spilling = {
        (name, version): figures.spilled
        for name, line in TABLE.items()
        if line["default"]
        for version, figures in figures_of(line).items()
        if figures.spilled > SPILLED
    }
    assert set(spilling) == set(SPILLS.items()), spilling


def test_tiles_that_spill_are_tried_last() -> None:
    """By either Triton, among those after the default."""
    tiles = [(name, line) for name, line in TABLE.items() if "/" in name and not line["default"]]
    for case, lines in groupby(tiles, key=lambda item: re.sub(r" \d+(/\d+)+.*", "", item[0])):
        spill = [any(each.spilled > SPILLED for each in figures_of(line).values()) for _, line in lines]
        assert spill == sorted(spill), case


def test_kernels_that_read_keys_have_more_on_the_way() -> None:
    """While they wait for a tile, others are loaded."""
    for name, line in TABLE.items():
        if kernel_of(name) in READS_KEYS and line["default"]:
            assert all(figures.in_flight >= 2 for figures in figures_of(line).values()), name


def test_a_copy_on_sms_holds_them() -> None:
    """What it leaves of an SM's registers is too little for another copy, or for a GEMM's program that has an SM."""

    def taken(kernel: str) -> list[int]:
        return [
            line["threads"] * figures.registers
            for name, line in TABLE.items()
            if kernel_of(name) == kernel and line["per_sm"] == 1 and line["default"]
            for figures in figures_of(line).values()
        ]

    copies = taken("_copy_kernel")
    assert REGISTERS - min(copies) < min(*copies, *taken("_grouped_gemm_kernel"))
