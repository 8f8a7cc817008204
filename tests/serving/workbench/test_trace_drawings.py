"""The experts' load in pages of `ubatch trace`, of a recording and of a file; and a step as text."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from moe import ExpertPlacement
from moe.balance import Ints, write_loads
from serving.cli import main
from serving.engine.rank.tracing import EXPERT_LOADS
from serving.workbench.tracing.experts import as_document, draw_balance
from serving.workbench.tracing.text import compare_steps, draw_lanes, last_step
from ubatch.trace import read_chrome
from ubatch.trace.export import write_chrome
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote

SVG = "{http://www.w3.org/2000/svg}"
LOADS = np.array([[40, 0, 10, 10], [1, 1, 1, 1]])
"""Two layers of four experts; two ranks have 40 to 20, and 2 to 2."""


def parts_of(svg: str) -> tuple[ElementTree.Element, Counter[str], list[str]]:
    """A drawing, its elements by class, and its texts."""
    root = ElementTree.fromstring(as_document(svg))
    classes = Counter(each.get("class", "") for each in root.iter())
    return root, classes, [each.text or "" for each in root.iter(f"{SVG}text")]


def test_the_picture_has_every_layer_and_rank() -> None:
    root, classes, texts = parts_of(draw_balance(LOADS, ExpertPlacement.default(2, 4, 2)))
    assert {"4 experts", "rank 0", "rank 1", "0", "1", "0.75", "1.00"} <= set(texts)
    assert classes["row"] == classes["even"] == 2
    bars = [
        each
        for each in root.iter(f"{SVG}rect")
        if each.get("class") in ("rank", "hot") and float(each.get("y", 0)) < 90
    ]
    assert [each.get("class") for each in bars] == ["hot", "rank", "rank", "rank"], "an even layer has no busiest rank"
    heights = [float(each.get("height", 0)) for each in bars]
    assert heights[1] == pytest.approx(heights[0] / 2, abs=0.01)
    first, second = (each.text or "" for each in root.iter(f"{SVG}title"))
    assert first == (
        "layer 0: balancedness 0.750; rank 0 has 1.33 times the mean, 40 tokens; expert 0 has 40, 66.7% of all"
    )
    assert "balancedness 1.000" in second


def test_shades_tell_a_slots_tokens_against_the_layers_mean() -> None:
    """Of 15 on average, the experts have 2.67, 0, 0.67 and 0.67 times as many; then four have the mean."""
    root, _, _ = parts_of(draw_balance(LOADS, ExpertPlacement.default(2, 4, 2)))
    cells = {
        each.get("stroke-opacity"): each.get("d") or ""
        for each in root.iter(f"{SVG}path")
        if each.get("class") == "cell"
    }
    assert {shade: len(re.findall("M", path)) for shade, path in cells.items()} == {
        "0.62": 1,  # 2 to 3
        "0.03": 1,  # below 0.25
        "0.14": 1,  # 0.5 to 0.75: two neighbours are one
        "0.29": 1,  # 1 to 1.25: the whole layer is one
    }
    assert cells["0.29"].endswith("h940.0")


def test_replicas_share_and_idle_slots_are_blank() -> None:
    placement = ExpertPlacement(np.array([[0, 1, -1, 0, 2, -1]]), 3, 2)
    root, _, texts = parts_of(draw_balance(np.array([[20, 10, 10]]), placement))
    assert "6 slots" in texts
    (title,) = (each.text or "" for each in root.iter(f"{SVG}title"))
    assert "balancedness 1.000" in title
    lengths = [
        float(each) for path in root.iter(f"{SVG}path") for each in re.findall(r"h([\d.]+)", path.get("d") or "")
    ]
    assert sum(lengths) == pytest.approx(940 * 4 / 6, abs=1)


def test_a_layer_without_tokens_says_so() -> None:
    root, _, _ = parts_of(draw_balance(np.zeros((1, 4)), ExpertPlacement.default(1, 4, 2)))
    assert [each.text for each in root.iter(f"{SVG}title")] == ["layer 0: no tokens"]


def test_a_large_model_stays_light() -> None:
    loads = np.random.default_rng(0).integers(0, 1000, (58, 256))
    assert len(draw_balance(loads, ExpertPlacement.default(58, 256, 32, 32))) < 500_000


# -- files of loads ----------------------------------------------------------------------------------------------


@pytest.fixture
def loads(tmp_path: Path) -> str:
    path = tmp_path / "loads.npy"
    write_loads(path, np.stack([LOADS, LOADS[:, ::-1]]))
    return str(path)


def test_a_file_becomes_a_page_and_a_picture(loads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["trace", "--expert-loads", loads, "--ranks", "2", "--out", str(out)]) == 0
    assert "2 layers of 4 experts on 2 ranks; balancedness (mean / max over ranks) 1.00 in" in capsys.readouterr().out
    page = (out / "experts.html").read_text()
    assert not re.search(r"https?:|//[a-z]|\bsrc=|<link|@import|url\(|fetch\(|import\(", page)
    assert page.count("<polyline") == 2, "of the worst layer, and the mean"
    assert "balancedness 1.000" in page
    ElementTree.parse(out / "experts.svg")


def test_a_placement_says_where_experts_are(loads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placement = tmp_path / "placement.yaml"
    ExpertPlacement(np.array([[0, 1, 2, 3], [3, 2, 1, 0]]), 4, 4).save(placement)
    words = ["trace", "--expert-loads", loads, "--expert-placement", str(placement), "--out", str(tmp_path)]
    assert main(words) == 0
    assert "4 experts on 4 ranks; balancedness (mean / max over ranks) 0.60 in layer 0" in capsys.readouterr().out
    assert main([*words, "--ranks", "2"]) == 2
    assert "has 4 ranks, not 2" in capsys.readouterr().err
    ExpertPlacement.default(1, 4, 2).save(placement)
    assert main(words) == 2
    assert "has the load of 4 experts in 2 MoE layers, but" in capsys.readouterr().err


# -- recordings --------------------------------------------------------------------------------------------------


def recorded(folder: Path, counts: list[Ints], num_ranks: int = 2) -> list[str]:
    paths = [folder / f"rank-{rank}.json" for rank in range(len(counts))]
    for rank, own in enumerate(counts):
        told: dict[str, Any] = {"counts": own.tolist(), "slots": [[0, 1, 2, 3]] * 2, "num_ranks": num_ranks}
        spans = {rank: [Span(SpanKind.COMPUTE, "unsplit", UNSPLIT, 1.0, 2.0, 1)]}
        notes = {rank: [StepNote(1, "decode", 64, "serial", reason="peer_declined", declined_by=0, start=1.0, end=2.0)]}
        write_chrome(paths[rank], spans, notes=notes, extra={rank: {EXPERT_LOADS: told}})
    return list(map(str, paths))


def test_a_recording_shows_its_own_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = recorded(tmp_path, [np.stack([LOADS, LOADS * 0]), np.stack([LOADS, LOADS[::-1]])])
    out = tmp_path / "out"
    assert main(["trace", "--files", *files, "--out", str(out)]) == 0
    assert "experts: 2 layers of 4 experts on 2 ranks; balancedness" in capsys.readouterr().out
    page = (out / "trace.html").read_text()
    assert re.findall(r"<summary>(.*?)</summary>", page) == ["prefill steps", "decode steps"]
    assert "balancedness 1.000" in page.split("<summary>decode steps</summary>")[1]
    figures = json.loads((out / "summary.json").read_text())["balancedness"]
    assert figures["prefill steps"] == {"worst": 0.75, "mean": 0.875}
    again = [rank.extra[EXPERT_LOADS] for rank in read_chrome(out / "trace.json")]
    assert np.array_equal(again[0]["counts"], np.stack([LOADS, LOADS * 0])), "the merged file has it, too"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recording_without_shared_or_used_experts_shows_none(tmp_path: Path, ranks: int) -> None:
    files = recorded(tmp_path, [np.stack([LOADS, LOADS]) * (ranks == 1)], num_ranks=ranks)
    assert main(["trace", "--files", *files, "--out", str(tmp_path / "out")]) == 0
    assert "Load of the experts" not in (tmp_path / "out" / "trace.html").read_text()


def test_recordings_of_different_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = recorded(tmp_path, [np.stack([LOADS, LOADS]), np.stack([LOADS, LOADS])[:, :1]])
    assert main(["trace", "--files", *files, "--out", str(tmp_path / "out")]) == 2
    assert "have not recorded the load of the same experts" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- a step as text

# Every row of a step has its label and 81 columns of time; a second is a column here.
LANES = [
    Span(SpanKind.COMPUTE, "select", 0, 0.0, 20.0, 2),
    Span(SpanKind.COMPUTE, "combine.1", 0, 20.0, 42.0, 2),
    Span(SpanKind.TRANSFER, "combine", 0, 42.0, 81.0, 2),
    Span(SpanKind.COMPUTE, "layer", 0, 80.9, 81.0, 2),
    Span(SpanKind.COMPUTE, "select", 1, 42.0, 81.0, 2),
    Span(SpanKind.TRANSFER, "dispatch", 1, 0.0, 42.0, 2),
]
UNSPLIT_STEP = [
    Span(SpanKind.TRANSFER, "dispatch", UNSPLIT, 20.0, 60.0, 1),
    Span(SpanKind.WAIT, "dispatch", UNSPLIT, 20.0, 60.0, 1),
    Span(SpanKind.TRANSFER, "combine", UNSPLIT, 82.0, 122.0, 1),
    Span(SpanKind.WAIT, "combine", UNSPLIT, 82.0, 122.0, 1),
    Span(SpanKind.COMPUTE, "unsplit", UNSPLIT, 0.0, 162.0, 1),
]


def test_a_row_computes_and_one_is_on_the_link_per_lane() -> None:
    assert draw_lanes(LANES, 0.0, 81.0) == [
        "  lane 0 computes  " + "A" * 20 + "E" * 22,
        "  on the link      " + " " * 42 + "c" * 39,
        "  lane 1 computes  " + " " * 42 + "A" * 39,
        "  on the link      " + "d" * 42,
    ]


def test_an_unsplit_step_computes_where_it_does_not_wait() -> None:
    assert draw_lanes(UNSPLIT_STEP, 0.0, 162.0) == [
        "  computes         " + "A" * 10 + " " * 20 + "E" * 11 + " " * 20 + "A" * 20,
        "  on the link      " + " " * 10 + "d" * 20 + " " * 11 + "c" * 20,
    ]


def test_two_steps_are_drawn_to_one_scale() -> None:
    """The overlapped step takes half of the time, so that it ends in the middle of the lines."""
    serial, *rows = compare_steps(UNSPLIT_STEP, LANES)
    assert serial == "serial, 162000 ms"
    assert rows[:2] == draw_lanes(UNSPLIT_STEP, 0.0, 162.0)
    assert rows[2] == "overlapped, 81000 ms"
    assert rows[3:7] == draw_lanes(LANES, 0.0, 162.0)
    assert max(map(len, rows[3:7])) == 19 + 41
    ticks, numbers = rows[7:]
    fitting = [str(number) for number in range(0, 160_000, 20_000)]  # 160000 would pass the last column
    assert numbers.split() == ["ms", *fitting]
    assert ticks.index("|", 20) == numbers.index("20000") == 19 + 10
    assert max(map(len, (serial, *rows))) <= 100


def test_the_scale_is_in_milliseconds() -> None:
    step = [Span(SpanKind.COMPUTE, "unsplit", UNSPLIT, 5.0, 5.0904, 1)]
    assert compare_steps(step, step)[-1].split() == ["ms", *map(str, range(0, 81, 20))]


@pytest.mark.parametrize("missing", ["serial", "overlapped"])
def test_a_step_that_was_not_recorded_is_named(missing: str) -> None:
    steps = {"serial": UNSPLIT_STEP, "overlapped": LANES, missing: []}
    with pytest.raises(ValueError, match=f"the {missing} step has no span"):
        compare_steps(**steps)


def test_the_last_step_of_either_kind() -> None:
    spans = [*UNSPLIT_STEP, *LANES]
    assert {span.step for span in last_step(spans, in_lanes=True)} == {2}
    assert {span.step for span in last_step(spans, in_lanes=False)} == {1}
    assert last_step(LANES, in_lanes=False) == []
