"""`ubatch bench peers`, with a stand-in for vLLM; transformers is that of this interpreter."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_vllm import make_environment, make_interpreter
from repository import SUPPORT, TINY_MOE

from serving.cli import main
from serving.workbench.bench.peers.command import OURS, Same, Visit, measure_load, same_tokens
from serving.workbench.bench.peers.process import Arm, EngineFailed, EngineProcess, running_engine
from serving.workbench.bench.server.offline import Workload
from serving.workbench.bench.server.process import wait_for_rest, with_variables
from ubatch import UBatchError

SETTINGS = {"model": str(TINY_MOE), "dtype": "float32", "threads": 1, "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    """An interpreter that has the stand-in."""
    return make_environment(tmp_path)


@contextmanager
def engine(python: str, timeout_s: float = 60.0, load: bool = True) -> Iterator[EngineProcess]:
    with running_engine(Arm("vllm", "float32", python), timeout_s) as process:
        if load:
            assert process.load(SETTINGS) == {"vllm": "0.0", "torch": "9.9", "python": sys.version.split()[0]}
        yield process


def check_ended(session: int) -> None:
    """Neither the process nor what it started is left."""
    done = subprocess.run(["ps", "-s", str(session), "-o", "stat="], capture_output=True, text=True, check=False)
    assert not [state for state in done.stdout.split() if not state.startswith("Z")]


# -- an engine's process -------------------------------------------------------------------------------------------


def test_an_engine_answers_again_and_again(vllm: str) -> None:
    """What it prints goes to its log; its own processes end with it."""
    with engine(vllm) as process:
        for _ in range(2):
            seconds, tokens = process.generate([[7, 1], [8, 2]], 3)
            assert tokens == [[7, 7, 7], [8, 8, 8]]
            assert 0.01 <= seconds < 60
        assert wait_for_rest([process.pid])
    check_ended(process.pid)


@pytest.mark.wide
def test_an_engine_that_refuses_can_be_asked_again(vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "refuse")
    with engine(vllm) as process:
        with pytest.raises(EngineFailed, match=f"^{vllm}: ValueError: too long$"):
            process.generate([[7]], 1)
        assert not process.ended
        assert process.generate([[7]], 1)[1] == [[7]]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("crash", "the process ended with status 3.\nThe end of its output:\n(.|\n)*a kernel failed"),
        ("hang", r"no answer within 2 s \(--timeout-s\)"),
    ],
)
def test_an_engine_that_fails_is_ended(wrong: str, message: str, vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", wrong)
    with engine(vllm) as process:
        process._timeout_s = 2.0
        with pytest.raises(EngineFailed, match=message):
            process.generate([[7]], 1)
        assert process.ended
        check_ended(process.pid)
        with pytest.raises(EngineFailed, match="ended"):
            process.generate([[7]], 1)


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    python = make_interpreter(tmp_path)
    with engine(python, load=False) as process, pytest.raises(EngineFailed, match="No module named 'vllm'"):
        process.load(SETTINGS)


def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "python").write_bytes(b"\x00")
    (tmp_path / "python").chmod(0o700)
    with pytest.raises(EngineFailed, match="cannot be run"), engine(str(tmp_path / "python")):
        pass


@pytest.mark.wide
def test_ctrl_c_ends_an_engine_at_once(vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "hang")
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    started = []

    def generate() -> None:
        with engine(vllm) as process:
            started.append((process.pid, time.monotonic()))
            timer.start()
            process.generate([[7]], 1)

    with pytest.raises(KeyboardInterrupt):
        generate()
    timer.join()
    ((session, start),) = started
    assert time.monotonic() - start < 12
    check_ended(session)


def test_engines_that_compute_are_not_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.workbench.bench.server.process._REST_S", 0.4)
    script = "print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert busy.stdout.readline(), "it computes"
        assert not wait_for_rest([busy.pid])
        assert wait_for_rest([])
    finally:
        busy.kill()
        busy.communicate()


def test_vllm_gets_every_core_but_no_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be that of its API process, too; what a user set for vLLM stays."""
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    cores = sorted(os.sched_getaffinity(0))
    vllm = with_variables(Arm("vllm", "float32", "v").variables())
    assert "OMP_NUM_THREADS" not in vllm
    assert vllm["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert vllm["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, cores))
    assert with_variables(Arm(OURS, "float32", None).variables())["OMP_NUM_THREADS"] == str(len(cores))


# -- figures -------------------------------------------------------------------------------------------------------


def test_equal_requests_and_the_tokens_before_they_differ() -> None:
    assert same_tokens([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 0, 8]]) == Same(1, 2, 0.75)
    assert same_tokens(["ab"], ["abcd"]) == Same(0, 1, 0.5)


def visit(seconds: float, tokens: list[list[int]], *, visits: int | None = None) -> Visit:
    """The next visit after so many fails, and then there must be no other."""
    given = (seconds, tokens)
    if visits is None:
        return Mock(return_value=given)
    return Mock(side_effect=[*[given] * visits, UBatchError("out of memory\nand more"), AssertionError("called again")])


