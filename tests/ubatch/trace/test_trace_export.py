"""Exporting a trace: the summary against a sampled reference, the files against the format that viewers need."""

import html
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ubatch import ConfigError, Remark, write_html
from ubatch.trace.export import TraceSummary, chrome_events, pack, summarise, write_chrome
from ubatch.trace.intervals import difference, intersection, union
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote

COMPUTE, WAIT, TRANSFER = SpanKind.COMPUTE, SpanKind.WAIT, SpanKind.TRANSFER

OVERLAPPED = (
    # Lane 1 computes while lane 0's dispatch travels; lane 0's turn comes 1 s too early. Starts at 100 s.
    Span(COMPUTE, "dispatch", 0, 100.0, 102.0, 2),
    Span(TRANSFER, "dispatch", 0, 102.0, 106.0, 2, 4096),
    Span(COMPUTE, "dispatch", 1, 102.0, 105.0, 2),
    Span(WAIT, "dispatch", 0, 105.0, 106.0, 2),
    Span(TRANSFER, "dispatch", 1, 105.0, 107.0, 2, 1024),
    Span(COMPUTE, "end", 0, 106.0, 109.0, 2),
    Span(COMPUTE, "end", 1, 109.0, 110.0, 2),
)
UNSPLIT_STEP = (
    # One compute span around everything, a wait inside it.
    Span(COMPUTE, "model", UNSPLIT, 90.0, 99.0, 1),
    Span(TRANSFER, "dispatch", UNSPLIT, 93.0, 97.0, 1, 5120),
    Span(WAIT, "dispatch", UNSPLIT, 94.0, 97.0, 1),
)

ticks = st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda pair: (float(pair[0]), float(sum(pair))))
spans_in_ticks = st.lists(
    st.builds(
        lambda kind, lane, at, step: Span(kind, str(kind), lane, at[0] + 100 * step, at[1] + 100 * step, step),
        st.sampled_from(list(SpanKind)),
        st.integers(-1, 2),
        ticks,
        st.integers(0, 1),
    ),
    max_size=12,
)


def moments(spans: Sequence[Span], kind: SpanKind) -> set[int]:
    """Every whole second during which a span of this kind lasts."""
    return {tick for span in spans if span.kind is kind for tick in range(int(span.start), int(span.end))}


# ------------------------------------------------------------------------------------------------------ summary


def test_summary_of_an_overlapped_and_an_unsplit_step() -> None:
    overlapped = summarise(OVERLAPPED)
    assert overlapped == TraceSummary(compute_s=9, communication_s=5, hidden_s=4, exposed_s=1, wall_s=10)
    assert overlapped.hidden_fraction == 0.8
    unsplit = summarise(UNSPLIT_STEP)
    assert unsplit == TraceSummary(compute_s=6, communication_s=4, hidden_s=1, exposed_s=3, wall_s=9)
    both = summarise(UNSPLIT_STEP + OVERLAPPED)
    assert both == TraceSummary(compute_s=15, communication_s=9, hidden_s=5, exposed_s=4, wall_s=19)


def test_summary_without_communication_hides_all_there_was() -> None:
    assert (summarise([]), summarise(OVERLAPPED[:1]).hidden_fraction) == (TraceSummary(0, 0, 0, 0, 0), 1.0)


@pytest.mark.long
@given(spans_in_ticks)
def test_summary_equals_a_count_of_moments(spans: list[Span]) -> None:
    waiting, on_link = moments(spans, WAIT), moments(spans, TRANSFER)
    computing = moments(spans, COMPUTE) - waiting
    found = summarise(iter(spans))
    lengths = tuple(map(len, (computing, on_link, computing & on_link, waiting)))
    assert (found.compute_s, found.communication_s, found.hidden_s, found.exposed_s) == lengths


@given(st.lists(ticks, max_size=6), st.lists(ticks, max_size=6))
def test_interval_sets(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    def ticks_of(intervals: Sequence[tuple[float, float]]) -> set[int]:
        return {tick for start, end in intervals for tick in range(int(start), int(end))}

    a, b = union(first), union(second)
    assert ticks_of(a) == ticks_of(first)
    assert ticks_of(intersection(a, b)) == ticks_of(a) & ticks_of(b)
    assert ticks_of(difference(a, b)) == ticks_of(a) - ticks_of(b)
    for result in (a, b, intersection(a, b), difference(a, b)):
        assert all(start < end for start, end in result)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(result)), "sorted and disjoint"


