"""The record of steps: what a rank that ended in any way was doing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from children import exit_code, in_child
from fake_device import make_core

from model_runner import SamplingParams
from serving.engine import step_record
from serving.engine.kept import SharedMemory
from serving.engine.step_record import InStep, StepRecord, clear_steps, read_steps
from serving.requests import RequestInput

OUTSIDE = InStep()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory("steps")
    yield made
    made.close()


def test_no_step_runs_before_the_first_and_after_the_last(memory: SharedMemory) -> None:
    assert read_steps(memory) == OUTSIDE
    record = StepRecord(memory)
    assert read_steps(memory) == OUTSIDE
    for _ in range(3):
        record.begin(["a", "b"])
        assert read_steps(memory) == InStep(True, ("a", "b"))
        record.end()
        assert read_steps(memory) == OUTSIDE


def test_two_steps_may_run_at_once(memory: SharedMemory) -> None:
    record = StepRecord(memory)
    record.begin(["a", "b"])
    record.begin(["b", "c"])
    assert read_steps(memory) == InStep(True, ("a", "b", "c"))
    record.end()
    assert read_steps(memory) == InStep(True, ("b", "c"))
    record.begin(["c"])
    assert read_steps(memory) == InStep(True, ("b", "c"))


def test_a_step_without_requests_is_one(memory: SharedMemory) -> None:
    StepRecord(memory).begin([])
    assert read_steps(memory) == InStep(True)


def test_any_text_is_an_id_and_too_many_are_not_recorded(memory: SharedMemory) -> None:
    record = StepRecord(memory)
    record.begin(["", "\n\0", "\u00e4\U0001f600"])
    assert read_steps(memory).requests == ("", "\n\0", "\u00e4\U0001f600")
    record.begin(["x" * (5 << 20)])
    record.end()
    assert read_steps(memory) == InStep(True)


def test_a_new_process_does_not_inherit_the_steps_of_its_predecessor(memory: SharedMemory) -> None:
    clear_steps(memory)
    StepRecord(memory).begin(["a"])
    clear_steps(memory)
    assert read_steps(memory) == OUTSIDE
    StepRecord(memory).begin(["a"])
    StepRecord(memory)
    assert read_steps(memory) == OUTSIDE


@pytest.mark.parametrize("place", [0, 16, 32, 64 + 3])
def test_damage_is_noticed(memory: SharedMemory, place: int, caplog: pytest.LogCaptureFixture) -> None:
    StepRecord(memory).begin(["some-request"])
    with memory.map() as data:
        data[place] ^= 0xFF
    assert read_steps(memory) == InStep(True)
    assert "is damaged" in caplog.text


@contextmanager
def child(body: Callable[[], object]) -> Iterator[int]:
    """A process that runs the body, then waits."""

    def run() -> None:
        body()
        signal.pause()

    pid = in_child(run)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL


def test_it_outlives_a_process_that_is_killed_in_a_step(memory: SharedMemory) -> None:
    ready, told = os.pipe()

    def steps() -> None:
        record = StepRecord(memory)
        for _ in range(4):
            record.begin(["a"])
            record.end()
        record.begin(["b", "c"])
        os.write(told, b"!")

    with child(steps):
        os.read(ready, 1)
    assert read_steps(memory) == InStep(True, ("b", "c"))
    os.close(ready)
    os.close(told)


def test_who_reads_while_the_rank_runs_sees_whole_steps(memory: SharedMemory) -> None:
    """Steps of 1, 2, ... 99 requests; each of them is called by the number of its step's requests."""
    StepRecord(memory)

    def steps() -> None:
        record = StepRecord(memory)
        lists = [[f"{count} {place}" for place in range(count)] for count in range(1, 100)]
        while True:
            for requests in lists:
                record.begin(requests)
                time.sleep(1e-4)  # a step's work
                record.end()

    seen = set()
    with child(steps):
        while len(seen) < 20:
            found = step_record._read(memory)
            if found is not None and found.inside:
                count = len(found.requests)
                assert found.requests == tuple(f"{count} {place}" for place in range(count))
                seen.add(count)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_loop_writes_which_requests_run(memory: SharedMemory, overlap: bool) -> None:
    core, device, _ = make_core(overlap=overlap)
    core.record = StepRecord(memory)
    launched: list[InStep] = []
    device.on_launch = lambda: launched.append(read_steps(memory))
    core.add(RequestInput("a", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))
    core.step()
    core.add(RequestInput("b", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))
    assert read_steps(memory) == (InStep(True, ("a",)) if overlap else OUTSIDE)
    while core.has_work:
        core.step()
    assert read_steps(memory) == OUTSIDE
    core.step()  # among ranks that have work
    assert launched[-1] == InStep(True)
    assert launched[0] == InStep(True, ("a",))
    assert InStep(True, ("a", "b")) in launched
    assert all(step.inside for step in launched)
    assert read_steps(memory) == OUTSIDE


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_raises_is_not_over(memory: SharedMemory, overlap: bool) -> None:
    core, device, _ = make_core(overlap=overlap)
    core.record = StepRecord(memory)

    def fail() -> None:
        raise ZeroDivisionError

    device.on_launch = fail
    core.add(RequestInput("a", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert read_steps(memory) == InStep(True, ("a",))
