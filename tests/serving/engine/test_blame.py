"""Whose fault a failure is: the table, and what is found of real processes; and how often engines may be started
again."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from engine_mains import tiny, wait_until

from serving.engine import EngineOptions
from serving.engine.kept import InStep, KeptOfRank, StepRecord
from serving.engine.launch import LocalEngines
from serving.engine.options import RestartLimits
from serving.engine.restarts import SEARCH_RESTARTS, RestartBudget, RestartReason
from serving.engine.suspects import Blame, blame
from serving.engine.wire.messages import Failed, RankFound, decode_from_engine, encode
from serving.engine.wire.rendezvous import Place

KILLED, EXITED, HUNG, FAILED, UNREACHABLE = RestartReason


def running(*requests: str, state: str = "S") -> RankFound:
    return RankFound(InStep(True, requests), state)


def killed(number: int) -> Failed:
    return Failed(1, "was killed", reason=KILLED, signal=number)


OWN = Failed(1, "boom", name="ValueError", traceback="Traceback")
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
