"""What every test gets: one compute thread, the same seeds, markers of what it needs, no GPU tests without a GPU.

torch is imported in functions: the process that hands tests to workers needs none, and starts them seconds earlier.
"""

from __future__ import annotations

import atexit
import gc
import glob
import logging
import os

# Before torch is imported, and inherited by the ranks that tests spawn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test has several threads, those that wait do not spin
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not glob.glob("/dev/nvidia[0-9]*"):  # before anything imports Triton, which other tests' libraries do
    os.environ.setdefault("TRITON_INTERPRET", "1")

import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from forked import AsSpawned, fork_server
from needs import leaves_out, mark_left_out, mark_needs
from repository import ROOT, SUPPORT, TESTS
from tqdm import tqdm
from triton_numpy import looks_for_a_smaller_failure, skip_if_numpy_is_too_new, why_no_interpreter

collect_ignore = [] if "UBATCH_CLIENTS" in os.environ else ["clients"]
"""`make test-clients` runs these, in an environment that has other people's clients."""
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us in the background
_workers: list[int] = []


@atexit.register  # the first to be registered is the last to be called
def _end() -> None:
    """End a worker of pytest-xdist without freeing a million objects; what it has started has an exit status."""
    if os.getpid() in _workers:
        os._exit(0)


if hasattr(os, "sched_setaffinity") and "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker, and what it starts, has cores of its own: every first rank would else pin itself to the first core.
    worker, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    all_cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, all_cores[worker % len(all_cores) :: count])
tqdm.monitor_interval = 0  # no thread of its own

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may lack it, and then skips what needs it
    pass
else:
    # Reproducible and free of wall-clock limits; `--hypothesis-profile=explore` looks for new counterexamples.
    settings.register_profile("ubatch", deadline=None, derandomize=True, database=None, max_examples=40)
    settings.register_profile("explore", deadline=None, max_examples=2000)
    settings.load_profile("ubatch")
    with suppress(ImportError):  # it would parse this tree for constants to try, in each worker
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants

pytest.register_assert_rewrite(
    "model_checks", "peer_failure_cases", "attention_conformance"
)  # they assert for the tests

SECONDS_FOR_THREADS_TO_END = 5.0
_WHY_NO_INTERPRETER = why_no_interpreter()
_COLLECTED_BEFORE: pytest.StashKey[Path] = pytest.StashKey()
SECONDS = {"server": 4.0, "ranks": 1.2, "triton": 0.2, "long": 0.4}
"""What a test with that marker takes, roughly."""


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker of pytest-timeout where that is missing, as it may be on a GPU machine; and whether to `_end`."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): unheeded here, as pytest-timeout is not installed")
    if hasattr(config, "workerinput"):
        _workers.append(os.getpid())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests `-m` leaves out: `make test-fast` is spared a third of all."""
    return leaves_out(config.option.markexpr, collection_path) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests need, skip what needs a GPU where there is none, and begin with the files that take longest."""
    import torch

    skip = pytest.mark.skip(reason="needs a CUDA GPU; run `make test-gpu` on a machine that has one")
    mark_needs(items)
    mark_left_out(items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip)
        elif _WHY_NO_INTERPRETER and item.get_closest_marker("triton") and looks_for_a_smaller_failure(item):
            item.add_marker(pytest.mark.skip(reason=_WHY_NO_INTERPRETER))
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += sum(SECONDS.get(mark.name, 0.0) for mark in item.iter_markers())
    items.sort(key=lambda item: -weights[item.path])


