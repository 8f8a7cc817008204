"""The part of `ubatch bench engine` without a model: the scheduler's time per step, and how much the loop hides.

A fake device finishes each step a fixed time after the step before it, whatever the host does meanwhile. All requests
run and none ends, so that every step decodes all of them. The arms are interleaved:

    plain        schedule, launch, wait, process; then the next one
    overlapped   the next step is scheduled and launched, and the last one processed, while the device works
    host         the plain loop without a device: schedule, advance and process alone

In the plain loop the host takes longer than alone, because it wakes from a sleep with cold caches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attention import BlockAllocator, RequestToTokenTable
from model_runner import SamplingParams, Step, StepOutput
from serving.engine.rank.core import EngineCore
from serving.requests import RequestInput
from serving.scheduler import Scheduler, SchedulerConfig
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, print_arms
from ubatch import Decision, DeclineReason

_PROMPT_LEN = 32
_BLOCK = 16
_STEPS = 100  # per arm and visit
_DEVICE_S = 4e-3
_VOCABULARY = 1000


@dataclass(frozen=True)
class SchedulerResult:
    """Figures of the loops: raw block means of a step per arm; milliseconds per step for which the device waits for the
    host in the plain loop; and the share of that time that the overlapped loop removes."""

    running: int
    device_ms: float
    arms_ms: Mapping[str, Sequence[float]]
    exposed: Interval
    hidden: Interval

    def print(self) -> None:
        print(f"\nscheduler: {self.running} running requests; a device that takes {self.device_ms:g} ms a step")
        print_arms(self.arms_ms, ".3f", unit="ms a step")
        print(f"  the device waits in the plain loop   {self.exposed:.3f} ms a step")
        print(f"  of which the overlapped loop hides   {self.hidden:.2f}", flush=True)


class _Device:
    """A fake device: a step is done `seconds` after its launch, or after the step before it, whichever is later."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._free_at = 0.0

    def launch(self, step: Step, /) -> _Launched:
        self._free_at = max(time.perf_counter(), self._free_at) + self.seconds
        return _Launched(step, self._free_at)

    def restart_clock(self) -> None:
        """Does nothing: this device's steps have no vote."""


@dataclass
class _Launched:
    step: Step
    done_at: float

    def sample(self) -> None:
        """Does nothing: the tokens are fixed."""

    def result(self) -> StepOutput:
        """Sleep until the device is done."""
        if (left := self.done_at - time.perf_counter()) > 0:
            time.sleep(left)
        shares = len(self.step.shares)
        decision = Decision(False, DeclineReason.DISABLED, None, ((shares,),))
        nothing = ((),) * shares
        return StepOutput(((7,),) * shares, nothing, nothing, decision, all_idle=not shares)


def measure_scheduler(blocks: int, running: int = 64) -> SchedulerResult:
    steps = (blocks + 1) * 2 * _STEPS + 10  # steps per core; no request may end before
    cores = {
        "host": _core(0.0, running, steps, overlapped=False),
        "plain": _core(_DEVICE_S, running, steps, overlapped=False),
        "overlapped": _core(_DEVICE_S, running, steps, overlapped=True),
    }

    def per_step(core: EngineCore) -> float:
        start = time.perf_counter()
        for _ in range(_STEPS):
            core.step()
        core.drain()
        return (time.perf_counter() - start) * 1e3 / _STEPS

    arms = {name: functools.partial(per_step, core) for name, core in cores.items()}
    arms_ms = interleave_arms(arms, blocks, label="scheduler")
    exposed = [plain - _DEVICE_S * 1e3 for plain in arms_ms["plain"]]
    saved = [plain - overlapped for plain, overlapped in zip(arms_ms["plain"], arms_ms["overlapped"], strict=True)]
    return SchedulerResult(running, _DEVICE_S * 1e3, arms_ms, bootstrap(exposed), paired(saved, exposed))


def _core(device_s: float, running: int, steps: int, *, overlapped: bool) -> EngineCore:
    """An engine whose `running` requests all decode for `steps` steps."""
    length = _PROMPT_LEN + steps
    blocks = -(-length // _BLOCK)
    config = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=max(2048, running * _PROMPT_LEN), max_model_len=length
    )
    scheduler = Scheduler(
        config,
        BlockAllocator(2 * running * blocks),
        RequestToTokenTable(running, blocks, _BLOCK),
        eos_token_ids=(0,),
        vocab_size=_VOCABULARY,
    )
    core = EngineCore(_Device(device_s), scheduler, overlap_schedule=overlapped)
    for index in range(running):
        prompt = [index + 1] * _PROMPT_LEN  # no two prompts share a prefix
        core.add(RequestInput(str(index), prompt, SamplingParams(max_tokens=steps)))
    while scheduler.num_waiting:
        core.step()
    return core
