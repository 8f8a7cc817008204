"""The part of `ubatch bench structured` with a device that works on its own, as a GPU does.

A fake device finishes each step a fixed time after the step before it, whatever the host does meanwhile, and says the
tokens of a recorded run. The host does all that it does in the overlap loop, and fills the masks of every step, so it
shows how much of that the device's time hides. Applying masks is the device's work, and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attention import BlockAllocator, RequestToTokenTable
from model_runner import GrammarRows, SamplingParams, Step, StepOutput, TokenGrammar
from serving.engine.rank.core import EngineCore
from serving.requests import RequestInput
from serving.scheduler import Scheduler, SchedulerConfig
from serving.workbench.bench.statistics import interleave_arms
from ubatch import Decision, DeclineReason

_BLOCK = 16


def measure_device(
    outputs: Sequence[Sequence[int]], make: Callable[[], TokenGrammar], vocab_size: int, device_ms: float, blocks: int
) -> dict[str, list[float]]:
    """Milliseconds of a step, by arm: with a grammar at no request, at one, and at all.

    Args:
        outputs: what the requests say; all equally long.
        make: makes a request's grammar, which allows these outputs.
    """
    count = len(outputs)
    arms = {"free": 0, "one": 1, "all": count}
    visit = partial(_visit, outputs, make, vocab_size, device_ms * 1e-3)
    return interleave_arms({name: partial(visit, bound) for name, bound in arms.items()}, blocks, label="device")


def _visit(
    outputs: Sequence[Sequence[int]], make: Callable[[], TokenGrammar], vocab_size: int, device_s: float, bound: int
) -> float:
    count, new = len(outputs), len(outputs[0])
    pages = -(-(new + 2) // _BLOCK)
    config = SchedulerConfig(
        max_num_seqs=count, max_num_batched_tokens=max(2048, count), max_model_len=new + 2, enable_prefix_caching=False
    )
    allocator, table = BlockAllocator(2 * count * pages), RequestToTokenTable(count, pages, _BLOCK)
    scheduler = Scheduler(config, allocator, table, eos_token_ids=(vocab_size,), vocab_size=vocab_size)
    core = EngineCore(_Device(device_s, outputs), scheduler, overlap_schedule=True)
    for index in range(count):
        params = SamplingParams(max_tokens=new, grammar="recorded" if index < bound else None)
        scheduler.add(RequestInput(str(index), [index], params), make() if index < bound else None)
    start = time.perf_counter()
    while core.has_work:
        core.step()
    return (time.perf_counter() - start) * 1e3 / new


class _Device:
    """A step is done `seconds` after its launch, or after the step before it, whichever is later."""

    def __init__(self, seconds: float, outputs: Sequence[Sequence[int]]) -> None:
        self.seconds, self._outputs = seconds, outputs
        self._free_at = 0.0

    def launch(self, step: Step, /) -> _Launched:
        if step.shares:
            self._free_at = max(time.perf_counter(), self._free_at) + self.seconds
        lengths = [share.request.num_tokens for share in step.shares]
        return _Launched(step, self._free_at, lengths, self._outputs)

    def restart_clock(self) -> None:
        """Does nothing: this device's steps have no vote."""


@dataclass
class _Launched:
    """A step in flight; `lengths` of its requests at the launch."""

    step: Step
    done_at: float
    lengths: Sequence[int]
    outputs: Sequence[Sequence[int]]

    def sample(self) -> None:
        """Fill the masks, as the host does while the forward runs."""
        if not self.step.delay_sampling:
            return
        pairs = zip(self.step.shares, self.lengths, strict=True)
        own = [share.request.grammar_after(length) for share, length in pairs if share.request.grammar is not None]
        masks = torch.zeros(len(own), own[0].masks.words, dtype=torch.int32)
        own[0].masks.fill([GrammarRows(grammar, place) for place, grammar in enumerate(own)], masks)

    def result(self) -> StepOutput:
        """Sleep until the device is done."""
        if (left := self.done_at - time.perf_counter()) > 0:
            time.sleep(left)
        shares = self.step.shares
        places = [length - share.request.num_prompt_tokens for share, length in zip(shares, self.lengths, strict=True)]
        own = [self.outputs[int(share.request.request_id)] for share in shares]
        said = tuple((tokens[place],) for tokens, place in zip(own, places, strict=True))
        nothing = ((),) * len(shares)
        decision = Decision(False, DeclineReason.DISABLED, None, ((len(shares),),))
        return StepOutput(said, nothing, nothing, decision, all_idle=not shares)