def test_each_engine_is_taken_by_its_best_type(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = [[1, 2], [3, 4]]
    visits = {
        Arm(OURS, "bfloat16", None): visit(0.2, tokens),
        Arm("vllm", "bfloat16", "v"): visit(0.3, [[1, 2], [3, 9]]),
        Arm("transformers", "bfloat16", "t"): visit(0.5, tokens, visits=3),
        Arm(OURS, "float32", None): visit(0.1, tokens),
        Arm("vllm", "float32", "v"): visit(0.4, tokens),
    }
    rests: list[int] = []
    result = measure_load("offline", Workload(2, 8, 2), visits, 3, lambda: rests.append(1))
    assert len(rests) == 4 * 7 + 4
    assert list(result.arms_ms) == ["ubatch bfloat16", "vllm bfloat16", "ubatch float32", "vllm float32"]
    assert all(len(values) == 3 for values in result.arms_ms.values())
    ratios = {name: round(ratio.median, 3) for name, ratio in result.ratio.items()}
    assert ratios == {"vllm bfloat16": 1.5, "vllm float32": 4.0}
    assert result.same == {"vllm bfloat16": Same(1, 2, 0.75), "vllm float32": Same(2, 2, 1.0)}
    assert result.tokens_per_s["vllm float32"].median == pytest.approx(10)
    assert list(result.best) == ["vllm"]
    best = result.best["vllm"]
    assert (best.ours, best.theirs, round(best.ratio.median, 3)) == ("ubatch float32", "vllm bfloat16", 3.0)
    result.print()
    shown = capsys.readouterr()
    assert "best type of each: time of vllm bfloat16 / ubatch float32   3.000 [3.000, 3.000]" in shown.out
    assert "transformers bfloat16 has no figures: out of memory\n" in shown.out
    assert "transformers bfloat16 failed: out of memory\nand more\n" in shown.err


def test_without_ours_there_are_no_ratios() -> None:
    visits = {Arm(OURS, "float32", None): visit(1, [], visits=0), Arm("vllm", "float32", "v"): visit(1, [[1]])}
    result = measure_load("one", Workload(1, 1, 1), visits, 2, lambda: None)
    assert (result.ratio, result.same, result.best) == ({}, {}, {})
    assert list(result.arms_ms) == ["vllm float32"]


# -- the command ---------------------------------------------------------------------------------------------------

SMALL = ["--blocks", "2", "--dtypes", "float32", "--prompts", "2", "--input-len", "6", "--output-len", "3"]
SMALL += ["--one-output-len", "2", "--first-input-len", "9", "--clients", "2", "--requests", "1"]


def run_command(file: Path, *words: str) -> tuple[int, dict[str, object]]:
    status = main(["bench", "peers", str(TINY_MOE), *SMALL, *words, "--json", str(file)])
    return status, json.loads(file.read_text())


LOADS = {
    "offline": "offline: 2 x 6 in, 3 out",
    "one": "one: 1 x 6 in, 2 out",
    "first": "first: 1 x 9 in, 1 out",
    "served": "served, 2 clients: 2 x 6 in, 3 out",
}


@pytest.mark.wide
@pytest.mark.server
@pytest.mark.timeout(140)
@pytest.mark.parametrize("only", [["offline", "one", "first"], pytest.param(["served"], marks=pytest.mark.slow)])
def test_the_command_measures_every_load(
    only: list[str], vllm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, written = run_command(tmp_path / "peers.json", "--vllm", vllm, "--only", *only)
    shown = capsys.readouterr()
    assert status == 0, shown.err
    assert len(written["loads"]) == len(only)
    for load, part in zip(written["loads"], only, strict=True):
        assert f"\n{LOADS[part]}\n" in shown.out
        arms = {name: len(values) for name, values in load["arms_ms"].items()}
        assert arms == {"ubatch float32": 2, "vllm float32": 2}
        assert load["ratio"]["vllm float32"]["median"] > 0
        assert load["same"]["vllm float32"]["requests"] == 0
        assert load["best"]["vllm"]["ours"] == "ubatch float32"
        assert load["failed"] == {}
    assert written["failed"] == {}
    assert written["environment"]["processor_flags"] is not None
    assert written["options"]["vllm"] == vllm
    if "one" in only:
        assert "vllm float32: vllm 0.0, torch 9.9, python 3" in shown.out
        assert written["versions"]["vllm"]["torch"] == "9.9"


@pytest.mark.server
@pytest.mark.parametrize(
    ("wrong", "only"), [("no memory", "one"), pytest.param("no server", "served", marks=pytest.mark.slow)]
)
def test_a_peer_that_does_not_start_is_a_message(
    wrong: str, only: str, vllm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = make_interpreter(tmp_path / "vllm", f"FAKE_VLLM= PYTHONPATH={tmp_path}:{SUPPORT}")

    def start(arm: Arm, timeout_s: float) -> AbstractContextManager[EngineProcess]:
        """Ours, which has nothing to do with it, is the stand-in without its fault."""
        return running_engine(replace(arm, engine="vllm", python=ours) if arm.engine == OURS else arm, timeout_s)

    monkeypatch.setenv("FAKE_VLLM", wrong)
    monkeypatch.setattr("serving.workbench.bench.peers.command.running_engine", start)
    status, written = run_command(tmp_path / "peers.json", "--vllm", vllm, "--only", only)
    assert status == 1
    (name,) = written["failed"]
    reason = {"no memory": "no memory for the KV cache", "no server": "the port is taken"}[wrong]
    assert reason in written["failed"][name]
    assert f"{name} does not start: " in capfd.readouterr().err
    assert written["loads"] == []


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_transformers_generates_the_same(tmp_path: Path, vllm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another peer that fails leaves its figures as they are."""
    monkeypatch.setenv("FAKE_VLLM", "crash")
    words = ["--transformers", sys.executable, "--vllm", vllm, "--only", "offline", "one"]
    status, written = run_command(tmp_path / "peers.json", *words)
    assert status == 1
    offline, one = written["loads"]
    assert list(offline["failed"]) == ["vllm float32"]
    assert one["failed"] == {}
    for load in (offline, one):
        assert list(load["arms_ms"]) == ["ubatch float32", "transformers float32"]
        same = load["same"]["transformers float32"]
        assert same["requests"] == same["of"]
