"""Every figure in the documents is that of a file in `benchmarks/results`, or no measured one, and says what it is."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from documents import DOCUMENTS
from figures import GPU, MEASURED, README, RESULTS, as_table, interval, results, table_below
from repository import ROOT

from serving.workbench.bench.provenance import read_provenance
from serving.workbench.bench.statistics import paired
from serving.workbench.planning.constants import load_constants

pytestmark = pytest.mark.long

SIMULATE = ROOT / "docs" / "simulate.md"
SPECULATION = ROOT / "docs" / "speculation.md"
CPU_KERNELS = ROOT / "docs" / "cpu-kernels.md"


# -- the table of everything ------------------------------------------------------------------------------------------


def handoff() -> Iterator[tuple[str, str]]:
    found = results("handoff")
    empty = f"an empty Python function {found['empty_function_ns']['median']:.0f} ns"
    yield "`dbo_yield` outside a lane", f"{found['noop_ns']['median']:.0f} ns; {empty}"
    ring = f"{found['ratio_to_event']['median']:.2f} of a `threading.Event` ring in the same run"
    bare = f"{found['settings']['pinned']['eventfd']['median']:.1f} us of it a bare switch of threads (`eventfd`)"
    yield "a hand-off, lanes pinned to one core", f"{found['per_switch_us']['median']:.1f} us, {bare}; {ring}"
    busy = found["settings"]["busy"]["dbo_yield"]["median"]
    yield "a hand-off while another Python", f"{busy:.0f} us: keep other threads idle while lanes run"


def wrapper() -> Iterator[tuple[str, str]]:
    found = results("wrapper")
    us = {name: f"{each['median']:.0f} us" for name, each in found["us"].items()}
    yield (
        "the guard of a wrapped call",
        f"{us['guard, 100 tensors']} with 100 tensors, {us['guard, 1000 tensors']} with 1,000",
    )
    look_up = (
        f"look-up {us['look-up, argument tensors: 1']} for one argument tensor, {us['look-up, argument tensors: 11']}"
    )
    rest = f"for eleven; {us['declined call']} if it declines; cutting a cache of 24 layers {us['cache of 24 layers']}"
    yield "what else a wrapped call costs", f"{look_up} {rest}"


def lanes() -> Iterator[tuple[str, str]]:
    found = results("lanes")
    overhead = interval(found["overhead"], ".3f", "")
    yield "lanes with nothing to overlap", f"{overhead} of their time, with {found['handoffs']} hand-offs"


def experts() -> Iterator[tuple[str, str]]:
    few, many = (results("experts")["results"][tokens] for tokens in ("64", "2048"))

    def faster(kind: str, dtype: str = "float32") -> str:
        medians = (each[f"{kind} {dtype}"]["over_grouped"]["median"] for each in (few, many))
        return "`{}` {:.1f}x ({:.2f}x)".format(kind, *medians)

    weights, products = few["native float32"]["weights_gb_s"], many["native float32"]["gflops"]
    speeds = f"weights at {weights:.0f} GB/s (products at {products:.0f} GFLOP/s)"
    half = f"in bfloat16 {faster('native', 'bfloat16')}"
    yield "a layer's 32 experts", f"{faster('native')} faster, {speeds}; {faster('packed')}; {half}"


def attention() -> Iterator[tuple[str, str]]:
    found = results("attention")
    decode, generate = found["decode"], found["generate"]
    native, torch = (interval(decode["speedup"][kind], ".1f") for kind in ("native", "torch"))
    shares = [decode["bandwidth_share"][kind]["median"] for kind in ("native", "torch")]
    memory = f"`native` {native} faster, {shares[0]:.2f} of the memory bandwidth; `torch` {torch}, {shares[1]:.2f}"
    yield "decode attention", memory
    yield "prefill attention", f"{interval(found['prefill']['over_dense'], unit='')} of its time"
    yield "splitting the metadata", f"{found['split_us']['median']:.0f} us"
    assert generate["same_tokens"] == 1.0
    limit = f"{generate['arithmetic_share']['median']:.2f} of the arithmetic limit"
    speed = f"{interval(generate['speedup'])} faster ({generate['tokens_per_s']['median']:.0f} tokens/s)"
    yield "generating with a 100 M", f"{speed}, the same tokens; {limit}"


def engine() -> Iterator[tuple[str, str]]:
    found, scheduler = results("engine-offline")["generate"], results("engine-scheduler")["scheduler"]
    assert set(found["same"].values()) == {1.0}
    tokens_per_s = found["tokens_per_s"]["offline_1"]["median"]
    speed = interval(found["over_transformers"]["offline_1"])
    yield "the same through `LLM`", f"{speed} ({tokens_per_s:.0f} tokens/s), the same tokens"
    served, streamed = (interval(found["over_offline"][f"{how}_1"], unit="") for how in ("served", "streamed"))
    yield "the same through `ubatch serve`", f"{served} of its speed; streamed {streamed}"
    host_ms = statistics.median(scheduler["arms_ms"]["host"])
    hidden = f"the overlapped loop hides {scheduler['hidden']['median']:.2f} of what a device would wait"
    yield "scheduling a step", f"{host_ms:.2f} ms; {hidden}"
    overlap = results("engine-overlap")["overlap"]["results"]
    assert {kind["same"] for kind in overlap.values()} == {1.0}
    yield "`--enable-dbo`, two ranks", f"{interval(overlap['prefill']['speedup'])} faster, the same tokens"
    yield "the same link, 64 prompts", f"{interval(overlap['decode']['speedup'])}, the same tokens"


def speculation() -> Iterator[tuple[str, str]]:
    found = results("speculation")
    one, eight = found["results"]
    lengths = [kind["mean_length"] for batch in (one, eight) for kind in batch["acceptance"].values()]
    assert all(kind["same"] for batch in (one, eight) for kind in batch["acceptance"].values())

    def gains(batch: Mapping[str, Any]) -> list[str]:
        return [interval(batch["speedup"][name]) for name in ("ngram", "eagle_chain", "eagle_tree")]

    def base(batch: Mapping[str, Any]) -> str:
        return f"{batch['tokens_per_s']['without']['median']:.0f} tokens/s"

    ngram, chain, tree = gains(one)
    steps = f"{min(lengths):.1f} to {max(lengths):.1f} tokens per verify step"
    yield (
        "speculation, tiny-moe",
        f"n-gram {ngram}, trained head {chain}, as a tree {tree} of {base(one)}, the same tokens; {steps}",
    )
    census = found["census"]
    lanes = f"{census['engaged']} of {census['above']} verify steps above the threshold ran in two lanes"
    yield (
        "the same, eight at once",
        f"{', '.join(gains(eight))} of {base(eight)}; with `--enable-dbo` on two ranks {lanes}",
    )


def transformers() -> Iterator[tuple[str, str]]:
    yield "a 100 M Qwen3-MoE that transformers shards", interval(results("transformers")["over_not_wrapped"])


def fairness() -> Iterator[tuple[str, str]]:
    arms = results("fairness")["arms"]
    names = ("stretch", "throughput")
    figures = {(arm["limit"], arm["dbo"], name): interval(arm[name]) for arm in arms for name in names}
    plain, overlapped = (
        f"{figures['off', dbo, 'stretch']} of decodes alone, with `auto` {figures['auto', dbo, 'stretch']}"
        for dbo in (False, True)
    )
    yield "p99 between two tokens", f"{plain}; with `--enable-dbo` {overlapped}"
    plain, overlapped = (figures["auto", dbo, "throughput"] for dbo in (False, True))
    yield "the tokens per second", f"{plain}; with `--enable-dbo` {overlapped}"


def abuse() -> Iterator[tuple[str, str]]:
    found = results("abuse")
    assert not found["faults"]
    windows = found["windows"]
    shorts = [f"{wait:.2f} s" for window in windows for wait in window["waits_s"]]
    wrong, ended = (sum(window["seen"][name] for window in windows) for name in ("wrong", "ended"))
    yield (
        "twenty attacks",
        f"{wrong} of {ended} streams with a wrong token; `/health` within "
        f"{max(window['health_s'] for window in windows):.2f} s; the API process at most "
        f"{found['peak_resident_bytes'] / 1e6:.0f} MB; inter-token p99 {found['gap_p99_ratio']:.2f} of that alone "
        f"while prompts of 900 tokens arrive; a short request behind 1,000 prompts {shorts[0]}, behind 200 of 1,000 "
        f"tokens {shorts[1]}",
    )


def link() -> Iterator[tuple[str, str]]:
    links = results("link")["links"]
    assert all(arm["same"] == arm["requests"] for of in links for arms in of["loads"].values() for arm in arms.values())
    (slow,) = [of["loads"] for of in links if of["link"] == ["500 us, 600 Mbit/s"]]
    prefills, mixed = (interval(slow[load]["dbo"]["speedup"]) for load in ("prefill", "mixed"))
    yield "`--enable-dbo`, two servers", f"{prefills} faster; a mixed load {mixed}, the same tokens"


BENCHMARKS: tuple[Callable[[], Iterator[tuple[str, str]]], ...] = (
    *(handoff, wrapper, lanes, experts, attention, engine, link, speculation, transformers, fairness, abuse),
)


def test_every_row_of_the_page_of_figures_is_that_of_a_file() -> None:
    """Where they differ, put these in."""
    expected = {label: value for benchmark in BENCHMARKS for label, value in benchmark()}
    shown = table_below("| what | measured |")
    labels = [next((label for label in expected if row[0].startswith(label)), None) for row in shown]
    assert sorted(map(str, labels)) == sorted(expected), "a row of no file, or a figure without its row"
    wrong = [
        [row[0], expected[label]]
        for row, label in zip(shown, labels, strict=True)
        if label is not None and row[1] != expected[label]
    ]
    assert not wrong, as_table(wrong)


FIRST_PAGE: Mapping[str, str] = {
    "Wrap": "| a 100 M Qwen3-MoE that transformers shards",
    "Generate": "| `--enable-dbo`, two ranks, link as slow as compute",
    "Serve": "| `--enable-dbo`, two servers with a real link of 600 Mbit/s and 0.5 ms",
    "Without ranks": "| generating with a 100 M Qwen3-MoE (64 prompts of 128 tokens, 64 new, 2 cores, one process)",
    "On a GPU": "| overlapped prefill, against",
    "Guess ahead": "| speculation, tiny-moe",
    "Under attack": "| twenty attacks on a server",
    "Tune": "of the other rows it was -2.0%",
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


# -- the other tables -------------------------------------------------------------------------------------------------


def test_the_table_of_links() -> None:
    """Every row, from the files that `make bench` writes; where they differ, put in these."""
    shown = table_below("| communication | lanes | best serial |")
    rows = [row for name in ("overlap-ratios", "overlap", "overlap-bf16") for row in rows_of_links(name)]
    expected = [row for _, row in sorted(rows, key=lambda ratio_and_row: ratio_and_row[0])]
    shown[0][0] = shown[0][0].removesuffix(" compute")  # said once
    assert shown == expected, as_table(expected)
    (link,) = results("overlap-bf16")["links"]
    assert f"{interval(link['lanes']['2']['of_bound'], unit='')} of it" in MEASURED.read_text(encoding="utf-8")


def rows_of_links(name: str) -> Iterator[tuple[tuple[float, int], list[str]]]:
    """Rows of the table of links, by link and number of lanes; those in bfloat16 come last."""
    half = name.endswith("bf16")
    for link in results(name)["links"]:
        medians = {arm: statistics.median(values) for arm, values in link["arms_ms"].items()}
        serial = min(value for arm, value in medians.items() if arm.startswith("serial_"))
        for lanes, figures in link["lanes"].items():
            yield (
                (link["ratio"] + 100 * half, int(lanes)),
                [
                    f"{link['ratio']:g}x" + ", bfloat16" * half,
                    lanes,
                    f"{serial:.0f} ms",
                    f"{medians[f'overlapped_{lanes}']:.0f} ms",
                    interval(figures["efficiency"], unit=""),
                    interval(figures["of_two_lanes"], unit=""),
                    interval(figures["schedule_efficiency"], unit=""),
                    f"{figures['hidden']['median']:.2f}",
                    interval(figures["speedup"]),
                ],
            )


@pytest.mark.parametrize("name", ["overlap", "overlap-ratios", "overlap-bf16"])
def test_no_measured_step_passes_the_bound(name: str) -> None:
    for link in results(name)["links"]:
        for lanes, figures in link["lanes"].items():
            assert figures["efficiency"]["high"] <= 1.0, (link["ratio"], lanes)
            assert figures["hidden"]["high"] <= 1.0, (link["ratio"], lanes)


SCHEDULES = (
    *("schedules-qwen3-moe", "schedules-deepseek-v3", "schedules-deepseek-v3-12-prompts"),
    "schedules-deepseek-v3-16-layers",
)


def test_the_table_of_schedules() -> None:
    """Where it differs, put in these."""
    shown = table_below("| model, prompts of 128 tokens per rank |")
    expected = [[row[0], *cells_of_schedules(name)] for row, name in zip(shown, SCHEDULES, strict=True)]
    assert shown == expected, as_table(expected)


def cells_of_schedules(name: str) -> Iterator[str]:
    found = results(name)
    named, first = {each["name"]: each for each in found["named"]}, found["searched"][0]
    medians = {arm: statistics.median(values) for arm, values in found["arms_ms"].items()}
    yield f"{min(ms for arm, ms in medians.items() if arm.startswith(('serial_', 'one_by_one'))):.0f} ms"
    single, theirs = named["single_batch"], named["mlp_shared_overlap"]
    yield f"{single['measured_ms']['median']:.0f} ms, {single['speedup']['median']:.2f}x"
    speedup = f"{theirs['measured_ms']['median']:.0f} ms, {theirs['speedup']['median']:.2f}x"
    yield f"{speedup}, {theirs['efficiency']['median']:.2f} of the bound"
    lanes = "the same one" if first["schedule"] == theirs["schedule"] else first["schedule"].partition(" x ")[0]
    best = f"{first['measured_ms']['median']:.0f} ms, {interval(first['speedup'])}"
    yield f"{lanes}: {best}, {interval(first['efficiency'], unit='')} of the bound"
    closest = max((*found["named"], *found["searched"]), key=lambda each: each["of_two_lanes"]["median"])
    yield f"{closest['schedule'].partition(' x ')[0]}: {interval(closest['of_two_lanes'], unit='')}"


def test_what_is_said_below_the_table_of_schedules() -> None:
    text = re.sub(r"\s+", " ", MEASURED.read_text(encoding="utf-8"))
    found = {name: results(name) for name in SCHEDULES}
    arms = found[SCHEDULES[-1]]["arms_ms"]
    named = {each["name"]: each["measured_ms"]["median"] for each in found[SCHEDULES[-1]]["named"]}
    best = min(named, key=named.__getitem__)
    over = {name: paired(arms[name], arms["searched 1"]) for name in ("mlp_shared_overlap", best)}
    figures = [f"{each.median:.3f}x [{each.low:.3f}, {each.high:.3f}]" for each in over.values()]
    expected = [f"(in the last row {figures[0]} vLLM's schedule, {figures[1]} the best named one, `{best}`)"]
    errors = {name: [each["error"] for each in (*of["named"], *of["searched"])] for name, of in found.items()}
    last = errors.pop(SCHEDULES[-1])
    others = list(itertools.chain.from_iterable(errors.values()))
    near = sum(abs(error) <= 0.05 for error in others)
    expected += [
        f"was {min(last):.1%} to {max(last):.1%} off all {len(last)} measured steps of the last row",
        f"of the other rows it was {min(others):.1%} to {max(others):.1%} off, and within 5% for {near} of "
        f"{len(others)}",
    ]
    assert [line for line in expected if line not in text] == []


def test_the_table_of_what_is_decided() -> None:
    """Where it differs, put in these."""
    links = results("auto")["links"]
    names = ("against_serial", "pooled_serial", "against_best", "pooled_best")
    expected = [
        [f"{link['ratio']:g}x" if link["ratio"] else "none", *(interval(link[name], unit="") for name in names)]
        for link in links
    ]
    shown = table_below("| link | against serial | pooled |")
    shown[1][0] = shown[1][0].removesuffix(" compute")
    assert shown == expected, as_table(expected)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_the_table_of_where_the_time_of_a_step_goes(step: str) -> None:
    """Where it differs, put these in."""
    found = results("step")["results"][step]
    arms = [found[f"{kernels} {dtype}"] for dtype in ("float32", "bfloat16") for kernels in ("torch", "native")]

    def figure(ms: float) -> str:
        return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"

    expected = [
        [kind, *(f"{figure(arm['parts_ms'][kind])} ({arm['share'][kind]:.0%})" for arm in arms)]
        for kind in arms[0]["share"]
    ]
    expected.append(["together", *(figure(arm["clocked_ms"]["median"]) for arm in arms)])
    expected.append(["without clocks", *(figure(arm["step_ms"]["median"]) for arm in arms)])
    assert table_below(f"| {step}, ms |", CPU_KERNELS) == expected, as_table(expected)


def test_what_the_trained_head_gets_right() -> None:
    found = results("speculation")["results"][0]["acceptance"]["eagle_chain"]
    places = ", ".join(f"{share:.1%}" for share in found["per_position"])
    rows = [row[1] for row in table_below("| | |", SPECULATION)]
    assert rows == [f"{found['mean_length']:.2f} over {found['verify_steps']} verify steps", places]


def test_what_the_roofline_lacks_is_what_the_constants_say() -> None:
    kernels = load_constants().kernels
    decode, prefill = (f"{kernels.unlisted[mode] - 1:.1%}" for mode in ("decode", "prefill"))
    text = SIMULATE.read_text(encoding="utf-8")
    assert f"{decode} in decode" in text
    assert f"{prefill} in prefill" in text


# -- every other figure -----------------------------------------------------------------------------------------------

_NUMBER = r"[+-]?\d[\d.,]*"
FIGURE = re.compile(
    rf"(?<![\w.,/-]){_NUMBER}(?: to {_NUMBER})? ?(?:ms|us|ns|%|tokens/s|[GM]B/s|GFLOP/s)(?![\w-])|\d[\d.]*x(?![\w-])"
)
NOT_MEASURED: Mapping[str, tuple[str, ...]] = {
    "serving.md": ("'decode/engaged': 8",),
    "gpu.md": ("0.5x and 1x compute", "| 30 us, 200 us, 1 |", "95 % bootstrap", "by more than 2 %"),
    "measured.md": (
        "95% bootstrap",
        "within 5% for",
        "(in the last row",
        "the best named one",
        "measured steps of the",
        "one of 600 Mbit/s and 0.5 ms",
    ),
    "simulate.md": (
        *("one launch", "A gate is 5 points", "says from the first what the second takes: 5%"),
        *("| prefill, EP 32", "| decode, EP 72", "| verify, EP 72", "`overlap.json` |", "`overlap-ratios.json` |"),
        *("1.1% in decode", "without those 12.4%", "62,713 tokens/s", "+44 to +54% for prefill"),
    ),
    "speculation.md": ("| accepted at place",),
    "tuning.md": (
        "emulated one of 50 MB/s",
        "(by over 2%)",
        "splitting costs 15%",
        "that costs is at most 1%",
        "75 ms or more",
    ),
    "wrapping.md": ("at most 5% of the rows",),
}
"""Document -> parts of lines whose figures are settings, limits, goals or of others; or are compared above."""
COMPARED = (
    *(
        "| what | measured |",
        "| | command or call | measured |",
        "| communication | lanes |",
        "| model, prompts of 128",
        "| link | against serial |",
    ),
    *("| link | load | serial |", "| `--enable-dbo` over |", "| the link changes |"),
    *("| decode, ms |", "| prefill, ms |"),
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_no_other_figure_is_in_a_document(document: Path) -> None:
    """A measured one belongs into a table above. What commands print, in console blocks, has `...` for its figures."""
    allowed, compared, found = NOT_MEASURED.get(document.name, ()), False, []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        compared = line.startswith(COMPARED) or (compared and line.startswith("|"))
        if FIGURE.search(line) and not compared and not any(part in line for part in allowed):
            found.append(f"{document.name}:{number}: {line}")
    assert not found, "\n".join(found)


# -- when it was measured ---------------------------------------------------------------------------------------------

MEASUREMENTS = [
    file
    for file in sorted(RESULTS.glob("*.json"), key=lambda file: file.stem)
    if file.name not in ("stub-cuda.json", "gpu.json", "gpu-tests.json")
]
"""Without the counts over a device that computes nothing, and those of a GPU, whose sections each have their commit."""


def test_every_file_says_at_which_commit_and_by_which_command_it_was_measured() -> None:
    """The page has a row for each; where it differs, put in these."""
    found = {file.stem: read_provenance(file) for file in MEASUREMENTS}
    expected = [[f"`{name}`", f"`{each.command}`", each.commit or ""] for name, each in found.items()]
    assert all(all(row) for row in expected)
    shown = table_below("| file of `benchmarks/results` | command | measured at |")
    assert shown == expected, as_table(expected)


def test_make_bench_runs_the_commands_that_wrote_the_files() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    runs = dict(re.findall(r"^\t\$\(BIN\)/(ubatch bench .*) --json \$\(RESULTS\)/(.*)$", makefile, re.MULTILINE))
    assert {name: command for command, name in runs.items()} == {
        file.name: read_provenance(file).command for file in MEASUREMENTS
    }
