"""Tests here may be coroutine functions, and handle signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from async_tests import pytest_pyfunc_call as pytest_pyfunc_call


@pytest.fixture
def signals_back() -> Iterator[None]:
    """SIGINT and SIGTERM are handled as before the test, whose server has handled both."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
