"""Restarts are counted within a sliding window; those of a search apart."""

from serving.engine.options import RestartLimits
from serving.engine.restarts import SEARCH_RESTARTS, RestartBudget, RestartReason

KILLED, FAILED = RestartReason.KILLED, RestartReason.FAILED


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
