"""Ranks that pause together, without a rank that sleeps while another steps: late wake-ups, on two real gloo ranks."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice, FakeLink, FakeStep, make_core
from fake_runner import expected

from model_runner import SamplingParams, Step
from ranks import run_ranks
from serving.engine.options import EngineOptions
from serving.engine.rank.process import Engine
from serving.engine.wire.messages import Add, Shutdown, ToEngine, Wake
from serving.requests import RequestInput
from ubatch import CommGroup

pytestmark = pytest.mark.ranks

Script = Sequence[tuple[float, ToEngine]]

LONG = RequestInput("long", [1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True))
SHORT = RequestInput("short", [4, 5], SamplingParams(max_tokens=1, ignore_eos=True))


class ScriptedLink(FakeLink):
    """Messages that come at set times, in seconds from the first look; `Shutdown` only to one that sleeps."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.slept = 0
        self._script = list(script)
        self._begun: float | None = None

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        self._begun = self._begun or time.monotonic()
        self.slept += wait_s > 0
        until = time.monotonic() + wait_s
        while self._script and self._due() > time.monotonic() and time.monotonic() < until:
            time.sleep(0.005)
        while self._script and self._due() <= time.monotonic():
            if isinstance(self._script[0][1], Shutdown) and not wait_s:
                return
            yield self._script.pop(0)[1]

    def _due(self) -> float:
        return self._begun + self._script[0][0]


class SharedDevice(FakeDevice):
    """A step is an all-reduce: it ends only when every rank takes it."""

    def launch(self, step: Step, /) -> FakeStep:
        total = torch.tensor(len(step.shares))
        dist.all_reduce(total)
        self.peers_busy = int(total) > len(step.shares)
        return super().launch(step)


def serve(rank: int, world_size: int, overlap: bool, scripts: Sequence[Script]) -> tuple[dict[str, list[int]], int]:
    """Run a rank's script; returns what came out, and how often it slept."""
    core, _, _ = make_core(overlap=overlap, device=SharedDevice)
    group = CommGroup.from_process_group(timeout_s=20)
    link = ScriptedLink(scripts[rank])
    dist.barrier()
    options = EngineOptions(Path("model"), data_parallel_size=2)
    Engine(options, rank, core, group, link).serve()
    return link.tokens(), link.slept


def tokens_of(request: RequestInput) -> list[int]:
    return expected(request.token_ids, request.params)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wake_up_that_comes_late_finds_nobody_asleep(overlap: bool) -> None:
    """Rank 0 has served the second request long before rank 1 hears that there is one. Had both paused by then, rank 1
    would wake, and wait for a step of rank 0 that never comes."""
    scripts: list[Script] = [
        [(0.0, Add(LONG, 1)), (0.0, Add(SHORT, 2)), (1.0, Shutdown())],
        [(0.0, Wake(1)), (0.5, Wake(2)), (1.0, Shutdown())],
    ]
    (first, slept), (second, also_slept) = run_ranks(serve, 2, overlap, scripts)
    assert first == {"long": tokens_of(LONG), "short": tokens_of(SHORT)}
    assert second == {}
    assert slept == also_slept == 2  # before the first request, and after the last


@pytest.mark.parametrize("overlap", [False, True])
def test_paused_ranks_wake_for_a_request_of_either(overlap: bool) -> None:
    scripts: list[Script] = [
        [(0.3, Wake(1)), (0.6, Add(SHORT, 2)), (1.0, Shutdown())],
        [(0.3, Add(LONG, 1)), (0.6, Wake(2)), (1.0, Shutdown())],
    ]
    (first, slept), (second, also_slept) = run_ranks(serve, 2, overlap, scripts)
    assert (first, second) == ({"short": tokens_of(SHORT)}, {"long": tokens_of(LONG)})
    assert slept == also_slept > 0
