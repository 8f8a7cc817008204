"""`ubatch trace`: from a server, from files, from a run; what it writes, what it says, and what it refuses."""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from checkpoints import COMMON, GROUPED, make_checkpoint
from repository import TINY_MOE

from model_runner import SamplingParams
from serving.cli import main
from serving.options import Settings
from serving.workbench.tracing import offline, trace
from serving.workbench.tracing.offline import OfflineRun
from ubatch.trace.export import Clock, write_chrome
from ubatch.trace.file import RankTrace, read_chrome
from ubatch.trace.spans import UNSPLIT, Span, SpanKind, StepNote

pytestmark = pytest.mark.long

TINY = str(TINY_MOE)
COMPUTE, WAIT, TRANSFER = SpanKind.COMPUTE, SpanKind.WAIT, SpanKind.TRANSFER
KEY = "secret"


def write_rank(path: Path, rank: int, steps: int = 6) -> Path:
    """A rank's profile: steps in two lanes, and as many of the same size unsplit that take a fifth longer."""
    spans, notes = [], []
    for step in range(1, 2 * steps + 1):
        start, split = 100.0 + step, step % 2 == 0
        if split:
            spans += [
                Span(COMPUTE, "dispatch.0", 0, start, start + 0.1, step),
                Span(COMPUTE, "dispatch", 0, start + 0.1, start + 0.2, step),
                Span(COMPUTE, "end", 1, start + 0.21, start + 0.3, step),
                Span(COMPUTE, "dispatch", 0, start + 0.31, start + 0.32, step),
                Span(WAIT, "dispatch", 0, start + 0.32, start + 0.35, step),
                Span(COMPUTE, "end", 0, start + 0.35, start + 0.4, step),
                Span(TRANSFER, "dispatch", 0, start + 0.1, start + 0.35, step, 4096),
            ]
        else:
            spans.append(Span(COMPUTE, "unsplit", UNSPLIT, start, start + 0.5, step))
        end = start + (0.4 if split else 0.5)
        reason = None if split else "peer_declined"
        notes.append(StepNote(step, "decode", 64, "s", 1 + split, 1, reason, None if split else 7, start, end))
    return write_ranks(path, [RankTrace(rank, tuple(spans), tuple(notes), Clock("here", 0.0))])


def write_ranks(path: Path, ranks: Sequence[RankTrace]) -> Path:
    write_chrome(path, {rank.rank: rank.spans for rank in ranks}, notes={rank.rank: rank.notes for rank in ranks})
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(write_rank(tmp_path / f"rank-{rank}.json", rank)) for rank in (0, 1)]


