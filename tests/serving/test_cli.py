"""The `ubatch` command as a user types it, also where its standard streams are closed, full, or read by nobody."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median

import httpx
import pytest
from calls import line_of
from checkpoints import make_qwen3_moe_checkpoint
from pydantic import ConfigDict
from repository import ROOT, TINY_MOE
from served import wait_until

import serving
from model_runner import RandomDeepseekV3, make_random_checkpoint
from ranks import free_port
from serving.arguments.fields import Group, WrongValue
from serving.cli import COMMANDS, main
from serving.progress import progress
from serving.workbench.bench.statistics import bootstrap, paired, ratio_of_sums
from serving.workbench.bench.step_setting import StepOptions, model_folder
from ubatch import SCHEDULES, __version__

pytestmark = pytest.mark.long

TINY = str(TINY_MOE)


@pytest.mark.parametrize("words", [[], ["--help"], ["bench"], ["bench", "--help"]])
def test_usage_lists_the_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = main(words)
    captured = capsys.readouterr()
    assert status == (0 if words else 2)
    for name in COMMANDS:
        assert name in captured.out + captured.err


def test_as_a_module_it_is_imported_once() -> None:
    words = [sys.executable, "-W", "error::RuntimeWarning", "-m", "serving.cli", "--help"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert serving.main is main


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As in `ubatch bench --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "serving.cli", "bench", "--help"]
    with open(writer, "wb") as closed:
        ran = subprocess.run(words, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, serving.cli; serving.cli.main(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generat"]) == 2
    assert "did you mean 'generate'" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [None, "80", "200"])
@pytest.mark.parametrize("name", ["", "bench", *COMMANDS])
def test_help_fits_80_columns(
    name: str, columns: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a pipe has no columns, and says what the command does."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    if name in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([*name.split(), "--help"])
        assert ended.value.code == 0
    else:
        assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert COMMANDS.get(name, ("", "usage"))[1].split(",")[0] in " ".join(shown.split())


def test_every_default_is_a_value_that_its_flag_takes() -> None:
    """Also where an option comes from one of several bases, whose configs pydantic merges."""
    for module, _ in COMMANDS.values():
        importlib.import_module(module)
    groups = _below(Group)
    assert len(groups) > len(COMMANDS)
    for group in groups:
        checked = type(group.__name__, (group,), {"model_config": ConfigDict(validate_default=True)})
        try:
            checked.model_validate({})
        except WrongValue as wrong:
            assert wrong.missing, f"{group.__module__}.{group.__name__}: {wrong}"  # noqa: PT017 - most raise nothing


def _below(kind: type[Group]) -> list[type[Group]]:
    return [each for below in kind.__subclasses__() for each in (below, *_below(below))]


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ubatch {__version__}\n"


WRONG = [
    *((*name.split(), "--no-such-flag") for name in COMMANDS),
    *((*name.split(), "a", "b") for name in COMMANDS),
    *((*name.split(), "--blocks", "0") for name in COMMANDS if "serve" not in name),
    ("simulate", "--ep", "0"),
    ("simulate", "--skew", "nan"),
    ("simulate", "--mode", "decoding"),
    ("simulate", "--model", "nowhere"),
    ("bench", "abuse"),
    ("bench", "faults"),
    ("bench", "faults", "nowhere"),
    ("bench", "abuse", "nowhere"),
    ("bench", "auto", "nowhere"),
    ("bench", "fairness", "nowhere", "--streams", "0"),
    ("bench", "speculation", "--model", "nowhere"),
    ("bench", "speculation", "--batches", "0"),
    ("bench", "engine", "--only", "everything"),
    ("bench", "peers", "nowhere", "--vllm", sys.executable),
    ("bench", "overlap", "--schedule", "mlp"),
    ("bench", "overlap", "--all2all-backend", "mpi"),
    ("bench", "overlap", "--ratios", "half"),
    ("bench", "serve", "--request-rate", "nan"),
    ("bench", "serve", "--json"),
    ("tune", TINY, "--modes", "decoding"),
    ("generate", TINY, "--prompt", "x", "--temperature", "hot"),
]


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_call_is_one_plain_line(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    line = line_of(words, capfd)
    for internal in ("Input should", "Error(", "Traceback", "pydantic", "[type=", "╭", "[/"):
        assert internal not in line


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["attention", "moe"])
@pytest.mark.parametrize("code", ["from serving.cli import main; main(['serve', 'x'])", "import model_runner"])
def test_another_package_of_our_name_is_named(name: str, code: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("import tensorflow\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert f"`import {name}` finds another package, {tmp_path / name / '__init__.py'}, in place of ubatch's own" in last
    assert "PYTHONPATH" in last
    assert "tensorflow" not in ran.stderr


def test_what_the_shell_completes(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    with script.open("w") as file, redirect_stdout(file):
        assert main(["completion"]) == 0
    for typed, offered in {
        "s": "serve simulate",
        "bench f": "faults fairness",
        "serve x --enable-d": "--enable-dbo",
        "serve x --no-enable-d": "--no-enable-dbo",
        "bench fairness --in": "--input-len --in-flight",
    }.items():
        line = f"COMP_WORDS=(ubatch {typed}); COMP_CWORD={len(typed.split())}; _ubatch; echo ${{COMPREPLY[@]}}"
        ran = subprocess.run(["bash", "-c", f". {script}; {line}"], capture_output=True, text=True, timeout=60)
        assert ran.stdout.split() == offered.split(), typed


def test_progress_in_a_pipe_is_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("serving.progress._LINES_EVERY_S", 0.0)
    assert list(progress(range(3), desc="rounds")) == [0, 1, 2]
    error = capsys.readouterr().err
    assert "\r" not in error
    assert [line.split()[1][:4] for line in error.splitlines()] == ["0%|", "33%|", "67%|", "100%", "100%"]
    list(progress(range(3), show=False))
    assert capsys.readouterr().err == ""


def test_bench_handoff_writes_what_a_script_reads(tmp_path: Path) -> None:
    file = tmp_path / "handoff.json"
    assert main(["bench", "handoff", "--blocks", "2", "--handoffs", "100", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    for name in ("noop_ns", "per_switch_us", "event_ring_us", "ratio_to_event"):
        assert results[name]["low"] <= results[name]["median"] <= results[name]["high"]
        assert math.isfinite(results[name]["median"])
    assert set(results["arms_us"]) == {"pinned", "unpinned", "busy"}
    assert all(len(values) == 2 for arms in results["arms_us"].values() for values in arms.values())


def test_bench_lanes(tmp_path: Path) -> None:
    file = tmp_path / "lanes.json"
    sizes = ["--tokens", "32", "--layers", "2", "--hidden-size", "32", "--experts", "4", "--intermediate-size", "16"]
    assert main(["bench", "lanes", *sizes, "--top-k", "2", "--blocks", "2", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert results["handoffs"] == 2 * 2 * 2 + 1  # two points a layer and lane, and the end of lane 0
    assert set(results["arms_ms"]) == {"back_to_back", "lanes"}


@pytest.mark.slow
def test_bench_overlap(tmp_path: Path) -> None:
    model = make_qwen3_moe_checkpoint(tmp_path / "model")
    file = tmp_path / "overlap.json"
    flags = ["--model", str(model), "--sequences", "4", "--sequence-length", "16", "--lanes", "2", "3"]
    status = main(["bench", "overlap", *flags, "--ratios", "1", "8", "--blocks", "2", "--json", str(file)])
    assert status in (0, 1)  # 1: void, which two short blocks may well be
    results = json.loads(file.read_text())
    for name in ("efficiency", "schedule_efficiency", "hidden", "speedup"):
        assert results[name]["low"] <= results[name]["median"] <= results[name]["high"]
    arms = {"compute_unsplit", "serial_unsplit"}
    arms |= {
        f"{arm}_{n}"
        for n in (2, 3)
        for arm in ("serial", "split", "overlapped", "split_compute", "own_compute", "ideal", "communication")
    }
    assert set(results["arms_ms"]) == arms
    assert [link["ratio"] for link in results["links"]] == [1.0, 8.0]
    slow = results["links"][1]
    for n in ("2", "3"):  # link-bound: the step cannot be shorter than the link was busy
        busy, wall = slow["arms_ms"][f"communication_{n}"], slow["arms_ms"][f"overlapped_{n}"]
        assert all(b <= w for b, w in zip(busy, wall, strict=True))
        waits_not, waits = (median(slow["arms_ms"][f"{arm}_{n}"]) for arm in ("split", "serial"))
        assert waits_not < 0.8 * waits  # stages are timed with nothing to wait for


@pytest.mark.slow
def test_bench_schedules(tmp_path: Path) -> None:
    """Of a model with shared experts, whose place makes a difference."""
    size = RandomDeepseekV3(
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "q_lora_rank": 32},
        **{"num_attention_heads": 2, "kv_lora_rank": 32, "n_routed_experts": 8, "moe_intermediate_size": 32},
    )
    model = make_random_checkpoint(tmp_path / "model", size)
    file = tmp_path / "schedules.json"
    flags = ["--model", str(model), "--sequences", "4", "--sequence-length", "16", "--ratio", "4", "--blocks", "2"]
    assert main(["bench", "schedules", *flags, "--top", "2", "--max-lanes", "2", "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    assert [each["name"] for each in results["named"]] == [
        name for name, schedule in SCHEDULES.items() if schedule.overlaps
    ]
    assert [each["name"] for each in results["searched"]] == ["searched 1", "searched 2"]
    arms = results["arms_ms"]
    assert {"one_by_one 2x1, shared at combine", "split 2x1, shared at combine"} <= set(arms)
    assert "split 1x2, shared at combine" in arms
    assert "one_by_one 1x2, shared at combine" not in arms  # its chunks overlap: no serial arm
    assert "split 1x1, shared at combine, signalled" in arms
    assert not any(arm.startswith("one_by_one") and "signalled" in arm for arm in arms)  # its blocks do
    busy = min(results["arms_ms"]["communication 2x1, shared at combine"])
    for each in (*results["named"], *results["searched"]):
        assert each["efficiency"]["low"] <= each["efficiency"]["median"] <= each["efficiency"]["high"]
        assert each["measured_ms"]["median"] > 0.95 * busy  # the link alone takes so long
        assert each["error"] == pytest.approx(each["predicted_ms"] / each["measured_ms"]["median"] - 1)
        assert 0.1 < each["predicted_ms"] / each["measured_ms"]["median"] < 10.0  # of one kind; a busy machine adds


def test_a_random_model_has_as_many_layers_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with model_folder(StepOptions(random="deepseek-v3", layers=2)) as folder:
        config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (2, 1)
    assert main(["bench", "overlap", "--model", TINY, "--layers", "3"]) == 2
    assert "has its own" in capsys.readouterr().err


def test_bootstrap_and_pairs() -> None:
    interval = bootstrap([1.0, 2.0, 3.0, 4.0, 100.0])
    assert interval.median == 3.0
    assert 1.0 <= interval.low <= 3.0 <= interval.high <= 100.0
    assert paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]).median == 2.0
    ratio = ratio_of_sums([1.0, 9.0, 2.0], [1.0, 3.0, 1.0])
    assert ratio.median == 2.4
    assert 1.0 <= ratio.low <= 2.4 <= ratio.high <= 3.0


# -- standard streams that are closed, full, or read by nobody ---------------------------------------------------------


COMMAND = f"exec {sys.executable} -m serving.cli"


def run(words: str, redirected: str, out: Path) -> tuple[int, str]:
    """The status of a command, and all that it wrote into a file."""
    script = f'exec > "{out}" 2>&1; {COMMAND} {words} {redirected}'
    status = subprocess.run(["bash", "-c", script], cwd=ROOT, timeout=100, check=False).returncode
    return status, out.read_text()


FULL = "ubatch: cannot write to standard output: No space left on device. Make room there, or send it elsewhere.\n"
CLOSED = "ubatch: standard output is closed; send it to a file, or to /dev/null.\n"


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "redirected", "status", "said"),
    [
        ("--version", ">/dev/full", 1, FULL),
        ("--version", ">&-", 1, CLOSED),
        ("serve --help", ">/dev/full", 1, FULL),  # longer than a buffer: `print` fails, not the last flush
        ("--version", ">/dev/full 2>/dev/full", 1, ""),
        ("--version", "<&- >&- 2>&-", 1, ""),
        ("serve", ">/dev/full 2>/dev/full", 2, ""),
        ("serve", ">&- 2>&-", 2, ""),
        ("serve", "2>&-", 2, ""),  # and the message is not written to standard output instead
        ("no-such-command", "2>/dev/full", 2, ""),
    ],
)
def test_the_status_is_right_and_nothing_else_is_said(
    words: str, redirected: str, status: int, said: str, tmp_path: Path
) -> None:
    assert run(words, redirected, tmp_path / "out") == (status, said)


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2> >(head -1)"])
def test_what_is_asked_for_is_written_though_messages_are_lost(redirected: str, tmp_path: Path) -> None:
    status, written = run("--version", redirected, tmp_path / "out")
    assert status == 0
    assert written.startswith("ubatch ")


@pytest.mark.wide
@pytest.mark.sample(3)  # each starts a server
@pytest.mark.parametrize("redirected", ["<&- >&- 2>&-", "2>/dev/full", "2> >(head -1 >/dev/null)"])
def test_a_server_that_nobody_hears_serves_and_drains(redirected: str) -> None:
    port = free_port()
    words = f"serve examples/models/tiny-moe --device cpu --dtype float32 --port {port}"
    with subprocess.Popen(["bash", "-c", f"{COMMAND} {words} {redirected}"], cwd=ROOT) as server:
        try:
            wait_until(lambda: _is_well(port) or server.poll() is not None, "the server is ready")
            body = {"prompt": "a", "max_tokens": 2}
            url = f"http://127.0.0.1:{port}/v1/completions"
            assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


def _is_well(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
