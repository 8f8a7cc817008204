"""`make test-stub`: the tests and benchmarks that need a GPU, over a CUDA that computes nothing.

    tests         sections of `make test-gpu`, those that mean something without numbers; `own`: tests/stub_cuda
    benchmarks    every section of `make bench-gpu`, tiny, and in full size with one block: does it run, not how fast

Each has a process and a time limit of its own, as code that loops over numbers of the device may loop for ever here.
With `-- COMMAND...` it runs that over the stub instead, with this Python if the command is `python`.
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
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stub_cuda.build import COUNTS, FIGURES, ROOT, WrongPython, build, environment

TESTS = ("streams", "capture", "kernels", "runner", "transports", "measured")
OWN = "own"
TESTS_S = 420.0
BENCHMARK_S = 300.0
SOURCES = ("ubatch", "moe", "attention", "model_runner", "serving/workbench/gpu", "tests/support/stub_cuda")
PLUGIN = (
    "-p",
    "stub_cuda.mute",
    "--assert=plain",
    "-p",
    "no:cacheprovider",
    "-o",
    "faulthandler_exit_on_timeout=false",
)
"""pytest's own asserts print what they compare, which takes for ever where a tensor's text depends on its numbers."""


def main(argv: Sequence[str]) -> int:
    """Build, run, print, and write the results; returns 0 if everything ran and passed."""
    try:
        build()
    except (WrongPython, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    if "--" in argv:
        command = list(argv[argv.index("--") + 1 :])
        command[:1] = [sys.executable] if command[:1] == ["python"] else command[:1]
        return subprocess.call(command, env=environment())
    options = _parse(argv)
    found: dict[str, Any] = {}
    for name, section in _sections(options.only):
        found[name] = section
        print(f"==> {name}: {section['outcome']} in {section['seconds']} s", flush=True)
    failed = [name for name, section in found.items() if not section.pop("ok")]
    if options.json is not None:
        options.json.write_text(json.dumps(_results(found), indent=1) + "\n", encoding="utf-8")
    if failed:
        print(f"\nNot everything ran and passed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _sections(only: Sequence[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run what was asked for; each result as it comes."""
    from serving.workbench.gpu.run import SECTIONS

    for name in (*TESTS, OWN):
        if only is None or name in only:
            yield name, _tests(name)
    for name in SECTIONS:
        for size, options in (("tiny", ["--tiny"]), ("full", [])):
            if only is None or name in only:
                yield f"{name}, {size}", _benchmark(name, options)


def _tests(name: str) -> dict[str, Any]:
    """Run a section of the tests; it is well if something passed, and nothing failed."""
    from serving.workbench.gpu.checks import LINES, files_of

    files = [ROOT / "tests" / "stub_cuda"] if name == OWN else files_of(name)
    with tempfile.TemporaryDirectory() as folder:
        lines, counted, figures = (Path(folder) / file for file in ("lines", "counts", "figures"))
        lines.touch()
        command = [sys.executable, "-m", "pytest", "-p", "serving.workbench.gpu.checks", *PLUGIN]
        command += ["-m", "not slow" if name == OWN else "gpu", *map(str, files)]
        given = {**environment(), LINES: str(lines), COUNTS: str(counted), FIGURES: str(figures)}
        status, seconds = _run(command, TESTS_S, given)
        outcomes = Counter(json.loads(line)["outcome"] for line in lines.read_text(encoding="utf-8").splitlines())
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        found = {
            "ok": status == 0 and outcomes["passed"] > 0,
            "outcome": told if status in (0, 1) else f"{_ended(status)}: {told}",
            "seconds": seconds,
            "counted": _read(counted),
        }
        if figures.exists():
            found["launches per layer"] = _read(figures)
        return found


def _benchmark(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Run a section of the benchmarks; it is well if it came to its end, whatever it could not measure."""
    with tempfile.TemporaryDirectory() as folder:
        results, counted = Path(folder) / "results", Path(folder) / "counts"
        command = [sys.executable, "-W", "ignore", "-m", "stub_cuda.mute", "serving.workbench.gpu", "--in-process"]
        command += ["--only", name, "--blocks", "1", "--json", str(results), *options]
        status, seconds = _run(command, BENCHMARK_S, {**environment(), COUNTS: str(counted)}, shown=False)
        section = _read(results).get("sections", {}).get(name, {"error": f"no results: {_ended(status)}"})
        error = section["error"]
        outcome = error or f"{len(section['figures'])} figures"
        return {"ok": error is None, "outcome": outcome, "seconds": seconds, "counted": _read(counted)}


def _run(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str], *, shown: bool = True
) -> tuple[int | None, float]:
    """Exit status and seconds of a process, which is killed with its children at the limit; its status is None then."""
    begun = time.monotonic()
    to = None if shown else subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=to, stderr=to)
    try:
        status: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, round(time.monotonic() - begun, 1)


def _ended(status: int | None) -> str:
    return "out of time" if status is None else f"its process ended with status {status}"


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def _results(sections: dict[str, Any]) -> dict[str, Any]:
    from serving.workbench.bench.provenance import KEY, stamp

    per_layer = sections.get(OWN, {}).pop("launches per layer", {})
    adds = per_layer.pop("adds per launch", {})
    versions = {name: version(name) for name in ("torch", "triton")} | {"python": sys.version.split()[0]}
    return {
        KEY: {**stamp(SOURCES), "command": "make test-stub"},
        "versions": versions,
        "launches per layer": per_layer,
        "adds per launch": adds,
        "sections": sections,
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description="The GPU tests over a CUDA that computes nothing.")
    parser.add_argument("--only", nargs="+", help="these sections; all by default")
    parser.add_argument("--json", type=Path, help="write the results here")
    return parser.parse_args(argv)


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
