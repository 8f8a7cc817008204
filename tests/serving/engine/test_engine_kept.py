"""What a rank leaves behind: the record of its steps says what it was doing when it ended in any way; and its next
process attaches what the first one has prepared, and writes the same tokens."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from children import exit_code, in_child
from engine_mains import run_telling_engine, started, tiny, tokens_of
from fake_device import FakeDevice, make_core
from fake_proposer import FakeProposer
from fake_runner import hashed, make_loop

from model_runner import Draft, Request, SamplingParams
from serving.engine import EngineCore, EngineOptions
from serving.engine.kept import InStep, KeptOfRank, SharedMemory, StepRecord, _read, clear_steps, read_steps
from serving.engine.launch import LocalEngines
from serving.engine.rank import build
from serving.engine.rank import core as core_module
from serving.engine.rank.core import GrammarMaker
from serving.engine.rank.process import Engine
from serving.engine.wire.messages import Add, Refused
from serving.requests import RequestInput
from serving.scheduler import SchedulerConfig
from ubatch import UBatchError

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


def test_requests_beside_the_steps_that_run_are_recorded_too(memory: SharedMemory) -> None:
    record = StepRecord(memory)
    record.begin_aside(["new"])
    assert read_steps(memory) == InStep(True, ("new",))
    record.end_aside()
    assert read_steps(memory) == OUTSIDE
    record.begin(["a"])
    record.begin(["b"])
    record.begin_aside(["c", "a"])
    assert read_steps(memory) == InStep(True, ("a", "b", "c"))
    record.end()
    assert read_steps(memory) == InStep(True, ("b", "c", "a"))


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


@pytest.mark.parametrize("place", [0, 32, 64, 128 + 3])
def test_damage_is_noticed(memory: SharedMemory, place: int, caplog: pytest.LogCaptureFixture) -> None:
    StepRecord(memory).begin(["some-request"])
    with memory.map() as data:
        data[place] ^= 0xFF
    assert read_steps(memory) == InStep(True)
    assert "is damaged" in caplog.text


def recorded(core: EngineCore, memory: SharedMemory, names: str = "") -> EngineCore:
    """The loop, with its record and these requests."""
    core.record = StepRecord(memory)
    for name in names:
        ask(core, name)
    return core


def ask(core: EngineCore, name: str) -> None:
    core.add(RequestInput(name, [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)))


def drafting(proposer: FakeProposer, memory: SharedMemory, **config: int) -> EngineCore:
    loop = make_loop(num_speculative_tokens=2, proposer=proposer, **config)
    device: Any = FakeDevice(loop.runner)
    return recorded(EngineCore(device, loop.scheduler, overlap_schedule=False), memory, "ab")


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
            found = _read(memory)
            if found is not None and found.inside:
                count = len(found.requests)
                assert found.requests == tuple(f"{count} {place}" for place in range(count))
                seen.add(count)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_loop_writes_which_requests_run(memory: SharedMemory, overlap: bool) -> None:
    core, device, _ = make_core(overlap=overlap)
    launched: list[InStep] = []
    device.on_launch = lambda: launched.append(read_steps(memory))
    recorded(core, memory, "a").step()
    ask(core, "b")
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
    device.on_launch = Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        recorded(core, memory, "a").step()
    assert read_steps(memory) == InStep(True, ("a",))


def test_who_makes_drafts_is_recorded(memory: SharedMemory) -> None:
    seen: list[InStep] = []

    class Watching(FakeProposer):
        def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Draft]:
            seen.append(read_steps(memory))
            return super().propose(requests, counts)

    core = drafting(Watching(lambda request, tokens: hashed(tokens)), memory)
    while core.has_work:
        core.step()
        assert read_steps(memory) == OUTSIDE
    assert seen[0] == InStep(True, ("a", "b"))


def test_a_proposer_that_raises_is_no_fault_of_those_that_wait(memory: SharedMemory) -> None:
    core = drafting(FakeProposer(Mock(side_effect=ZeroDivisionError), right=1.0), memory, max_num_seqs=1)
    core.step()
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert read_steps(memory) == InStep(True, ("a",))


def test_requests_whose_grammars_a_thread_makes_are_recorded(memory: SharedMemory) -> None:
    core = recorded(make_core(overlap=False)[0], memory)
    made: Future[GrammarMaker] = Future()
    core._grammars = Mock(begin=Mock(return_value=made))
    for name in "abc":
        core.add(RequestInput(name, [1, 2, 3], SamplingParams(max_tokens=3, grammar="any")))
    assert read_steps(memory) == InStep(True, ("a", "b", "c"))
    assert core.abort("b")
    assert read_steps(memory) == InStep(True, ("a", "c", "b")), "the thread still makes it"
    made.set_result(Mock())
    assert core.ready() == ["a", "c"]
    assert read_steps(memory) == InStep(True, ("a", "c"))
    core.admit("a")
    assert read_steps(memory) == InStep(True, ("c",))
    core.admit("c")
    assert read_steps(memory) == OUTSIDE


@pytest.mark.parametrize("overlap", [False, True])
def test_all_requests_of_a_scheduler_that_raises_are_recorded(
    memory: SharedMemory, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SchedulerConfig(max_model_len=256, max_num_seqs=1)
    core = recorded(make_core(overlap=overlap, config=config)[0], memory, "ab")
    core.step()
    monkeypatch.setattr(core.scheduler, "schedule", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert read_steps(memory) == InStep(True, ("a", "b"))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_scheduler_that_runs_none_of_its_requests_is_found_out(
    memory: SharedMemory, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "_EMPTY_STEPS", 3)
    core = recorded(make_core(overlap=overlap)[0], memory, "a")
    monkeypatch.setattr(core.scheduler._prefills, "plan", lambda budget: [])
    core.step()
    core.step()
    with pytest.raises(UBatchError, match=r"3 steps in a row had nothing to run: .*num_waiting=1"):
        core.step()
    assert read_steps(memory) == InStep(True, ("a",))


def test_a_request_that_kills_before_its_first_step_is_recorded_alone(memory: SharedMemory) -> None:
    core, link = recorded(make_core(overlap=False)[0], memory), Mock()
    engine = Engine(tiny(), 0, core, None, link)
    params = SamplingParams(max_tokens=3)
    engine._handle(Add(RequestInput("good", [1], params), 1))
    engine._handle(Add(RequestInput("empty", [], params), 2))
    assert isinstance(link.send.call_args.args[0], Refused)
    assert read_steps(memory) == OUTSIDE
    core.add = Mock(side_effect=ZeroDivisionError)  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine._handle(Add(RequestInput("bad", [1], params), 3))
    assert read_steps(memory) == InStep(True, ("bad",))


# -- what the next process takes over ----------------------------------------------------------------------------------


WAYS: Mapping[str, dict[str, Any]] = {
    "data parallel": {"ranks": 2, "expert_parallel": True},
    "tensor parallel": {"tensor_parallel_size": 2, "expert_parallel": True},
}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ranks leave behind in this test, as if they were started again."""
    left = {rank: KeptOfRank() for rank in range(2)}
    start = LocalEngines.__init__
    monkeypatch.setattr(
        LocalEngines, "__init__", lambda self, options, place, main, *_: start(self, options, place, main, left)
    )
    yield left
    for each in left.values():
        each.close()


