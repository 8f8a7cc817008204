"""A thread that cannot be started: the step is an error, nothing is left running, and the next step works."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from lanes import lane_pool, lane_threads, no_lane_threads_within, run, walker

from ubatch import UBatchError


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that the system refuses to start."""
    names: set[str] = set()
    start = threading.Thread.start

    def refusing(thread: threading.Thread, *args: Any) -> None:
        if thread.name in names:
            raise RuntimeError("can't start new thread")
        start(thread, *args)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    return names


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_step_whose_threads_cannot_be_started(lane: int, refused: set[str]) -> None:
    with lane_pool(3) as pool:
        for _ in range(2):
            refused.add(f"ubatch-lane-{lane}")
            with pytest.raises(UBatchError, match=f"'ubatch-lane-{lane}' could not be started: can't start") as caught:
                run(pool, *[walker("ab")] * 3)
            assert type(caught.value.__cause__) is RuntimeError
            assert no_lane_threads_within(5)
        refused.clear()
        assert run(pool, *[walker("ab", 1)] * 3) == [1, 1, 1]
        assert len(lane_threads()) == 3
