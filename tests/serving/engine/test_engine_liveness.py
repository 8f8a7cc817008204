"""Which rank is said to have failed, and why: silence on a clock that the test sets, and reports in any order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from engine_mains import tiny

from model_runner import CheckpointError, TensorMissing
from serving.engine import liveness
from serving.engine.liveness import Liveness, WatchedTime, dead_error, start_error
from serving.engine.wire.messages import Alive, Failed, error_kind
from serving.requests import EngineDead
from ubatch import ConfigError, PeerFailed, UBatchConfig

Event = Callable[[Liveness], object] | float
BEGIN = Liveness.begin


def beat(rank: int, silence_s: float = 0.0) -> Event:
    return lambda signs: signs.heard(Alive(rank, silence_s))


def node(node_rank: int) -> Event:
    return lambda signs: signs.heard_node(node_rank)


HANGS = "hangs: it has given no sign of life for 10 s (timeout_s)"
STARTS = "hangs while it starts: it has given no sign of life for 60 s"
NODES = {"nnodes": 3, "master_port": 1}


@pytest.mark.parametrize(
    ("options", "events", "found"),
    [
        ({}, [BEGIN, 9.0], []),
        ({}, [BEGIN, 9.0, beat(0), 18.0], []),
        ({}, [BEGIN, 11.0], [(0, HANGS)]),
        ({}, [59.0], []),
        ({}, [61.0], [(0, STARTS)]),
        # An announced silence is that of its rank, and of those that step with it.
        ({"ranks": 2}, [BEGIN, beat(1, 900.0), 11.0], [(0, HANGS)]),
        ({"ranks": 2, "expert_parallel": True}, [BEGIN, beat(1, 900.0), 11.0, 909.0], []),
        ({"ranks": 2, "expert_parallel": True}, [BEGIN, 1.0, beat(1, 900.0), 911.0], [(0, HANGS)]),
        # One that is taken back gives those that waited their time again.
        (
            {"ranks": 2, "expert_parallel": True},
            [beat(0, 900.0), 5.0, BEGIN, 300.0, beat(0), 309.0, beat(0), 311.0],
            [(1, HANGS)],
        ),
        # Of several the first that went silent is named.
        ({"ranks": 2}, [BEGIN, 1.0, beat(0), 12.0], [(1, HANGS)]),
        # A node that never joins is told from one that is lost, and that from its ranks.
        (
            {"ranks": 3, **NODES},
            [node(2), 301.0],
            [(1, "is lost: node 1 has not joined within 300 s"), (2, "is lost: node 2 cannot be reached"), (0, STARTS)],
        ),
        (
            {"ranks": 3, **NODES},
            [BEGIN, node(1), node(2), 9.0, beat(0), node(1), beat(1), 10.5],
            [(2, "is lost: node 2 cannot be reached")],
        ),
        ({"ranks": 3, **NODES}, [BEGIN, 9.0, node(1), node(2), beat(0), beat(2), 10.5], [(1, HANGS)]),
        # A rank that steps with those of a silent node waits for them: the node is named, though it fell silent later.
        (
            {"ranks": 3, "expert_parallel": True, **NODES},
            [BEGIN, 1.0, beat(0), 2.0, node(1), 9.0, node(2), 11.5, 12.5],
            [(1, "is lost: node 1 cannot be reached")],
        ),
    ],
)
def test_who_is_silent_for_too_long(
    options: dict[str, Any], events: Sequence[Event], found: list[tuple[int, str]]
) -> None:
    """A number sets the clock; at the last one these are reported, and nobody before."""
    dbo = UBatchConfig(dbo_decode_token_threshold=4, timeout_s=10.0)
    signs = Liveness(tiny(**{"ranks": 1, **options}, dbo=dbo), print)
    said: list[Failed] = []
    for event in events:
        assert not said
        if callable(event):
            event(signs)
        else:
            signs._clock.now = event
            said = signs._silent()
    assert [(failed.rank, failed.text) for failed in said] == found


def test_time_in_which_nobody_looked_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was stopped, or its machine slept."""
    times = iter([100.0, 100.5, 101.0, 500.0, 500.4])
    monkeypatch.setattr(liveness.time, "monotonic", partial(next, times))
    clock = WatchedTime(0.5)
    assert [clock.look() for _ in range(4)] == pytest.approx([0.5, 1.0, 2.0, 2.4])


OWN = Failed(1, "boom", name="ValueError", traceback="Traceback")
OWN_EXIT = Failed(1, "died with exit status 1")
ECHO = Failed(0, "rank 1 failed", "UBatchError", "PeerFailed", "Traceback", echo=True)
ECHO_EXIT = Failed(0, "died with exit status 1")
KILLED = Failed(1, "was killed by SIGKILL")


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        *((order, OWN) for order in itertools.permutations([ECHO, ECHO_EXIT, OWN_EXIT, OWN]) if order[0] is not OWN),
        *((order, KILLED) for order in itertools.permutations([ECHO, ECHO_EXIT, KILLED]) if order[0] is not ECHO_EXIT),
        ([OWN], OWN),
        ([ECHO_EXIT, ECHO, KILLED], KILLED),
        ([ECHO, ECHO_EXIT], ECHO),
    ],
)
async def test_the_first_cause_counts_whatever_order_the_reports_come_in(
    reports: Sequence[Failed], cause: Failed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_GRACE_S", 0.01)
    monkeypatch.setattr(liveness, "_ECHO_GRACE_S", 0.02)
    decided: asyncio.Queue[Failed] = asyncio.Queue()
    signs = Liveness(tiny(2), decided.put_nowait)
    for report in reports:
        signs.report(report)
    assert await asyncio.wait_for(decided.get(), 20) == cause
    signs.report(OWN)
    await asyncio.sleep(0.01)
    assert decided.empty()


@pytest.mark.parametrize(
    ("error", "started", "kind", "text"),
    [
        # Of a failed start the rank's own error, where the user can mend it.
        (ConfigError("bad"), False, ConfigError, "bad"),
        (TensorMissing("w", "no w"), False, CheckpointError, "no w"),
        (ZeroDivisionError("oops"), False, EngineDead, "rank 1 did not start: ZeroDivisionError: oops"),
        (ConfigError("bad"), True, EngineDead, "rank 1 failed: ConfigError: bad"),
        (PeerFailed(0, "rank 0 died\nand more"), True, EngineDead, "rank 1 failed: PeerFailed: rank 0 died"),
    ],
)
def test_a_failure_is_one_line_with_its_place_as_a_note(
    error: Exception, started: bool, kind: type[Exception], text: str
) -> None:
    failed = Failed(1, str(error), error_kind(error), type(error).__name__, "Traceback ...")
    told = (dead_error if started else start_error)(failed, "rank 1")
    assert (type(told), str(told)) == (kind, text)
    assert told.__notes__ == ["on rank 1:\nTraceback ..." if kind is EngineDead else "on rank 1"]


def test_a_death_without_a_report_is_told_as_it_is() -> None:
    for tell in (dead_error, start_error):
        assert str(tell(KILLED, "rank 1 (DP 0, TP 1)")) == "rank 1 (DP 0, TP 1) was killed by SIGKILL."
