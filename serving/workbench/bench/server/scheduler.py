"""The part of `ubatch bench engine` without a model: the scheduler's time per step, and how much the loop hides.

On a fake device (`fake_device`) all requests run and none ends, so that every step decodes all of them. The arms are
interleaved:

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

from model_runner import SamplingParams
from serving.engine.rank.core import EngineCore
from serving.requests import RequestInput
from serving.scheduler import SchedulerConfig
from serving.workbench.bench.server.fake_device import FakeDevice, fake_engine
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, print_arms

_PROMPT_LEN = 32
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
    tokens = max(2048, running * _PROMPT_LEN)
    config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=tokens, max_model_len=_PROMPT_LEN + steps)
    core = fake_engine(FakeDevice(device_s), config, _VOCABULARY, overlapped=overlapped)
    for index in range(running):
        prompt = [index + 1] * _PROMPT_LEN  # no two prompts share a prefix
        core.add(RequestInput(str(index), prompt, SamplingParams(max_tokens=steps)))
    while core.scheduler.num_waiting:
        core.step()
    return core
