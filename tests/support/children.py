"""Children of a fork: each runs a body and ends, within bounds."""

import os
import time
from collections.abc import Callable

import pytest
from forked import forget_the_server


def in_child(body: Callable[[], object]) -> int:
    """Fork; the child runs `body` in this thread and exits with 0, or 1 where it raises. Returns the child's id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            forget_the_server()
            body()
            status = 0
        finally:
            os._exit(status)
    return child


def exit_code(child: int) -> int:
    """Wait for a child, at most 30 seconds."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")
