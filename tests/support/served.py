"""What tests of whole servers read: metrics, processes and their memory; and the signals that these handle."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

Metrics = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def read_metrics(base_url: str) -> Metrics:
    """Every sample of a server's `/metrics`."""
    return parse_metrics(httpx.get(f"{base_url}/metrics", timeout=90.0, trust_env=False).raise_for_status().text)


def parse_metrics(text: str) -> Metrics:
    """Every sample by name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def values(metrics: Metrics, name: str, **labels: str) -> list[float]:
    """The samples of that name that have these labels, and others perhaps."""
    wanted = set(labels.items())
    return [value for (sample, own), value in metrics.items() if sample == name and wanted <= own]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Ask until it holds; fail the test, saying `what`, if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"after {timeout_s:g} s not yet: {what}")
        time.sleep(0.05)


@contextmanager
def signals_kept() -> Iterator[None]:
    """A server handles SIGINT and SIGTERM, or leaves both to end its process, which here is that of the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    own = [pid]
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            own += family(int(child))
    return own


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
