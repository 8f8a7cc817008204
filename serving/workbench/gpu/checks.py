"""`python -m serving.workbench.gpu.checks`: run the tests that need a GPU, the most basic ones first.

    streams       lanes on two streams, events, memory that crosses streams
    capture       a graph that several threads capture, and its replay
    kernels       every Triton kernel once, against torch
    runner        a model in graphs, the overlap loop, weights
    transports    communication while lanes compute: host memory, NCCL with a group of one, signals
    experts       the kernels of MoE layers in every dtype and choice of tiles, tuned and captured
    attention     the kernels of attention, likewise
    benchmarks    every section of `make bench-gpu` on tiny shapes
    others        tests marked `gpu` in all other files
    measured      what measures time, free memory, or kernels that run at once

Every section has its own process and time budget, so that a crash or a hang in one does not affect the others. Its
results are written when it ends. With 8 processors or more, sections run side by side on the one GPU (`--jobs`), but
for those that wait for a time or measure (`alone`). `--device cpu` runs the same files without a GPU, with three times
the budget: kernels are interpreted, fakes replace the device, and tests that need a GPU are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.workbench.gpu.parts import PARTS, REHEARSAL, names_in, why_not_into, write_section

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[3]
LINES = "UBATCH_TEST_LINES"
"""Environment variable: the file into which this module, as a plugin of pytest, writes a line per test."""
_LONGEST_ERROR = 2000
"""Most characters of a test's error; its end is kept."""
_POLL_S = 0.05
_PROCESSORS_FOR_JOBS = 8


@dataclass(frozen=True)
class Section:
    """Test files under `tests/`, without `test_` and `.py`; seconds until their process is ended, on a GPU; their part
    of `make gpu`; whether no other section may run meanwhile; and in how many processes its tests run, where there are
    processors and pytest-xdist for it: most of their time is compilation."""

    files: tuple[str, ...]
    budget_s: float
    part: str
    alone: bool = False
    processes: int = 1