class Recorder(BaseHTTPRequestHandler):
    """A server's two paths; `answers` is what they give."""

    answers: ClassVar[Mapping[str, tuple[int, Any]]] = {}
    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.asked.append(self.path)
        allowed = self.headers.get("Authorization") == f"Bearer {KEY}"
        status, body = self.answers[self.path] if allowed else (401, {"error": "no key"})
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url(files: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    answers = {"/start_profile": (200, {"status": "profiling"}), "/stop_profile": (200, {"files": files})}
    monkeypatch.setattr(Recorder, "answers", answers)
    monkeypatch.setattr(Recorder, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# ----------------------------------------------------------------------------------------------------------- sources


def test_files_of_all_ranks_become_one_timeline(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace"
    assert main(["trace", "--files", *files, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "fact: 6 of 12 steps overlapped (6 of 12 decode)." in printed
    assert "good: decode steps of 64-127 tokens gain 20% (median of 6 steps, 400.00 ms, against 6 serial" in printed
    assert "hint: 6 of 12 decode steps (50%) ran unsplit because of peer_declined" in printed
    row = re.search(r"decode 2 lanes +6 +64 +400\.00 +(\d+)% +7\.5% +5\.0% +0\.0%", printed)
    assert row, printed
    assert int(row[1]) == 80  # of 0.25 s on the link, 0.2 s under compute

    assert [(rank.rank, len(rank.notes)) for rank in read_chrome(out / "trace.json")] == [(0, 12), (1, 12)]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ranks"] == "2"
    assert summary["groups"][0]["steps"] == 6
    assert {"kind": "good", "figures": {"change": pytest.approx(-0.2), "steps": 6}}.items() <= next(
        each for each in summary["findings"] if each["kind"] == "good"
    ).items()


def test_the_page_says_it_too_and_loads_nothing(files: list[str], tmp_path: Path) -> None:
    assert main(["trace", "--files", *files, "--out", str(tmp_path / "trace")]) == 0
    page = (tmp_path / "trace" / "trace.html").read_text()
    assert '<li class="good"><b>good</b> decode steps of 64-127 tokens gain 20%' in page
    assert "<td>decode 2 lanes</td><td>6</td><td>64</td><td>400.00</td>" in page
    assert not re.search(r"https?:|//[a-z]|\bsrc=|<link|@import|url\(|fetch\(|import\(", page)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(found[1])
    own = [rank["summary"] for step in data["steps"] for rank in step["ranks"] if step["note"].endswith("2 lanes")]
    hidden, sent = (sum(each[name] for each in own) for name in ("hidden", "communication"))
    assert f"<td>400.00</td><td>{hidden / sent:.0%}</td>" in page, "of all ranks, as in the table"
    shown = data["steps"][data["first"]]
    assert shown["note"] == "decode, 64 tokens, 2 lanes"
    rows = {row["name"]: row["points"] for row in shown["ranks"][1]["rows"]}
    (mark,) = rows["lane 0"]
    assert (mark["name"], mark["at"], mark["to"], mark["ran_at"]) == ("dispatch", 200_000, 1, pytest.approx(210_000))
    assert rows["link"] == rows["lane 1"] == []


@pytest.mark.parametrize("name", ["--url", "--base-url"])
def test_a_server_records_and_is_told_to_stop(
    name: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace"
    words = ["trace", name, f"{url}/v1/", "--seconds", "0.01", "--api-key", KEY, "--out", str(out)]
    assert main(words) == 0
    assert Recorder.asked == ["/start_profile", "/stop_profile"]
    assert "6 of 12 steps overlapped" in capsys.readouterr().out
    assert len(read_chrome(out / "trace.json")) == 2


def test_ctrl_c_stops_the_recording(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trace.time, "sleep", interrupt)
    assert main(["trace", "--url", url, "--api-key", KEY, "--out", str(tmp_path / "trace")]) == 130
    assert Recorder.asked == ["/start_profile", "/stop_profile"]
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/start_profile", (500, {"error": "the engine is dead"}), "answers 500 to /start_profile: .*engine is dead"),
        ("/stop_profile", (409, {"error": "no profile"}), "answers 409 to /stop_profile"),
        ("/stop_profile", (200, {"files": ["/far/away/rank-0.json"]}), "is not here. Copy the files .* --files"),
    ],
)
def test_a_server_that_gives_no_trace(
    url: str,
    path: str,
    answer: tuple[int, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Recorder, "answers", {**Recorder.answers, path: answer})
    assert main(["trace", "--url", url, "--seconds", "0.01", "--api-key", KEY]) in (1, 2)
    assert re.search(message, capsys.readouterr().err)


def test_a_server_that_is_not_there_or_wants_a_key(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--url", url, "--seconds", "0.01"]) == 1
    assert "answers 401" in capsys.readouterr().err
    for wrong in ("http://127.0.0.1:1", "nonsense", "http://["):
        assert main(["trace", "--url", wrong]) == 1
        assert "gives no answer that can be used" in capsys.readouterr().err


def test_an_idle_server_gives_nothing_to_see(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.json"
    write_chrome(empty, {0: []})
    monkeypatch.setattr(Recorder, "answers", {**Recorder.answers, "/stop_profile": (200, {"files": [str(empty)]})})
    out = tmp_path / "trace"
    assert main(["trace", "--url", url, "--seconds", "0.01", "--api-key", KEY, "--out", str(out)]) == 1
    assert "no step was recorded: send requests while it records" in capsys.readouterr().out
    assert not out.exists()


def test_a_folder_that_cannot_be_written(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--files", *files, "--out", str(tmp_path / "rank-0.json" / "in")]) == 2
    assert "Choose another folder with --out" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- a run here


def test_two_ranks_run_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also that a real wrapper notes its steps, and that the ranks' steps fit together."""
    out = tmp_path / "trace"
    serial = write_rank(tmp_path / "serial.json", 0)
    flags = ["--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo", "--max-tokens", "5"]
    flags += ["--emulated-link", "20", "50", "--serial", str(serial)]
    thresholds = ["--dbo-decode-token-threshold", "2", "--dbo-prefill-token-threshold", "4096"]
    prompts = ["--prompt", "def main(", "import os", "class Server:", "for i in"]
    assert main(["trace", TINY, *prompts, *flags, *thresholds, "--out", str(out)]) == 0
    printed = capfd.readouterr().out
    assert "def main(self" in printed
    assert "fact: 4 of 5 steps overlapped (4 of 4 decode, 0 of 1 prefill)." in printed
    ranks = read_chrome(out / "trace.json")
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert [note.step for note in rank.notes] == [1, 2, 3, 4, 5]
        first, *others = rank.notes
        assert (first.mode, first.reason, first.lanes) == ("prefill", "below_prefill_threshold", 1)
        assert {(note.mode, note.tokens, note.reason, note.lanes) for note in others} == {("decode", 2, None, 2)}
        for note in rank.notes:
            spans = [span for span in rank.spans if span.step == note.step]
            assert spans
            assert all(note.start <= span.start <= span.end <= note.end for span in spans)
    page = (out / "trace.html").read_text()
    assert '"name":"dispatch","at":' in page, "points are on the page"


# ------------------------------------------------------------------------------------------------ a run: what is chosen


def run_of(*words: str, model: str = TINY) -> OfflineRun:
    run = trace.read("ubatch trace", "", [model, *words]).run
    assert run is not None
    return run


def chosen(run: OfflineRun) -> list[str]:
    return [line.partition(":")[0].partition(",")[0] for line in run.choices]


THRESHOLDS = ("--dbo-decode-token-threshold 32", "--dbo-prefill-token-threshold 64")


def test_with_its_defaults_steps_overlap_on_two_ranks() -> None:
    run = run_of("--prompt", "def main(", "import os")
    s = run.command.settings
    assert (s["enable_dbo"], s["data_parallel_size"], s["enable_expert_parallel"]) == (True, 2, True)
    ranks = ["--data-parallel-size 2", "--enable-expert-parallel"]
    assert chosen(run) == ["--enable-dbo", *THRESHOLDS, *ranks, "64 prompts"]
    assert all(": " in line or ", " in line for line in run.choices), "with the reason"
    assert run.link
    prompts = run.command.prompts
    assert (len(prompts), len(run.command.params), run.shown) == (64, 64, 2)
    assert prompts[:4] == ("def main(", "import os", "def main(", "import os")
    assert s["max_num_seqs"] == 32 == s["dbo_decode_token_threshold"], "a rank decodes as many as are split"


def test_explicit_settings_win(tmp_path: Path) -> None:
    file = tmp_path / "dbo.yaml"
    file.write_text("dbo-decode-token-threshold: 4\nemulated-link: [20, 50]\n")
    run = run_of("--prompt", "a", "b", "--config", str(file), "--data-parallel-size", "4", "--enable-expert-parallel")
    assert chosen(run) == ["--enable-dbo", THRESHOLDS[1], "16 prompts"]
    assert run.command.settings["emulated_link"] == (20, 50)
    assert not run.link
    enough = run_of("--prompt", *"abcdefgh", "--dbo-decode-token-threshold", "4", "--max-num-seqs", "3")
    assert len(enough.command.prompts) == enough.shown == 8
    assert enough.command.settings["max_num_seqs"] == 3
    assert "64 prompts" not in chosen(enough)
    own = run_of("--prompt", "a", "--no-enable-expert-parallel", "--data-parallel-size", "2")
    assert chosen(own) == ["--enable-dbo", *THRESHOLDS, "64 prompts"]
    assert not own.link, "nothing travels"


def test_without_overlap_nothing_is_chosen() -> None:
    run = run_of("--prompt", "a", "--no-enable-dbo")
    assert (run.choices, run.link, run.overlaps, len(run.command.prompts)) == ((), False, False, 1)
    assert run.command.settings["data_parallel_size"] == 1


def test_a_dense_model_shares_its_heads(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "Qwen3", **{**COMMON, **GROUPED})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).write_bytes((TINY_MOE / file).read_bytes())
    run = run_of("--prompt", "a", model=str(model))
    assert chosen(run) == ["--enable-dbo", *THRESHOLDS, "--tensor-parallel-size 2", "32 prompts"]
    assert run.link


# ------------------------------------------------------------------------------------------------------------- arms


def recorded(tokens: int, *, overlapped: bool, seconds: float) -> list[RankTrace]:
    """Two ranks of four decode steps that compute half of their time and send 1 MB each."""
    ranks = []
    for rank in (0, 1):
        spans, notes = [], []
        for number in range(1, 5):
            start, end = 10.0 * number, 10.0 * number + seconds
            middle = (start + end) / 2
            spans.append(Span(COMPUTE, "unsplit", UNSPLIT, start, middle, number))
            spans.append(Span(TRANSFER, "dispatch", UNSPLIT, middle, end, number, 2_000_000))
            reason = None if overlapped else "disabled"
            notes.append(StepNote(number, "decode", tokens, "s", 1 + overlapped, 1, reason, None, start, end))
        ranks.append(RankTrace(rank, tuple(spans), tuple(notes), Clock("here", 0.0)))
    return ranks


def test_the_arms_are_a_link_a_serial_run_and_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms: list[tuple[Any, ...]] = []

    def traces(s: Settings, prompts: Sequence[str], params: Sequence[SamplingParams], *, shown: int = 0) -> Any:
        arms.append((s["enable_dbo"], s["emulated_link"], len(prompts), params[0].max_tokens, shown))
        return recorded(32, overlapped=s["enable_dbo"], seconds=2.0 if s["enable_dbo"] else 4.0)

    monkeypatch.setattr(offline, "_traces", traces)
    assert main(["trace", TINY, "--prompt", "a", "--max-tokens", "20", "--out", str(tmp_path / "out")]) == 0
    link = (20.0, 0.5)  # 1 MB out in the two seconds that a step computes
    assert arms == [(False, None, 64, 8, 0), (False, link, 64, 20, 0), (True, link, 64, 20, 1)]
    printed = capsys.readouterr().out
    for choice in ("--enable-dbo: ", "--data-parallel-size 2: ", "64 prompts", "--emulated-link 20 0.5: "):
        assert f"\nchose {choice}" in f"\n{printed}"
    assert "good: decode steps of 32-63 tokens gain 50% (median of 4 steps, 2000.00 ms, against 4 serial" in printed

    arms.clear()
    words = ["--emulated-link", "1", "2", "--serial", str(tmp_path / "serial.json"), "--out", str(tmp_path / "out")]
    write_ranks(tmp_path / "serial.json", recorded(32, overlapped=False, seconds=1.0))
    assert main(["trace", TINY, "--prompt", "a", *words]) == 0
    assert arms == [(True, (1.0, 2.0), 64, 64, 1)], "the serial steps are there already"
    assert "problem: decode steps lose 100% at every size seen" in capsys.readouterr().out


def test_a_serial_trace_without_serial_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_ranks(tmp_path / "trace.json", recorded(32, overlapped=True, seconds=1.0))
    assert main(["trace", "--files", str(file), "--serial", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "it has no step without overlap. Record it without --enable-dbo." in capsys.readouterr().err
