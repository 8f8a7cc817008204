"""How a process of ours has ended, and how all that still run are ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import signal
import threading
import time
from unittest.mock import Mock

import pytest
from children import exit_code, in_child
from engine_mains import wait_until

from serving import processes
from serving.processes import check_parent, how_it_ended, is_dead, kill, process_state

SPAWN = multiprocessing.get_context("spawn")


def test_those_that_run_are_killed_and_that_is_told() -> None:
    check_parent()  # this process is nobody's child
    running, ended, never = (SPAWN.Process(target=time.sleep, args=(seconds,)) for seconds in (600, 0, 0))
    for process in (running, ended):
        process.start()
    ended.join()
    kill([running, ended, never])
    assert how_it_ended(running) == "was killed by SIGKILL"
    assert how_it_ended(ended) == "died with exit status 0"


def test_a_process_is_dead_once_all_of_its_threads_have_ended() -> None:
    """Its main thread alone does not tell: another one may wait for a driver."""

    def body() -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit: of this thread alone

    child = in_child(body)
    assert wait_until(lambda: process_state(child) == "Z")
    assert not is_dead(child)
    os.kill(child, signal.SIGKILL)
    assert wait_until(lambda: is_dead(child))
    assert exit_code(child) == -signal.SIGKILL
    assert not is_dead(child)


def test_one_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_KILLED_S", 0.1)
    stuck = Mock(pid=7, exitcode=None)
    assert kill([stuck]) == [stuck]
    (limit_s,) = stuck.join.call_args.args
    assert 0 < limit_s <= 0.1
