"""Which rank is said to have failed, and why: silence on a clock that the test sets, and reports in any order. Whose
fault it is: the table, and what is found of real processes. And how often engines may be started again."""

import asyncio
import faulthandler
import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_mains import tiny, wait_until

from model_runner import CheckpointError, TensorMissing
from serving.engine import EngineOptions, liveness
from serving.engine.kept import InStep, KeptOfRank, StepRecord
from serving.engine.launch import LocalEngines
from serving.engine.liveness import Liveness, WatchedTime, dead_error, start_error
from serving.engine.options import RestartLimits
from serving.engine.restarts import SEARCH_RESTARTS, RestartBudget, RestartReason
from serving.engine.suspects import Blame, blame
from serving.engine.wire.messages import Alive, Failed, RankFound, decode_from_engine, encode, error_kind
from serving.engine.wire.rendezvous import Place
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
ECHO_0 = Failed(0, "rank 1 failed", "UBatchError", "PeerFailed", "Traceback", echo=True)
ECHO_EXIT = Failed(0, "died with exit status 1")
DEATH = Failed(1, "was killed by SIGKILL")


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        *((order, OWN) for order in itertools.permutations([ECHO_0, ECHO_EXIT, OWN_EXIT, OWN]) if order[0] is not OWN),
        *((order, DEATH) for order in itertools.permutations([ECHO_0, ECHO_EXIT, DEATH]) if order[0] is not ECHO_EXIT),
        ([OWN], OWN),
        ([ECHO_EXIT, ECHO_0, DEATH], DEATH),
        ([ECHO_0, ECHO_EXIT], ECHO_0),
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
        assert str(tell(DEATH, "rank 1 (DP 0, TP 1)")) == "rank 1 (DP 0, TP 1) was killed by SIGKILL."


KILLED, EXITED, HUNG, FAILED, UNREACHABLE = RestartReason


def running(*requests: str, state: str = "S") -> RankFound:
    return RankFound(InStep(True, requests), state)


def killed(number: int) -> Failed:
    return Failed(1, "was killed", reason=KILLED, signal=number)


ECHO = Failed(1, "rank 0 failed", "UBatchError", "PeerFailed", "Traceback", echo=True)
EXIT = Failed(1, "died with exit status 3", reason=EXITED)
SILENT = Failed(1, "hangs", reason=HUNG)
LOST = Failed(1, "is lost", reason=UNREACHABLE)
OUTSIDE = RankFound(InStep(), "S")


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("failed", "state", "own"),
    [
        *((killed(number), "", True) for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE)),
        (killed(signal.SIGILL), "", True),
        *((killed(number), "", False) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)),
        (EXIT, "", True),
        (OWN, "", True),
        (OWN, "R", True),
        (ECHO, "", False),
        *((SILENT, state, True) for state in "RSD"),
        *((SILENT, state, False) for state in ("T", "t", "Z", "")),
        (LOST, "S", False),
    ],
)
def test_whose_fault_it_is(failed: Failed, state: str, own: bool, inside: bool) -> None:
    found = {failed.rank: RankFound(InStep(inside, ("a",) * inside), state)}
    wanted = Blame(True, ("a",)) if own and inside else Blame()
    assert blame(tiny(2), failed, found) == wanted


RANKS = {0: running("a", "b"), 1: running("b", "c"), 2: running("d"), 3: OUTSIDE}