def pytest_collectstart() -> None:
    """Look for no garbage until the tests are collected, which leaves hardly any; not in pytest-xdist's controller."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep what collecting has made out of every later garbage collection: it lives to the end anyway.

    Tests that are about garbage collect it; else it is looked for seldom, which saves a tenth of all.
    """
    import torch

    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import make_quick

        make_quick()
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest catches warnings and logs
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Fork what ranks are forked from, while there is nothing but imports. CUDA does not survive a fork."""
    if session.items:  # the process that hands tests to workers has none
        import torch

        _choose_without_measuring()
        if not torch.cuda.is_available():
            fork_server()
        _let_logs_propagate()
    return (yield)


def _choose_without_measuring() -> None:
    """What is measured once per process is known in this one, and in all that are forked from it: a second of each.

    That C is the fastest where it can be compiled, then torch. Tests of the measuring call what is behind the caches;
    commands that are started as users start them measure.
    """
    experts = sys.modules.get("moe.experts.registry")
    if experts is None:
        return
    import torch

    from moe import cpu_linear

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "make_experts", Mock())  # it would compile
        for module in (cpu_linear, experts):
            patch.setattr(module, "best_times", lambda ways: [1.0, 2.0])
        for few_rows in (True, False):
            cpu_linear._onednn_is_faster(few_rows)
        for dtype in (torch.float32, torch.bfloat16):
            experts.fastest_cpu_experts(dtype, torch.device("cpu"))


def _let_logs_propagate() -> None:
    """pytest then catches what libraries log at the root, not at some sixty loggers, six times a test."""
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)  # before anything is set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Freeze what is left of the files before: a test leaves some hundred objects, and capturing collects garbage."""
    if item.path != item.config.stash.get(_COLLECTED_BEFORE, None):
        item.config.stash[_COLLECTED_BEFORE] = item.path
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    """Let libraries free at exit what they look for then; a worker of pytest-xdist ends without, see `_end`."""
    if not _workers:
        gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once per reason how many tests were skipped."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """In a section of `make test-gpu`, and with `-m gpu` alone, skip files that need a package this machine lacks.

    A whole test run fails over them.
    """
    report = yield
    call = getattr(report, "call", None)
    error = call.excinfo.value.__cause__ if report.failed and call is not None and call.excinfo is not None else None
    config = collector.config
    lenient = config.option.markexpr == "gpu" or config.pluginmanager.hasplugin("serving.workbench.gpu.checks")
    if lenient and isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if _is_foreign(package):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: needs {package}, which this Python lacks")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip tests that fail only because this numpy is too new for this Triton's interpreter."""
    report = yield
    skip_if_numpy_is_too_new(report, _WHY_NO_INTERPRETER)
    return report


def _is_foreign(package: str) -> bool:
    """Whether it would come from a package index, not from this tree."""
    return bool(package) and not any(
        (place / name).exists() for place in (SUPPORT, TESTS, ROOT) for name in (package, f"{package}.py")
    )


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in every test, whichever ran before."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_initialized():
        torch.manual_seed(0)
    else:  # without a note for every kind of device, each with this stack as text, to be seeded when it is first used
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _float32() -> Iterator[None]:
    """`--dtype auto` is float32 on every machine, whatever is faster there; `test_cpu_dtype.py` tests the choice."""
    setup = sys.modules.get("serving.engine.rank.build")
    with pytest.MonkeyPatch.context() as patch:
        if setup is not None:
            patch.setattr(setup, "fastest_cpu_dtype", lambda *_: ("float32", "these are tests"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _forked_ranks() -> Iterator[None]:
    """Ranks of `serving.ranks` that tests start in this process are forked, not spawned; see `forked.py`."""
    import serving.ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving.ranks, "mp", AsSpawned())
        yield


@pytest.fixture
def no_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which C cannot be compiled."""
    from ubatch.kernels import c_jit

    monkeypatch.setenv(c_jit.OFF_VARIABLE, "0")
    monkeypatch.setattr(c_jit, "_loaded", {})
    c_jit.why_not_c.cache_clear()
    yield
    c_jit.why_not_c.cache_clear()


@pytest.fixture
def no_thread_leaks() -> Iterator[None]:
    """Fail a test that leaves threads of its own behind."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + SECONDS_FOR_THREADS_TO_END
    while leaked := set(threading.enumerate()) - before:
        if time.monotonic() > deadline:
            pytest.fail(f"threads still running after the test: {sorted(thread.name for thread in leaked)}")
        time.sleep(0.01)
