"""How a process of ours has ended, and how all that still run are ended."""

from __future__ import annotations

import multiprocessing
import sys
import time

import pytest

from serving.processes import check_parent, how_it_ended, kill

SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.parametrize(("status", "told"), [(0, "died with exit status 0"), (7, "died with exit status 7")])
def test_an_exit_is_told_with_its_status(status: int, told: str) -> None:
    process = SPAWN.Process(target=sys.exit, args=(status,))
    process.start()
    process.join()
    assert how_it_ended(process) == told


def test_those_that_run_are_killed_and_that_is_told() -> None:
    check_parent()  # this process is nobody's child
    running, ended, never = (SPAWN.Process(target=time.sleep, args=(seconds,)) for seconds in (600, 0, 0))
    for process in (running, ended):
        process.start()
    ended.join()
    kill([running, ended, never])
    assert how_it_ended(running) == "was killed by SIGKILL"
    assert how_it_ended(ended) == "died with exit status 0"