SECTIONS: Mapping[str, Section] = {
    "streams": Section(("cuda_device", "step_streams_gpu", "cuda_lifetimes"), 50, "first", alone=True),
    "capture": Section(("graphs", "graphs_failures", "graphs_sizes", "graphs_triton"), 35, "first"),
    "kernels": Section(("kernels_once",), 90, "first"),
    "runner": Section(("runner_graphs_gpu", "engine_loops", "weight_pass"), 80, "rest-1"),
    "transports": Section(("moe_transports_gpu", "moe_host_loopback", "moe_chunks_gpu", "moe_signals"), 90, "rest-2"),
    "experts": Section(("moe_triton_gpu", "router_kernels"), 140, "rest-2"),
    "attention": Section(("attention_conformance_gpu", "kernels_norm_rope"), 140, "rest-3", processes=4),
    "benchmarks": Section(("bench_gpu",), 120, "rest-2"),
    "others": Section((), 150, "rest-3"),
    "measured": Section(
        ("moe_signalled_gpu", "runner_launch", "memory_profile", "step_settings_gpu"), 120, "rest-1", alone=True
    ),
}
"""The sections in the order in which they start; if the first ones fail, the others mean little."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run sections, print and write their results; returns 0 if all passed."""
    options = _parse(argv)
    if find_spec("pytest") is None:
        print(f"{sys.executable} has no pytest: install it there.", file=sys.stderr)
        return 1
    environment = _environment()
    why_not = why_not_into(options.json, rehearsal=options.device == "cpu")
    if options.device == "cuda" and "sms" not in environment:
        why_not = f"No GPU here that torch can use: {environment}. --device cpu rehearses the tests without one."
    if why_not is not None:
        print(why_not, file=sys.stderr)
        return 1
    failed = []
    for name, found in _run_all(names_in(SECTIONS, options.only), options.device, options.jobs):
        if found["status"] or "failed" in found["counts"] or "passed" not in found["counts"]:
            failed.append(name)  # a section whose tests were all skipped proves nothing
        if options.json is not None:
            write_section(
                options.json, {"device": options.device}, SECTIONS, name, found | {"environment": environment}
            )
    if failed:
        print(f"\nNot everything ran and passed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def files_of(name: str) -> list[Path]:
    """A section's files; the last section has all files that no other section names."""
    named = {file for section in SECTIONS.values() for file in section.files}
    by_name = {path.stem.removeprefix("test_"): path for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    if SECTIONS[name].files:
        return [by_name[file] for file in SECTIONS[name].files]
    return [
        path for file, path in by_name.items() if file not in named and "mark.gpu" in path.read_text(encoding="utf-8")
    ]


def _run_all(names: Sequence[str], device: str, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run sections, at most `jobs` side by side; yields each one's name and results as soon as it ends."""
    waiting, running = deque(names), list[_Running]()
    try:
        while waiting or running:
            while waiting and (not running or (len(running) < jobs and not _alone(waiting[0], running[-1].name))):
                print(f"\n==> {waiting[0]}", flush=True)
                running.append(_Running(waiting.popleft(), device, jobs))
            time.sleep(_POLL_S)
            for each in [each for each in running if each.over]:
                found = each.results()
                running.remove(each)
                print(f"==> {each.name}: {found['outcome']} in {found['seconds']} s", flush=True)
                yield each.name, found
    finally:
        for each in running:
            each.end()


def _alone(*names: str) -> bool:
    return any(SECTIONS[name].alone for name in names)


class _Running:
    """A section that runs in a process of its own, or in several of `jobs`; with one job it is shown as it goes."""

    def __init__(self, name: str, device: str, jobs: int) -> None:
        self.name = name
        self._budget_s = SECTIONS[name].budget_s * (1 if device == "cuda" else REHEARSAL)
        self._folder = tempfile.TemporaryDirectory()
        self._lines, self._output = (Path(self._folder.name) / file for file in ("lines", "output"))
        self._lines.touch()
        selected = "gpu" if device == "cuda" else "not slow"
        command = [sys.executable, "-m", "pytest", "-p", "serving.workbench.gpu.checks", "-m", selected]
        command += ["-o", "faulthandler_exit_on_timeout=false"]  # the time budget ends a hanging test
        command += ["-W", "ignore::pytest.PytestConfigWarning", *map(str, files_of(name))]
        processes = min(SECTIONS[name].processes, jobs)
        if processes > 1 and find_spec("xdist") is not None:
            # pytest-benchmark, where it is installed, warns of processes, and warnings are errors.
            command += ["-n", str(processes), "-p", "no:benchmark"]
        environment = {**os.environ, LINES: str(self._lines)}
        environment["UBATCH_AUTOTUNE_CACHE"] = f"{self._folder.name}/autotune.json"  # not timed on an idle device
        self._begun = time.monotonic()
        with self._output.open("wb") as file:
            to = None if jobs == 1 else file
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, start_new_session=True, stdout=to, stderr=to
            )

    @property
    def over(self) -> bool:
        """Whether it has ended, or used up its time."""
        return self._process.poll() is not None or time.monotonic() - self._begun > self._budget_s

    def end(self) -> None:
        """Kill it with all its children, if it still runs, and forget its files."""
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def results(self) -> dict[str, Any]:
        """End it; returns how it ended, and every test's result."""
        seconds, status = round(time.monotonic() - self._begun, 1), self._process.poll()
        self._kill()
        print(self._output.read_text(encoding="utf-8", errors="replace"), end="")
        lines = self._lines.read_text(encoding="utf-8").splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]  # one may be cut off
        self.end()
        counts = Counter(each["outcome"] for each in found)
        ended = "done" if status in (0, 1) else f"its process ended with status {status}"
        if status is None:
            status, ended = 124, f"out of time ({self._budget_s:.0f} s)"
        elif status == 5:  # pytest's status for: no test was selected
            status, ended = 0, "no test here"
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        outcome = f"{ended}: {told}" if told else ended
        return {"outcome": outcome, "status": status, "seconds": seconds, "counts": dict(counts), "tests": found}


def _environment() -> dict[str, Any]:
    """Hardware and versions, read in a process of its own, because this one must not touch the device."""
    ask = "import json; from serving.workbench.gpu.bench import describe_machine; print(json.dumps(describe_machine()))"
    try:
        done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, timeout=60, check=True)
        environment: dict[str, Any] = json.loads(done.stdout)
        return environment
    except (subprocess.SubprocessError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving.workbench.gpu.checks", description="The tests that need a GPU."
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*PARTS, *SECTIONS], help="these sections or parts; all by default"
    )
    parser.add_argument(
        "--jobs", type=int, choices=range(1, 65), metavar="N", default=_default_jobs(), help="most side by side"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write every test's result here, section by section")
    return parser.parse_args(argv)


def _default_jobs() -> int:
    """One job per two processors, if there are 8 or more: tests wait for compilers, and their lanes are threads."""
    processors = len(os.sched_getaffinity(0))
    return processors // 2 if processors >= _PROCESSORS_FOR_JOBS else 1


# -- the plugin: a line of JSON as soon as a test ends, so that a crash or a hang loses no earlier result --------------

_worker = False
"""Whether this is one of several processes of a section. The process that began them receives every test's report."""


def pytest_configure(config: pytest.Config) -> None:
    global _worker
    _worker = hasattr(config, "workerinput")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's call, and its set-up or clean-up if one of them failed or was skipped."""
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report.duration, report.longreprtext)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write a line for a test file that cannot be imported, or is skipped for a missing package."""
    if report.outcome != "passed":
        _write(report.nodeid, report.outcome, 0.0, report.longreprtext)


def _write(test: str, outcome: str, seconds: float, error: str) -> None:
    if _worker:
        return
    line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3)}
    if error:
        line["error"] = error[-_LONGEST_ERROR:]
    with Path(os.environ[LINES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
