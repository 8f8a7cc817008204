"""Which steps are traced, and what hand-offs cost according to a trace."""

import json
import resource
import tempfile
from pathlib import Path

import pytest
from fake_device import DECLINED, ENGAGED, FakeLink, make_core

from model_runner import SamplingParams
from serving.engine.options import EngineOptions
from serving.engine.rank.process import Engine
from serving.engine.rank.tracing import StepTracer
from serving.engine.wire.messages import ProfileWritten, Shutdown, StartProfile, StopProfile
from serving.requests import RequestInput
from ubatch import Span, SpanKind, summarise
from ubatch.trace.file import read_chrome
from ubatch.trace.spans import StepNote, current_trace


def spans_of_a_step(step: int = 1) -> list[Span]:
    """Lane 0 computes, hands on; lane 1 waits for a transfer; lane 0 again. Gaps of 2 and 3 ms between lanes."""
    compute, wait, transfer = SpanKind.COMPUTE, SpanKind.WAIT, SpanKind.TRANSFER
    ms = 1e-3
    return [
        Span(compute, "attention", 0, 0 * ms, 10 * ms, step),
        Span(transfer, "dispatch", 0, 8 * ms, 20 * ms, step),
        Span(compute, "attention", 1, 12 * ms, 15 * ms, step),
        Span(wait, "dispatch", 1, 15 * ms, 20 * ms, step),
        Span(compute, "experts", 1, 20 * ms, 22 * ms, step),
        Span(compute, "experts", 0, 25 * ms, 30 * ms, step),
    ]


def record(tracer: StepTracer, steps: int, first: int = 1) -> int:
    """Run so many steps; returns how many of them were traced."""
    traced = 0
    for step in range(first, first + steps):
        with tracer.step() as trace:
            if trace is not None:
                trace.step = step
                trace.spans += spans_of_a_step(step)
                traced += 1
    return traced


def test_neither_the_gap_between_steps_nor_what_runs_outside_lanes_is_a_hand_off() -> None:
    between = [Span(SpanKind.COMPUTE, "end", lane, lane * 1.0, lane + 0.5, 1 + lane) for lane in (0, 1)]
    outside = [Span(SpanKind.WAIT, "vote", -1, 0.6, 0.9, 1)]
    assert summarise(between + outside).handoff_s == 0.0


def test_every_32nd_overlapped_step_is_measured() -> None:
    core, device, _ = make_core(overlap=False)
    steps = 100
    decisions = iter([ENGAGED, DECLINED] * steps)
    device.decide = lambda: next(decisions)
    traced: list[int] = []

    def on_launch() -> None:
        trace = current_trace()
        if trace is not None:
            traced.append(len(traced))
            trace.spans += spans_of_a_step()

    device.on_launch = on_launch
    core.add(RequestInput("r", [1, 2, 3], SamplingParams(max_tokens=2 * steps, ignore_eos=True)))
    while core.has_work:
        core.step()
    statistics = core.statistics()
    assert statistics.steps["decode/engaged"] == steps - 1  # the first engaged step is the prefill
    assert statistics.traced_steps == steps // 32
    assert statistics.communication_s == pytest.approx(statistics.traced_steps * 12e-3)
    assert statistics.exposed_s == pytest.approx(statistics.traced_steps * 5e-3)
    assert statistics.hidden_s == pytest.approx(statistics.traced_steps * 5e-3)
    assert statistics.handoff_wait_s == pytest.approx(statistics.traced_steps * 5e-3)
    assert len(traced) <= 2 * statistics.traced_steps  # a step that was traced in vain, as it did not overlap


def test_where_spans_do_not_measure_there_are_profiles_only(tmp_path: Path) -> None:
    tracer = StepTracer(measures=False)
    for _ in range(100):
        with tracer.step() as trace:
            assert trace is None
        tracer.engaged(trace)
    assert tracer.total.traced_steps == 0
    tracer.start_profile()
    with tracer.step() as trace:
        assert trace is not None
    assert tracer.stop_profile(tmp_path / "rank-0.json", 0) is None
    assert not read_chrome(tmp_path / "rank-0.json")[0].measures, "whoever reads it must know"


