"""A fake device, which finishes each step a fixed time after the step before it, whatever the host does meanwhile; and
what is measured on it.

The part of `ubatch bench engine` without a model has the scheduler's time per step, and how much the loop hides: all
requests run and none ends, so that every step decodes all of them. The arms are interleaved:

    plain        schedule, launch, wait, process; then the next one
    overlapped   the next step is scheduled and launched, and the last one processed, while the device works
    host         the plain loop without a device: schedule, advance and process alone

In the plain loop the host takes longer than alone, because it wakes from a sleep with cold caches.

The part of `ubatch bench structured` with a device that works on its own, as a GPU does, says the tokens of a recorded
run. The host does all that it does in the overlap loop, and fills the masks of every step, so it shows how much of that
the device's time hides. Applying masks is the device's work, and is left out.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from attention import BlockAllocator, RequestToTokenTable
from model_runner import GrammarRows, SamplingParams, Step, StepOutput, TokenGrammar
from serving.engine.rank.core import EngineCore
from serving.requests import RequestInput
from serving.scheduler import Scheduler, SchedulerConfig
from serving.workbench.bench.statistics import Interval, bootstrap, interleave_arms, paired, print_arms
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


# -- the scheduler -----------------------------------------------------------------------------------------------------


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


# -- grammars ----------------------------------------------------------------------------------------------------------


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
