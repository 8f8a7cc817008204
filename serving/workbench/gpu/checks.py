"""`python -m serving.workbench.gpu.checks`: run the tests that need a GPU, the most basic ones first.

    streams       lanes on two streams, events, memory that crosses streams
    capture       a graph that several threads capture, and its replay
    kernels       every Triton kernel once, against torch
    runner        a model in graphs, the overlap loop, weights
    transports    communication while lanes compute: host memory, NCCL with a group of one, signals
    numbers       the kernels in every dtype and choice of tiles, tuned and captured
    benchmarks    every section of `make bench-gpu` on tiny shapes
    others        tests marked `gpu` in all other files

Every section has its own process and time budget, so that a crash or a hang in one does not affect the others. Each
test's result is in the results file before the next test begins. `--device cpu` runs the same files without a GPU, with
three times the budget: kernels are interpreted, fakes replace the device, and tests that need a GPU are skipped.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from serving.workbench.gpu.parts import FIRST, REHEARSAL, REST, names_in, why_not_into, write_section

__all__ = ["SECTIONS", "Section", "main"]

ROOT = Path(__file__).resolve().parents[3]
LINES = "UBATCH_TEST_LINES"
"""Environment variable: the file into which `pytest_lines` writes a line per test."""


@dataclass(frozen=True)
class Section:
    """Test files under `tests/`, without `test_` and `.py`, and seconds until their process is ended, on a GPU."""

    files: tuple[str, ...]
    budget_s: float


SECTIONS: Mapping[str, Section] = {
    "streams": Section(("cuda_device", "step_streams_gpu", "cuda_lifetimes"), 60),
    "capture": Section(("graphs", "graphs_failures", "graphs_sizes", "graphs_triton"), 60),
    "kernels": Section(("kernels_once",), 120),
    "runner": Section(
        ("runner_graphs_gpu", "runner_launch", "engine_loops", "weight_pass", "memory_profile", "step_settings_gpu"),
        120,
    ),
    "transports": Section(
        ("moe_transports_gpu", "moe_host_loopback", "moe_chunks_gpu", "moe_signals", "moe_signalled_gpu"), 120
    ),
    "numbers": Section(
        ("moe_triton_gpu", "attention_triton", "attention_latent_kernel", "kernels_norm_rope", "router_kernels"), 240
    ),
    "benchmarks": Section(("bench_gpu",), 240),
    "others": Section((), 240),
}
DECIDING = ("streams", "capture", "kernels")
"""The sections that run first: if they fail, the others mean little."""


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
    for name in names_in(SECTIONS, DECIDING, options.only):
        print(f"\n==> {name}", flush=True)
        found = {**_run(name, options.device), "environment": environment}
        print(f"==> {name}: {found['outcome']} in {found['seconds']} s", flush=True)
        if found["status"] or "failed" in found["counts"] or "passed" not in found["counts"]:
            failed.append(name)  # a section whose tests were all skipped proves nothing
        if options.json is not None:
            write_section(options.json, {"device": options.device}, SECTIONS, name, found)
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


def _run(name: str, device: str) -> dict[str, Any]:
    """Run one section in a process of its own; returns how it ended, and every test's result."""
    budget_s = SECTIONS[name].budget_s * (1 if device == "cuda" else REHEARSAL)
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        lines.touch()
        selected = "gpu" if device == "cuda" else "not slow"
        command = [sys.executable, "-m", "pytest", "-p", "serving.workbench.gpu.pytest_lines", "-m", selected]
        command += ["-o", "faulthandler_exit_on_timeout=false"]  # the time budget ends a hanging test
        command += ["-W", "ignore::pytest.PytestConfigWarning", *map(str, files_of(name))]
        begun = time.monotonic()
        status = _end_in_time(command, budget_s, {**os.environ, LINES: str(lines)})
        found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    seconds = round(time.monotonic() - begun, 1)
    counts = Counter(each["outcome"] for each in found)
    ended = "done" if status in (0, 1) else f"its process ended with status {status}"
    if status is None:
        status, ended = 124, f"out of time ({budget_s:.0f} s)"
    elif status == 5:  # pytest's status for: no test was selected
        status, ended = 0, "no test here"
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    outcome = f"{ended}: {told}" if told else ended
    return {"outcome": outcome, "status": status, "seconds": seconds, "counts": dict(counts), "tests": found}


def _end_in_time(command: list[str], budget_s: float, environment: Mapping[str, str]) -> int | None:
    """Exit status of a process; None if it ran out of time, and was killed with all its children."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(budget_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
    parser.add_argument("--only", nargs="+", choices=[FIRST, REST, *SECTIONS], help="these sections; all by default")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, help="write every test's result here, section by section")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