async def outputs(options: EngineOptions) -> list[list[int]]:
    """What two requests give, one on each rank."""
    async with started(options, run_telling_engine) as client:
        one = tokens_of(client, "one", [5, 17, 99], PARAMS)
        return await asyncio.gather(one, tokens_of(client, "two", list(range(20, 90)), PARAMS))


@pytest.mark.parametrize("way", WAYS)
def test_the_next_ranks_attach_and_answer_alike(way: str, kept: Any, tmp_path: Path) -> None:
    options = tiny(**WAYS[way], profile_folder=tmp_path)
    first, second = (asyncio.run(outputs(options)) for _ in range(2))
    assert first == second
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["False\nTrue\n"] * 2


def test_what_is_kept_is_found_again_at_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 starts its ranks again at the number of its name, as the name may be gone with the network."""
    made = Mock(return_value=Mock(measured={}))
    monkeypatch.setattr(build, "KeptStart", made)
    monkeypatch.setattr(build, "remember_choices", Mock())
    for address, port in (("node-0", 29500), ("10.0.0.1", 29501)):
        build._kept_start(replace(tiny(), master_addr=address, master_port=port), 0, Mock())
    build._kept_start(tiny(dtype="bfloat16"), 0, Mock())
    first, second, other = (call.args[1] for call in made.call_args_list)
    assert first == second != other