def test_a_profile_has_every_step(tmp_path: Path) -> None:
    tracer = StepTracer()
    path = tmp_path / "new" / "rank-1.json"
    assert tracer.stop_profile(path, 1) == "no profile was started."
    tracer.start_profile()
    for step in (1, 2):
        with tracer.step() as trace:
            assert current_trace() is trace is not None
            trace.spans += spans_of_a_step(step)
            trace.notes.append(StepNote(step, "decode", 8, "mlp_shared_overlap", lanes=2))
        tracer.engaged(trace)
    assert tracer.stop_profile(path, 1) is None
    (read,) = read_chrome(path)
    assert [(note.step, note.tokens) for note in read.notes] == [(1, 8), (2, 8)]
    assert read.measures
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"lane 0", "lane 1", "link"} <= names
    assert {event["args"].get("step") for event in events if event["ph"] == "X"} == {1, 2}
    assert tracer.total.traced_steps == 0
    with tracer.step() as trace:
        assert trace is None


@pytest.mark.parametrize("end", ["stop", "start"])
def test_a_profile_that_ends_while_its_step_is_in_flight_is_no_statistic(tmp_path: Path, end: str) -> None:
    tracer = StepTracer()
    tracer.start_profile()
    for step in range(1, 41):
        with tracer.step() as trace:
            trace.spans += spans_of_a_step(step)
        if step < 40:
            tracer.engaged(trace)
    if end == "stop":
        assert tracer.stop_profile(tmp_path / "rank-0.json", 0) is None
    else:
        tracer.start_profile()
    tracer.engaged(trace)
    assert tracer.total.traced_steps == 0


def test_a_forgotten_profile_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.engine.rank.tracing.MOST_SPANS", 10)
    tracer = StepTracer()
    tracer.start_profile()
    assert record(tracer, 5) == 2


@pytest.mark.parametrize(
    ("name", "why"), [("file/rank-0.json", "cannot write"), ("there", "File exists"), ("link", "File exists")]
)
def test_a_profile_that_cannot_be_written_says_why_and_replaces_nothing(name: str, why: str, tmp_path: Path) -> None:
    for file in ("file", "there"):
        (tmp_path / file).write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    tracer = StepTracer()
    tracer.start_profile()
    assert why in str(tracer.stop_profile(tmp_path / name, 0))
    assert (tmp_path / "there").read_text() == "mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link", "there"]


def test_a_full_disk_says_what_was_lost_and_leaves_no_cut_file(tmp_path: Path) -> None:
    path, tracer = tmp_path / "rank-0.json", StepTracer()

    def profile(steps: int) -> str | None:
        tracer.start_profile()
        assert record(tracer, steps) == steps
        return tracer.stop_profile(path, 0)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert profile(1) is None
    written = path.read_text()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        error = profile(100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error == f"cannot write {path}: File too large; the 100 steps that were recorded are lost."
    assert [each.name for each in tmp_path.iterdir()] == ["rank-0.json"]
    assert path.read_text() == written


@pytest.mark.parametrize("configured", [True, False])
def test_no_message_leads_a_profile_out_of_its_folder(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets hold of a rank's socket must not choose where files are written."""
    folder, elsewhere = tmp_path / "profiles", tmp_path / "elsewhere"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = (str(elsewhere / "x"), "../elsewhere/y", "..")
    link = FakeLink(*(message for name in names for message in (StartProfile(), StopProfile(name))), Shutdown())
    core, _, _ = make_core(overlap=False)
    options = EngineOptions(Path("model"), profile_folder=folder if configured else None)
    Engine(options, 0, core, None, link).serve()
    written = [message for message in link.heard if isinstance(message, ProfileWritten)]
    assert [each.error for each in written] == [None] * 3
    assert not elsewhere.exists()
    for each in written:
        parent = Path(each.path).parent
        assert parent == folder if configured else parent.name.startswith("ubatch-profile-")
        assert Path(each.path).exists()
