"""Ctrl-C at a chosen line of the caller: what tests of interrupts share."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import ubatch
from ubatch import capturing, get_forward_context
from ubatch.lanes.context import current_lane
from ubatch.trace.recorder import ranges_wanted
from ubatch.trace.spans import current_trace

PACKAGE = (str(Path(ubatch.__file__).parent),)
PLACES = (*PACKAGE, contextlib.__file__)
"""Lines in here count: the package's, and those of the `with` statements that it uses."""
AT_ONCE_S = 4.0
"""No call below takes a tenth of it on an idle machine, and every time-out is five times as long."""


def lines_of(call: Callable[[], object], places: tuple[str, ...] = PLACES) -> int:
    """How many lines of the package this thread runs in `call`."""
    return _traced(call, -1, places)[0]


def interrupted_at(number: int, call: Callable[[], object], places: tuple[str, ...] = PLACES) -> BaseException | None:
    """Run `call` and press Ctrl-C before the line of that number, counted from 0; returns what came out."""
    return _traced(call, number, places)[1]


def _traced(call: Callable[[], object], stop: int, places: tuple[str, ...]) -> tuple[int, BaseException | None]:
    count = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == stop + 1:
                raise KeyboardInterrupt(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename.startswith(places) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        next(_with_its_own_exceptions(call))
    except BaseException as error:
        return count, error
    finally:
        sys.settrace(before)
    return count, None


def _with_its_own_exceptions(call: Callable[[], object]) -> Iterator[object]:
    """A frame left at the end of an `except` block, where no signal comes, leaves its exception at hand.

    Here it is this generator's; else it would be the thread's for good, and head the report of every later failure.
    """
    yield call()


def nothing_is_left() -> None:
    """No lane, forward context, trace, capture or exception is left behind in this thread."""
    assert current_lane() is None
    assert get_forward_context() is None
    assert current_trace() is None
    assert not ranges_wanted()
    assert not capturing()
    assert sys.exc_info() == (None, None, None)


class AtOnce:
    """Fails where the `with` block waited for a time-out."""

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *raised: object) -> None:
        assert time.monotonic() - self._begun < AT_ONCE_S