@pytest.mark.long
@given(spans_in_ticks)
def test_packed_transfers_do_not_overlap_in_a_row(spans: list[Span]) -> None:
    rows = pack(spans)
    assert sorted(itertools.chain(*rows), key=repr) == sorted(spans, key=repr)
    for row in rows:
        assert all(left.end <= right.start for left, right in itertools.pairwise(row))
    if all(span.start < span.end for span in spans):
        busiest = max(sum(span.start <= tick < span.end for span in spans) for tick in range(200))
        assert len(rows) == busiest, "no more rows than transfers at once"


# ------------------------------------------------------------------------------------------------------- chrome


def events_of(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_chrome_rows_and_times() -> None:
    trace = {"traceEvents": chrome_events(UNSPLIT_STEP + OVERLAPPED, rank=3, origin=90.0)}
    named = [event for event in events_of(trace, "M") if event["name"] == "thread_name"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
    assert list(names.values()) == ["steps", "unsplit", "lane 0", "lane 1", "link", "link (2)"]
    assert {rank for rank, _ in names} == {3}

    drawn = [
        (names[event["pid"], event["tid"]], event["name"], event["ts"], event["dur"]) for event in events_of(trace, "X")
    ]
    second = 1_000_000
    assert ("steps", "step 1", 0, 9 * second) in drawn
    assert ("steps", "step 2", 10 * second, 10 * second) in drawn
    assert ("lane 0", "wait for dispatch", 15 * second, second) in drawn
    assert ("lane 1", "start", 12 * second, 3 * second) in drawn
    assert ("link", "dispatch", 12 * second, 4 * second) in drawn
    assert ("link (2)", "dispatch", 15 * second, 2 * second) in drawn, "two transfers at once get a row each"

    first = next(event for event in events_of(trace, "X") if event["ts"] == 12 * second and event["cat"] == "transfer")
    assert first["args"] == {
        "step": 2,
        "lane": "lane 0",
        "lane_number": 0,
        "bytes": 4096,
        "hidden_us": pytest.approx(3 * second),
    }


@pytest.mark.long
@given(spans_in_ticks)
def test_chrome_events_of_a_lane_nest(spans: list[Span]) -> None:
    """Chrome draws a row wrongly where two events overlap without one containing the other."""
    # As a trace has them: a lane's computes follow each other, and a wait lies inside a compute, an inconvenient
    # number of seconds long.
    clock, held = 1e6 / 3, []
    for span in spans:
        length = (span.end - span.start + 1) / 7e5
        held.append(Span(COMPUTE, "point", 0, clock, clock + length, 1))
        held.append(Span(WAIT, "transfer", 0, clock + length / 3, clock + length, 1))
        clock += length
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in events_of({"traceEvents": chrome_events(held, rank=0, origin=1e6 / 3)}, "X"):
        rows.setdefault(event["tid"], []).append(
            (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        )
    for row in rows.values():
        for (a, b), (c, d) in itertools.combinations(row, 2):
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


def test_chrome_file_puts_all_ranks_on_one_clock(tmp_path: Path) -> None:
    late = [Span(COMPUTE, "end", 0, 103.0, 104.0, 2)]
    path = tmp_path / "trace.json"
    write_chrome(path, {1: late, 0: OVERLAPPED})
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    processes = [event["args"]["name"] for event in events_of(trace, "M") if event["name"] == "process_name"]
    assert processes == ["rank 0", "rank 1"]
    starts = {event["pid"]: event["ts"] for event in reversed(events_of(trace, "X")) if event["cat"] == "compute"}
    assert starts == {0: 0.0, 1: 3_000_000.0}


# --------------------------------------------------------------------------------------------------------- html


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def write_and_read(tmp_path: Path, *args: Any, **options: Any) -> str:
    path = tmp_path / "trace.html"
    write_html(path, *args, **options)
    return path.read_text(encoding="utf-8")


def test_page_loads_nothing(tmp_path: Path) -> None:
    page = write_and_read(tmp_path, {0: OVERLAPPED})
    assert not re.search(r"https?:|//[a-z]|\bsrc=|<link|@import|url\(|fetch\(|import\(", page)
    assert "{{" not in page, "a slot was not filled"
    assert "prefers-color-scheme: dark" in page


def test_page_shows_what_hides_what(tmp_path: Path) -> None:
    data = page_data(write_and_read(tmp_path, {0: UNSPLIT_STEP + OVERLAPPED, 1: OVERLAPPED}))
    assert [(step["step"], step["lanes"], len(step["ranks"])) for step in data["steps"]] == [(1, 0, 1), (2, 2, 2)]
    assert data["first"] == 1, "the overlapped step comes up first"

    overlapped = data["steps"][1]
    rank = overlapped["ranks"][0]
    second = 1_000_000
    assert overlapped["duration"] == 10 * second
    assert [row["name"] for row in rank["rows"]] == ["lane 0", "lane 1", "link", "link (2)"]
    assert [(block["kind"], block["at"]) for block in rank["rows"][0]["blocks"]] == [
        ("compute", [0, 2 * second]),
        ("wait", [5 * second, 6 * second]),
        ("compute", [6 * second, 9 * second]),
    ]
    (transfer,) = rank["rows"][2]["blocks"]
    assert transfer["hidden"] == [[2 * second, 5 * second]], "not while lane 0 waits"
    assert transfer["bytes"] == 4096
    assert rank["summary"] == {
        "compute": 9 * second,
        "communication": 5 * second,
        "hidden": 4 * second,
        "exposed": second,
        "wall": 10 * second,
        "handoff": 0,
        "idle": 0,
    }


def test_page_cuts_a_compute_span_where_it_waits(tmp_path: Path) -> None:
    data = page_data(write_and_read(tmp_path, {0: UNSPLIT_STEP}))
    unsplit, link = data["steps"][0]["ranks"][0]["rows"]
    second = 1_000_000
    assert [(block["kind"], block["at"]) for block in unsplit["blocks"]] == [
        ("compute", [0, 4 * second]),
        ("compute", [7 * second, 9 * second]),
        ("wait", [4 * second, 7 * second]),
    ]
    assert link["blocks"][0]["hidden"] == [[3 * second, 4 * second]]


def test_page_names_blocks_by_their_stage_and_says_what_ended_it(tmp_path: Path) -> None:
    data = page_data(write_and_read(tmp_path, {0: OVERLAPPED}))
    rows = {row["name"]: row["blocks"] for row in data["steps"][0]["ranks"][0]["rows"]}
    assert [(block["name"], block["until"]) for block in rows["lane 0"]] == [
        ("start", "dispatch"),
        ("dispatch", "dispatch"),  # the wait
        ("after dispatch", "end"),
    ]
    assert [block["name"] for block in rows["link"]] == ["dispatch"]


def test_page_says_of_a_step_what_the_table_says(tmp_path: Path) -> None:
    """The ranks differ: the headline is of all of them, also of one that had nothing to do."""
    notes = {
        0: [StepNote(2, "decode", 3, "s", reason="peer_declined", declined_by=1)],
        1: [StepNote(2, "prefill", 9, "s", reason="kv_order", declined_by=1)],
        2: [StepNote(2, "decode", 0, "s", reason="peer_declined", declined_by=1)],
    }
    data = page_data(write_and_read(tmp_path, {0: OVERLAPPED, 1: OVERLAPPED, 2: []}, notes=notes))
    (step,) = data["steps"]
    assert step["note"] == "prefill, 3-9 tokens, unsplit (kv_order)"
    assert [rank["rank"] for rank in step["ranks"]] == [0, 1, 2]
    assert [rank["summary"]["wall"] for rank in step["ranks"]] == [10_000_000, 10_000_000, 0]


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's script runs in a browser, or in node")
def test_page_shows_several_steps_on_one_time_axis(tmp_path: Path) -> None:
    page = write_and_read(tmp_path, {0: UNSPLIT_STEP + OVERLAPPED, 1: OVERLAPPED})
    assert [step["start"] for step in page_data(page)["steps"]] == [0, 10_000_000]
    functions = re.search(r"^function joined\(.*?^}$", page, re.DOTALL | re.MULTILINE)
    split = re.search(r"^const split = .*$", page, re.MULTILINE)
    script = f"{split[0]}\n{functions[0]}\nconsole.log(JSON.stringify(joined({json.dumps(page_data(page)['steps'])})))"
    both = json.loads(subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True).stdout)
    assert (both["title"], both["duration"]) == ("Steps 1 to 2", 20_000_000)
    assert both["begins"] == [{"at": 0, "text": "step 1"}, {"at": 10_000_000, "text": "step 2"}]
    assert [rank["rank"] for rank in both["ranks"]] == [0, 1]
    rows = {row["name"]: row for row in both["ranks"][0]["rows"]}
    assert list(rows) == ["unsplit", "lane 0", "lane 1", "link", "link (2)"]
    assert [block["at"] for block in rows["link"]["blocks"]] == [[3e6, 7e6], [12e6, 16e6]]
    assert rows["link"]["blocks"][1]["hidden"] == [[12e6, 15e6]]
    assert both["ranks"][0]["summary"]["wall"] == 19_000_000


def test_page_survives_any_text(tmp_path: Path) -> None:
    nasty = "</script><b>&\"' {{data}} {{title}} \u2028"
    spans = [Span(COMPUTE, nasty, UNSPLIT, 1.0, 2.0, 1)]
    page = write_and_read(tmp_path, {0: spans}, title=nasty, summary={nasty: nasty})
    assert page_data(page)["steps"][0]["ranks"][0]["rows"][0]["blocks"][0]["name"] == nasty
    assert page.count("</script>") == 2
    assert page.count(html.escape(nasty)) == 4, "title twice, the fact's name and value"


def test_page_shows_the_step_that_is_asked_for(tmp_path: Path) -> None:
    traces = {0: UNSPLIT_STEP + OVERLAPPED}
    assert page_data(write_and_read(tmp_path, traces, step=1))["first"] == 0
    with pytest.raises(ConfigError, match="step 7 is not in the trace, which has steps 1 to 2"):
        write_and_read(tmp_path, traces, step=7)
    with pytest.raises(ConfigError, match="which has no steps"):
        write_and_read(tmp_path, {0: []}, step=1)


def test_page_prefers_the_overlapped_step_of_median_length(tmp_path: Path) -> None:
    lengths = [9, 4, 1, 5, 3]
    spans = [
        Span(COMPUTE, "end", UNSPLIT if length == 4 else lane, 10.0 * step, 10.0 * step + length, step)
        for step, length in enumerate(lengths, start=1)
        for lane in (0, 1)
    ]
    assert page_data(write_and_read(tmp_path, {0: spans}))["first"] == lengths.index(5)


def test_page_of_a_long_trace_has_every_so_manieth_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ubatch.trace.page.MOST_SPANS", 10)
    spans = [Span(COMPUTE, "end", 0, float(step), step + 0.5, step) for step in range(1, 26)]
    data = page_data(write_and_read(tmp_path, {0: spans}, step=5))
    assert [step["step"] for step in data["steps"]] == [1, 4, 5, 7, 10, 13, 16, 19, 22, 25]
    assert (data["steps_in_all"], data["steps"][data["first"]]["step"]) == (25, 5)


def test_page_has_remarks_and_a_table_of_any_text(tmp_path: Path) -> None:
    nasty = "<b>&\"'</b>"
    page = write_and_read(tmp_path, {0: OVERLAPPED}, remarks=[Remark("hint", nasty)], table=[["head"], [nasty]])
    assert f'<li class="hint"><b>hint</b> {html.escape(nasty)}</li>' in page
    assert f"<thead><tr><th>head</th></tr></thead><tbody><tr><td>{html.escape(nasty)}</td></tr></tbody>" in page
    assert '<ul class="remarks"></ul>' in write_and_read(tmp_path, {0: OVERLAPPED})


def test_page_without_a_step(tmp_path: Path) -> None:
    assert page_data(write_and_read(tmp_path, {})) == {"steps": [], "first": 0, "steps_in_all": 0}
