"""A fake device, which finishes each step a fixed time after the step before it, whatever the host does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attention import BlockAllocator, RequestToTokenTable
from model_runner import Step, StepOutput
from serving.engine.rank.core import EngineCore
from serving.scheduler import Scheduler, SchedulerConfig
from ubatch import Decision, DeclineReason

_BLOCK = 16


@dataclass
class FakeStep:
    """A step in flight; every token is 7."""

    step: Step
    done_at: float

    def sample(self) -> None:
        """Does nothing: the tokens are fixed."""

    def tokens(self) -> Sequence[int]:
        """The token of each request."""
        return (7,) * len(self.step.shares)

    def result(self) -> StepOutput:
        """Sleep until the device is done."""
        if (left := self.done_at - time.perf_counter()) > 0:
            time.sleep(left)
        tokens = self.tokens()
        nothing = ((),) * len(tokens)
        decision = Decision(False, DeclineReason.DISABLED, None, ((len(tokens),),))
        return StepOutput(tuple((token,) for token in tokens), nothing, nothing, decision, all_idle=not tokens)


class FakeDevice:
    """A step with requests is done `seconds` after its launch, or after the step before it, whichever is later.

    Args:
        kind: makes a step in flight, of the step and the time at which it is done.
    """

    def __init__(self, seconds: float, kind: Callable[[Step, float], FakeStep] = FakeStep) -> None:
        self.seconds, self._kind = seconds, kind
        self._free_at = 0.0

    def launch(self, step: Step, /) -> FakeStep:
        if step.shares:
            self._free_at = max(time.perf_counter(), self._free_at) + self.seconds
        return self._kind(step, self._free_at)

    def restart_clock(self) -> None:
        """Does nothing: this device's steps have no vote."""


def fake_engine(device: FakeDevice, config: SchedulerConfig, vocab_size: int, *, overlapped: bool) -> EngineCore:
    """An engine on a fake device, with KV for two of each request; no token ends a request."""
    running = config.max_num_seqs
    blocks = -(-config.max_model_len // _BLOCK)
    allocator, table = BlockAllocator(2 * running * blocks), RequestToTokenTable(running, blocks, _BLOCK)
    scheduler = Scheduler(config, allocator, table, eos_token_ids=(vocab_size,), vocab_size=vocab_size)
    return EngineCore(device, scheduler, overlap_schedule=overlapped)
