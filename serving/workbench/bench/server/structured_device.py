"""The part of `ubatch bench structured` with a device that works on its own, as a GPU does.

A fake device (`fake_device`) says the tokens of a recorded run. The host does all that it does in the overlap loop, and
fills the masks of every step, so it shows how much of that the device's time hides. Applying masks is the device's
work, and is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from model_runner import GrammarRows, SamplingParams, Step, TokenGrammar
from serving.requests import RequestInput
from serving.scheduler import SchedulerConfig
from serving.workbench.bench.server.fake_device import FakeDevice, FakeStep, fake_engine
from serving.workbench.bench.statistics import interleave_arms


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
    config = SchedulerConfig(
        max_num_seqs=count, max_num_batched_tokens=max(2048, count), max_model_len=new + 2, enable_prefix_caching=False
    )
    core = fake_engine(FakeDevice(device_s, partial(_Recorded, outputs)), config, vocab_size, overlapped=True)
    for index in range(count):
        params = SamplingParams(max_tokens=new, grammar="recorded" if index < bound else None)
        core.scheduler.add(RequestInput(str(index), [index], params), make() if index < bound else None)
    start = time.perf_counter()
    while core.has_work:
        core.step()
    return (time.perf_counter() - start) * 1e3 / new


class _Recorded(FakeStep):
    """A step that says the tokens of a recorded run."""

    def __init__(self, outputs: Sequence[Sequence[int]], step: Step, done_at: float) -> None:
        super().__init__(step, done_at)
        self._outputs = outputs
        self._lengths = [share.request.num_tokens for share in step.shares]  # at the launch

    def sample(self) -> None:
        """Fill the masks, as the host does while the forward runs."""
        if not self.step.delay_sampling:
            return
        pairs = zip(self.step.shares, self._lengths, strict=True)
        own = [share.request.grammar_after(length) for share, length in pairs if share.request.grammar is not None]
        masks = torch.zeros(len(own), own[0].masks.words, dtype=torch.int32)
        own[0].masks.fill([GrammarRows(grammar, place) for place, grammar in enumerate(own)], masks)

    def tokens(self) -> Sequence[int]:
        requests = zip((share.request for share in self.step.shares), self._lengths, strict=True)
        return [self._outputs[int(own.request_id)][length - own.num_prompt_tokens] for own, length in requests]
