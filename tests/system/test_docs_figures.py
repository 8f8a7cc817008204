"""Every table of figures in the documents is that of files in `benchmarks/results`; other figures are not measured.

`docs_figures.yaml` has the rows of one figure each. Every file says when and how it was measured.
"""

import itertools
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import DOCUMENTS
from figures import (
    FIGURE,
    GPU,
    MEASURED,
    README,
    RESULTS,
    Figures,
    as_table,
    check_rows,
    check_table,
    interval,
    results,
    table_below,
)
from repository import ROOT

from serving.workbench.bench.provenance import read_provenance
from serving.workbench.bench.statistics import paired
from serving.workbench.planning.constants import load_constants

pytestmark = pytest.mark.long

SIMULATE = ROOT / "docs" / "simulate.md"
SPECULATION = ROOT / "docs" / "speculation.md"
CPU_KERNELS = ROOT / "docs" / "cpu-kernels.md"
EXPERT_BALANCE = ROOT / "docs" / "expert-balance.md"
TOLD: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("docs_figures.yaml").read_text(encoding="utf-8"))


# -- tables ------------------------------------------------------------------------------------------------------------


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
    check_table(expected, f"| {step}, ms |", CPU_KERNELS)


def test_the_table_of_real_links() -> None:
    """Where it differs, put in these."""
    expected = []
    forced = ("two-lanes", "three-lanes", "single-batch", "two-by-two")
    for found in results("link")["links"]:
        for load, arms in found["loads"].items():
            ratios = [f"{arms[name]['whole']['median']:.2f}" for name in forced]
            serial, dbo = f"{statistics.median(arms['serial']['seconds']):.1f} s", arms["dbo"]
            shares = [f"{dbo[name]:.2f}" for name in ("of_fastest", "learned")]
            cells = [serial, interval(dbo["whole"], unit=""), *shares, *ratios]
            expected.append([f"`{found['link'][0]}`", load, *cells])
        pooled = found["pooled"]
        of_fastest = pooled["dbo"]["median"] / max(own["median"] for own in pooled.values())
        cells = ["", interval(pooled["dbo"], unit=""), f"{of_fastest:.2f}", ""]
        cells += [f"{pooled[name]['median']:.2f}" for name in forced]
        expected.append([f"`{found['link'][0]}`", "all", *cells])
    check_table(expected, "| link | load | serial |")


def test_the_table_of_real_links_on_the_first_page() -> None:
    """Where it differs, put in these."""
    expected = []
    for found in results("link")["links"]:
        ratios = [*(arms["dbo"]["whole"] for arms in found["loads"].values()), found["pooled"]["dbo"]]
        expected.append([f"`{found['link'][0]}`", *(interval(each) for each in ratios)])
    check_table(expected, "| `--enable-dbo` over |", README)


def test_the_table_of_a_link_that_changes() -> None:
    """Where it differs, put in these."""
    (found,) = results("link-change")["links"]
    expected = []
    for load, arms in found["loads"].items():
        for name in ("dbo", "two-lanes"):
            halves, whole = arms[name]["halves"], arms[name]["whole"]
            ratios = [interval(each, unit="") for each in (halves["before"], halves["after"], whole)]
            expected.append([load, f"`{name}`", *ratios])
    check_table(expected, "| the link changes |")


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


# -- rows of one figure each ------------------------------------------------------------------------------------------


def test_every_row_of_the_page_of_figures_is_that_of_a_file() -> None:
    check_rows(table_below("| what | measured |"), written(TOLD["measured"]))


def written(rows: Mapping[str, str], **computed: Any) -> dict[str, str]:
    figures = Figures(computed)
    return {label: template.format_map(figures) for label, template in rows.items()}


def test_the_figures_of_a_gpu_are_those_of_its_file() -> None:
    rows = table_below("| what | measured | goal |", GPU)
    for begins, figure in written(TOLD["gpu"]).items():
        (row,) = [row for row in rows if row[0].startswith(begins)]
        assert row[1] == figure, begins


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
        (line,) = [line for line in lines if line.startswith(TOLD["first_page"][name])]
        assert figure[1] in line, f"{name}: {figure[1]} is not in {line}"
        others = row[2].replace(figure[0], "").replace("600 Mbit/s and 0.5 ms", "")
        assert not FIGURE.search(others), f"{name}: {others} has a figure that is not compared"
    assert without == ["See"]


def test_every_row_is_that_of_the_file() -> None:
    found, shift = results("eplb"), results("eplb-shift")["shift"]
    shifts = {
        mode: f"{max(each['steps'] or 10**9 for each in of)} of {shift['most'][mode]} steps"
        for mode, of in shift["shifts"].items()
    }
    errors = [f"{name} {step['ratio']['median'] - 1:+.1%}" for name, step in found["predict"]["steps"].items()]
    rearrangement = max(found["moving"]["rearrangements"])
    expected = written(TOLD["expert_balance"], **shifts, errors="; ".join(errors), rearrangement=rearrangement)
    check_rows(table_below("| what | asked | measured |", EXPERT_BALANCE), expected)


# -- every other figure -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_no_other_figure_is_in_a_document(document: Path) -> None:
    """A measured one belongs into a table above. What commands print, in console blocks, has `...` for its figures."""
    allowed, compared, found = TOLD["not_measured"].get(document.name, ()), False, []
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        compared = line.startswith(tuple(TOLD["compared"])) or (compared and line.startswith("|"))
        if FIGURE.search(line) and not compared and not any(part in line for part in allowed):
            found.append(f"{document.name}:{number}: {line}")
    assert not found, "\n".join(found)


# -- the files themselves ----------------------------------------------------------------------------------------------


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
    check_table(expected, "| file of `benchmarks/results` | command | measured at |")


def test_make_bench_runs_the_commands_that_wrote_the_files() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    runs = dict(re.findall(r"^\t\$\(BIN\)/(ubatch bench .*) --json \$\(RESULTS\)/(.*)$", makefile, re.MULTILINE))
    assert {name: command for command, name in runs.items()} == {
        file.name: read_provenance(file).command for file in MEASUREMENTS
    }
