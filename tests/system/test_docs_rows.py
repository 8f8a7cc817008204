"""Rows of one figure each, in docs/measured.md, docs/gpu.md and the README: what is written is what the files have."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from figures import FIGURE, GPU, MEASURED, README, Figures, check_rows, table_below

pytestmark = pytest.mark.long

ROWS: Mapping[str, str] = {
    "`dbo_yield` outside a lane": (
        "{handoff[noop_ns]:.0f} ns; an empty Python function {handoff[empty_function_ns]:.0f} ns"
    ),
    "a hand-off, lanes pinned to one core": (
        "{handoff[per_switch_us]:.1f} us, {handoff[settings][pinned][eventfd]:.1f} us of it a bare switch of threads "
        "(`eventfd`); {handoff[ratio_to_event]:.2f} of a `threading.Event` ring in the same run"
    ),
    "a hand-off while another Python": (
        "{handoff[settings][busy][dbo_yield]:.0f} us: keep other threads idle while lanes run"
    ),
    "the guard of a wrapped call": (
        "{wrapper[us][guard, 100 tensors]:.0f} us with 100 tensors, "
        "{wrapper[us][guard, 1000 tensors]:.0f} us with 1,000"
    ),
    "what else a wrapped call costs": (
        "look-up {wrapper[us][look-up, argument tensors: 1]:.0f} us for one argument tensor, "
        "{wrapper[us][look-up, argument tensors: 11]:.0f} us for eleven; {wrapper[us][declined call]:.0f} us if it "
        "declines; cutting a cache of 24 layers {wrapper[us][cache of 24 layers]:.0f} us"
    ),
    "lanes with nothing to overlap": "{lanes[overhead]:.3f []} of their time, with {lanes[handoffs]} hand-offs",
    "a layer's 32 experts": (
        "`native` {few[native float32][over_grouped]:.1f}x ({many[native float32][over_grouped]:.2f}x) faster, weights "
        "at {few[native float32][weights_gb_s]:.0f} GB/s (products at {many[native float32][gflops]:.0f} GFLOP/s); "
        "`packed` {few[packed float32][over_grouped]:.1f}x ({many[packed float32][over_grouped]:.2f}x); in bfloat16 "
        "`native` {few[native bfloat16][over_grouped]:.1f}x ({many[native bfloat16][over_grouped]:.2f}x)"
    ),
    "decode attention": (
        "`native` {attention[decode][speedup][native]:.1fx []} faster, "
        "{attention[decode][bandwidth_share][native]:.2f} of the memory bandwidth; "
        "`torch` {attention[decode][speedup][torch]:.1fx []}, {attention[decode][bandwidth_share][torch]:.2f}"
    ),
    "prefill attention": "{attention[prefill][over_dense]:.2f []} of its time",
    "splitting the metadata": "{attention[split_us]:.0f} us",
    "generating with a 100 M": (
        "{attention[generate][speedup]:.2fx []} faster ({attention[generate][tokens_per_s]:.0f} tokens/s), the same "
        "tokens; {attention[generate][arithmetic_share]:.2f} of the arithmetic limit"
    ),
    "the same through `LLM`": (
        "{offline[over_transformers][offline_1]:.2fx []} ({offline[tokens_per_s][offline_1]:.0f} tokens/s), the same "
        "tokens"
    ),
    "the same through `ubatch serve`": (
        "{offline[over_offline][served_1]:.2f []} of its speed; streamed {offline[over_offline][streamed_1]:.2f []}"
    ),
    "scheduling a step": (
        "{host_ms:.2f} ms; the overlapped loop hides {engine-scheduler[scheduler][hidden]:.2f} of what a device would "
        "wait"
    ),
    "`--enable-dbo`, two ranks": (
        "{engine-overlap[overlap][results][prefill][speedup]:.2fx []} faster, the same tokens"
    ),
    "the same link, 64 prompts": "{engine-overlap[overlap][results][decode][speedup]:.2fx []}, the same tokens",
    "speculation, tiny-moe": (
        "n-gram {one[speedup][ngram]:.2fx []}, trained head {one[speedup][eagle_chain]:.2fx []}, as a tree "
        "{one[speedup][eagle_tree]:.2fx []} of {one[tokens_per_s][without]:.0f} tokens/s, the same tokens; "
        "{accepted[0]:.1f} to {accepted[1]:.1f} tokens per verify step"
    ),
    "the same, eight at once": (
        "{eight[speedup][ngram]:.2fx []}, {eight[speedup][eagle_chain]:.2fx []}, {eight[speedup][eagle_tree]:.2fx []} "
        "of {eight[tokens_per_s][without]:.0f} tokens/s; with `--enable-dbo` on two ranks "
        "{speculation[census][engaged]} of {speculation[census][above]} verify steps above the threshold ran in two "
        "lanes"
    ),
    "a 100 M Qwen3-MoE that transformers shards": "{transformers[over_not_wrapped]:.2fx []}",
    "p99 between two tokens": (
        "{fair[off False][stretch]:.2fx []} of decodes alone, with `auto` {fair[auto False][stretch]:.2fx []}; with "
        "`--enable-dbo` {fair[off True][stretch]:.2fx []} of decodes alone, with `auto` "
        "{fair[auto True][stretch]:.2fx []}"
    ),
    "the tokens per second": (
        "{fair[auto False][throughput]:.2fx []}; with `--enable-dbo` {fair[auto True][throughput]:.2fx []}"
    ),
    "twenty attacks": (
        "{attacked[wrong]} of {attacked[ended]} streams with a wrong token; `/health` within {attacked[health_s]:.2f} "
        "s; the API process at most {attacked[mb]:.0f} MB; inter-token p99 {abuse[gap_p99_ratio]:.2f} of that alone "
        "while prompts of 900 tokens arrive; a short request behind 1,000 prompts {attacked[waits_s][0]:.2f} s, behind "
        "200 of 1,000 tokens {attacked[waits_s][1]:.2f} s"
    ),
    "engines killed under 64": (
        "{killed[kills]} kills: {killed[lost]} of {killed[requests]} answers lost, {killed[wrong]} with another text, "
        "{killed[excused]} that differ where rounding decides"
    ),
    "engines killed in bfloat16": (
        "{rounded[kills]} kills: {rounded[lost]} of {rounded[requests]} answers lost, {rounded[wrong]} with another "
        "text, {rounded[excused]} that differ where rounding of float32 would decide, too"
    ),
    "a rank that is stopped": (
        "{faults[others][answers][lost]} of {faults[others][answers][requests]} answers lost, "
        "{faults[others][answers][wrong]} with another text; noticed after {faults[others][faults][0][noticed_s]:.1f} "
        "s, {faults[others][faults][1][noticed_s]:.1f} s, {faults[others][faults][3][noticed_s]:.1f} s, "
        "{faults[others][faults][2][noticed_s]:.1f} s, and healthy again after "
        "{faults[others][faults][0][again_s]:.1f} s, {faults[others][faults][1][again_s]:.1f} s, "
        "{faults[others][faults][3][again_s]:.1f} s, {faults[others][faults][2][again_s]:.1f} s"
    ),
    "two machines": (
        "{faults[nodes][answers][lost]} of {faults[nodes][answers][requests]} answers lost, "
        "{faults[nodes][answers][wrong]} with another text; a link that is not healed ends both by name, after "
        "{faults[nodes][ended_s]:.1f} s"
    ),
    "one failure more": "{faults[limit][kills]} kills end it with status {faults[limit][ended][status]} and by name",
    "a kill a minute": (
        "{faults-soak[soak][kills]} kills: {faults-soak[soak][answers][lost]} of "
        "{faults-soak[soak][answers][requests]} answers lost, {faults-soak[soak][answers][wrong]} with another text; "
        "{faults-soak[soak][series][0][threads]} threads of the API process at first, "
        "{faults-soak[soak][series][19][threads]} at last; {faults-soak[soak][series][0][descriptors]} descriptors, "
        "{faults-soak[soak][series][19][descriptors]}; {resident_mb[0]:.1f} MB of memory, {resident_mb[19]:.1f}"
    ),
    "a stream's pause": "{killed[pause_s]:.2f} s, {faults[pause][ratio]:.2f} of the {killed[start_s]:.1f} s of a start",
    "a request that kills": "it alone ends, in {killed[poisoned]} ways; {killed[others]} others have their texts",
    "throughput of a server that may start": (
        "{faults-cost[cost][ratio]:.3f []}; its processors' time {faults-cost[cost][processor]:.3f []}"
    ),
    "64 requests that decode with a grammar": (
        "{structured[results][all_over_free]:.2f []}; one of them with a grammar "
        "{structured[results][one_over_free]:.2f []}"
    ),
    "a grammar's mask": (
        "{structured[results][mask_us]:.1f []} us, {structured[results][advance_us]:.1f []} us; compiling a new schema "
        "{structured[results][compile_ms]:.1f []} ms"
    ),
    "prefills on two ranks with popular experts": (
        "{eplb-gain[gain][gain][dbo]:.2fx []} faster, in one lane {eplb-gain[gain][gain][serial]:.2fx []}; while "
        "experts move a step takes {eplb[moving][median]:.2f []} of its time"
    ),
    "`--enable-dbo`, two servers": (
        "{slow[prefill][dbo][speedup]:.2fx []} faster; a mixed load {slow[mixed][dbo][speedup]:.2fx []}, the same "
        "tokens"
    ),
}
"""Begin of a row of `docs/measured.md` -> its figures: `{file[place][place]:format}`, see `Figures`."""
GPU_ROWS: Mapping[str, str] = {
    "overlapped prefill": "{gpu[prefill][communication 1x compute: speed-up]:.2fx []} faster",
    "communication hidden": "{gpu[prefill][communication 1x compute: hidden]:.3f []}",
    "of the most that is possible": "{gpu[prefill][communication 1x compute: efficiency]:.3f []}",
    "experts' products next to copies": "{gpu[prefill][GEMM slow-down beside copies]:.3fx []}",
    "fused MoE of Qwen3-30B-A3B": (
        "{gpu[moe-decode][64 tokens: speed against torch._grouped_mm]:.2f}x, "
        "{gpu[moe-decode][128 tokens: speed against torch._grouped_mm]:.2f}x, "
        "{gpu[moe-decode][256 tokens: speed against torch._grouped_mm]:.2f}x faster"
    ),
    "fused MoE, 4k": (
        "{gpu[moe-prefill][4096 tokens: share of the matrix peak]:.2f}, "
        "{gpu[moe-prefill][8192 tokens: share of the matrix peak]:.2f}, "
        "{gpu[moe-prefill][16384 tokens: share of the matrix peak]:.2f}"
    ),
    "bytes of the visited experts": (
        "{gpu[moe-decode][64 tokens: share of the bandwidth floor]:.2f}, "
        "{gpu[moe-decode][128 tokens: share of the bandwidth floor]:.2f}, "
        "{gpu[moe-decode][256 tokens: share of the bandwidth floor]:.2f}"
    ),
    "paged decode attention": (
        "{gpu[attention][batch 64: share of the copy bandwidth]:.2f}, "
        "{gpu[attention][batch 128: share of the copy bandwidth]:.2f}, "
        "{gpu[attention][batch 256: share of the copy bandwidth]:.2f}"
    ),
    "a decode step in a graph": "{gpu[decode][plain: CPU of replay()]:.0f []} us",
    "CPU of the whole step": "{gpu[decode][plain: CPU of a whole step]:.0f []} us",
    "products next to a transport": (
        "{gpu[sms][dealt beside: slow-down]:.2f}x, {gpu[sms][claimed beside: slow-down]:.2f}x, "
        "{gpu[sms][reserved beside: slow-down]:.2f}x"
    ),
    "eager lanes": "{gpu[lanes][lanes' cost per layer, step]:.0f} us",
}
"""The same of the table in `docs/gpu.md`, from `gpu.json`."""


def test_every_row_of_the_page_of_figures_is_that_of_a_file() -> None:
    check_rows(table_below("| what | measured |"), written(ROWS))


def written(rows: Mapping[str, str]) -> dict[str, str]:
    figures = Figures()
    return {label: template.format_map(figures) for label, template in rows.items()}


def test_the_figures_of_a_gpu_are_those_of_its_file() -> None:
    rows = table_below("| what | measured | goal |", GPU)
    for begins, figure in written(GPU_ROWS).items():
        (row,) = [row for row in rows if row[0].startswith(begins)]
        assert row[1] == figure, begins


FIRST_PAGE: Mapping[str, str] = {
    "Wrap": "| a 100 M Qwen3-MoE that transformers shards",
    "Generate": "| `--enable-dbo`, two ranks, link as slow as compute",
    "Serve": "| `--enable-dbo`, two servers with a real link of 600 Mbit/s and 0.5 ms",
    "Without ranks": "| generating with a 100 M Qwen3-MoE (64 prompts of 128 tokens, 64 new, 2 cores, one process)",
    "On a GPU": "| overlapped prefill, against",
    "Guess ahead": "| speculation, tiny-moe",
    "Under attack": "| twenty attacks on a server",
    "Engines die": "| engines killed under 64 streams",
    "Tune": "of the other rows it was -2.0%",
    "Balance": "| prefills on two ranks with popular experts",
}
"""Row of the README's table -> begin of the line of that page, or of the GPU's, which has its figure."""


def test_the_readme_shows_figures_of_that_page() -> None:
    """One in every row, in bold; and no other one in that column."""
    lines = [line for page in (MEASURED, GPU) for line in page.read_text(encoding="utf-8").splitlines()]
    without = []
    for row in table_below("| | command or call | measured |", README):
        name, figure = row[0].strip("*"), re.search(r"\*\*(.+)\*\*", row[2])
        if figure is None:
            without.append(name)
            assert not FIGURE.search(row[2])
            continue
        (line,) = [line for line in lines if line.startswith(FIRST_PAGE[name])]
        assert figure[1] in line, f"{name}: {figure[1]} is not in {line}"
        others = row[2].replace(figure[0], "").replace("600 Mbit/s and 0.5 ms", "")
        assert not FIGURE.search(others), f"{name}: {others} has a figure that is not compared"
    assert without == ["See"]
