"""One step from the scheduler into the lanes: the same object's fields all the way, and few calls of Python."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from c_kernels import needs_c
from engine_mains import core_over
from repository import ROOT, TINY_MOE

from model_runner import ModelRunner, SamplingParams, Step
from ranks import run_ranks
from serving.engine.rank.core import EngineCore
from serving.requests import RequestInput
from serving.scheduler import Scheduler
from ubatch import CommGroup, UBatchConfig
from ubatch.wrapping.execution import Execution

REQUESTS = 8
MOST_CALLS = 1400
"""Of functions of this project, on all threads, in a step of 8 requests: on one rank, and on each of two that share the
experts."""
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("ubatch", "moe", "attention", "model_runner", "serving"))


@contextmanager
def overlapping_core(group: CommGroup | None = None) -> Iterator[EngineCore]:
    """Decodes in two lanes."""
    dbo = UBatchConfig(dbo_decode_token_threshold=2, dbo_prefill_token_threshold=100_000)
    with ModelRunner(TINY_MOE, group=group, dbo=dbo, max_num_seqs=REQUESTS) as runner:
        core = core_over(runner, overlap=group is not None, max_num_seqs=REQUESTS, max_model_len=128)
        for index in range(REQUESTS):
            core.add(RequestInput(str(index), [index + 1, 7, 9], SamplingParams(max_tokens=60, ignore_eos=True)))
        yield core


@pytest.mark.long
def test_what_the_scheduler_has_planned_enters_the_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Step] = []
    entered: list[Any] = []
    schedule, run = Scheduler.schedule, Execution.run
    monkeypatch.setattr(Scheduler, "schedule", lambda self: planned.append(schedule(self)) or planned[-1])
    monkeypatch.setattr(Execution, "run", lambda self, step, *rest: entered.append(step) or run(self, step, *rest))
    with overlapping_core() as core:
        for _ in range(4):
            core.step()
        assert core.statistics().steps == {"prefill/below_prefill_threshold": 1, "decode/engaged": 3}
    assert len(planned) == len(entered) == 4
    for before, step in zip(planned, entered, strict=True):
        assert isinstance(step, Step)
        assert step.shares is before.shares
        assert before.decision is None, "nothing is changed in place"
        lanes = 2 if step.decision.engaged else 1
        assert len(step.calls) == len(step.contexts) == lanes
        assert sum(context.num_tokens for context in step.contexts) == step.num_tokens


def calls_of_a_step(group: CommGroup | None = None) -> Counter[str]:
    """Of three steps, those of the one with the fewest: a step in which requests get KV blocks, or which is traced, has
    more, and so has one in which another rank is late."""
    calls: Counter[str] | None = None

    def count(frame: FrameType, event: str, argument: object) -> None:
        if calls is not None and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            calls[frame.f_code.co_qualname] += 1

    outer: Callable[..., Any] | None = sys.getprofile()
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        with overlapping_core(group) as core:
            for _ in range(12):
                core.step()
            found = []
            for _ in range(3):
                calls = Counter()
                core.step()
                found.append(calls)
                calls = None
            assert core.statistics().steps["decode/engaged"] >= 11
            core.drain()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(outer)
    return min(found, key=Counter.total)


@pytest.mark.long
@needs_c
def test_a_decode_step_in_lanes_calls_little_python() -> None:
    calls = calls_of_a_step()
    assert 200 < calls.total() <= MOST_CALLS, calls.most_common(20)


def calls_of_a_rank(rank: int, world_size: int) -> Counter[str]:
    return calls_of_a_step(CommGroup.from_process_group(timeout_s=30.0))


@needs_c
@pytest.mark.ranks
def test_a_step_whose_experts_are_on_two_ranks_calls_little_python() -> None:
    for calls in run_ranks(calls_of_a_rank, 2):
        again = max(0, calls["NearRanks.read"] - calls["NearWork.wait"])  # while the other rank is late
        assert 400 < calls.total() - again <= MOST_CALLS, calls.most_common(40)