@pytest.mark.parametrize(
    ("options", "found", "wanted"),
    [
        (tiny(4), RANKS, "bc"),
        (tiny(4, expert_parallel=True), RANKS, "bcad"),
        (tiny(2, tensor_parallel_size=2), RANKS, "bca"),
        # A rank without requests may fail in a step that has others'.
        (tiny(2, expert_parallel=True), {0: running("a"), 1: running()}, "a"),
        (tiny(2, expert_parallel=True), {0: running("a"), 1: OUTSIDE}, None),
        # Nobody knows the other rank's requests, or not even those of the failed one.
        (tiny(2, expert_parallel=True), {1: running("b")}, "b"),
        (tiny(2, expert_parallel=True), {0: running("b")}, None),
        # A peer is stopped: what happens to those that wait for it is not their fault.
        (tiny(2, expert_parallel=True), {0: running("a", state="T"), 1: running("b")}, None),
        (tiny(2), {0: running("a", state="T"), 1: running("b")}, "b"),
    ],
)
@pytest.mark.parametrize("failed", [killed(signal.SIGSEGV), OWN, SILENT])
def test_which_requests_were_in_the_step(
    options: EngineOptions, found: Mapping[int, RankFound], wanted: str | None, failed: Failed
) -> None:
    expected = Blame() if wanted is None else Blame(True, tuple(wanted))
    assert blame(options, failed, found) == expected


def test_a_rank_of_another_machine_says_itself_what_it_was_doing() -> None:
    failed = Failed(1, "boom", name="ValueError", traceback="Traceback", in_step=InStep(True, ("b",)))
    assert decode_from_engine(encode(failed)) == failed
    assert blame(tiny(2, expert_parallel=True), failed, {0: running("a")}) == Blame(True, ("b", "a"))


def abort_or_stop(options: EngineOptions, rank: int, place: Place) -> None:
    """Rank 0 crashes in a step, rank 1 is stopped in one, rank 2 is killed before its first."""
    assert place.kept is not None
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    StepRecord(place.kept.steps).begin([f"of rank {rank}"])
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGABRT if rank == 0 else signal.SIGSTOP)


def test_what_is_found_of_real_processes(tmp_path: Path) -> None:
    options = tiny(3)
    kept = {rank: KeptOfRank() for rank in range(3)}
    for each in kept.values():
        StepRecord(each.steps).begin(["of an earlier process"])
    engines = LocalEngines(options, Place(tmp_path), abort_or_stop, kept)
    try:
        assert wait_until(lambda: engines.found()[1].state == "T" and None not in map(engines.exit_status, (0, 2)))
        found = engines.found()
        ended = engines.ended(0)
        assert (ended.reason, ended.signal) == (KILLED, signal.SIGABRT)
        assert blame(options, ended, found) == Blame(True, ("of rank 0",))
        hung = Failed(1, "hangs", reason=HUNG)
        assert found[1].in_step == InStep(True, ("of rank 1",))
        assert blame(options, hung, found) == Blame()
        ended = engines.ended(2)
        assert (ended.reason, ended.signal) == (KILLED, signal.SIGKILL)
        assert found[2].in_step == InStep()
    finally:
        engines.kill()
        for each in kept.values():
            each.close()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_window_slides() -> None:
    clock = Clock()
    budget = RestartBudget(RestartLimits(2, engine_restart_window_s=10.0), clock)
    assert budget.may_restart(KILLED)
    clock.now += 6
    assert budget.may_restart(FAILED)
    assert not budget.may_restart(KILLED)
    clock.now += 4  # the first one is 10 s ago
    assert budget.may_restart(KILLED)
    assert not budget.may_restart(KILLED)
    assert budget.counts == {"killed": 2, "exited": 0, "hung": 0, "failed": 1, "unreachable": 0}


def test_a_search_has_a_limit_of_its_own() -> None:
    budget = RestartBudget(RestartLimits(1), Clock())
    assert all(budget.may_restart(FAILED, searching=True) for _ in range(SEARCH_RESTARTS))
    assert not budget.may_restart(FAILED, searching=True)
    assert budget.may_restart(KILLED)
    assert not budget.may_restart(KILLED)
    assert budget.counts["failed"] == SEARCH_RESTARTS


def test_without_restarts_there_is_no_search() -> None:
    budget = RestartBudget(RestartLimits(0), Clock())
    assert not budget.may_restart(FAILED)
    assert not budget.may_restart(FAILED, searching=True)
    assert not any(budget.counts.values())
