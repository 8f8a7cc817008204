"""The table of a GPU in `docs/gpu.md` is that of `gpu.json`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from figures import GPU, interval, results, table_below

pytestmark = pytest.mark.long


def gpu() -> Iterator[tuple[str, str]]:
    sections = results("gpu")["sections"]
    found = {(name, each["what"]): each["value"] for name, of in sections.items() for each in of["figures"]}

    def prefill(what: str) -> Any:
        return found["prefill", f"communication 1x compute: {what}"]

    def medians(section: str, whats: list[str], unit: str = "") -> str:
        return ", ".join(f"{found[section, what]['median']:.2f}{unit}" for what in whats)

    yield "overlapped prefill", f"{interval(prefill('speed-up'))} faster"
    yield "communication hidden", interval(prefill("hidden"), ".3f", "")
    yield "of the most that is possible", interval(prefill("efficiency"), ".3f", "")
    yield "experts' products next to copies", interval(found["prefill", "GEMM slow-down beside copies"], ".3f")
    decode = [f"{tokens} tokens: speed against torch._grouped_mm" for tokens in (64, 128, 256)]
    yield "fused MoE of Qwen3-30B-A3B", f"{medians('moe-decode', decode, 'x')} faster"
    peak = [f"{tokens} tokens: share of the matrix peak" for tokens in (4096, 8192, 16384)]
    yield "the same, 4k", medians("moe-prefill", peak)
    held = [f"{tiles} beside: slow-down" for tiles in ("dealt", "claimed", "reserved")]
    yield "products next to a transport", medians("sms", held, "x")
    cost = found["lanes", "lanes' cost per layer, step"]
    yield "eager lanes", f"{cost['median']:.0f} us"


def test_the_figures_of_a_gpu_are_those_of_its_file() -> None:
    rows = table_below("| what | measured | goal |", GPU)
    for begins, figure in gpu():
        (row,) = [row for row in rows if row[0].startswith(begins)]
        assert row[1] == figure, begins
