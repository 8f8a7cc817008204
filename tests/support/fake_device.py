"""An asynchronous device on a virtual clock, and a scheduler whose own work takes time on the same clock.

Nothing here sleeps. `clock.now` is the host's time; the device works on one step after the other meanwhile, and
`result()` moves the host's time to where the step is done. So what a loop costs is exact, whatever the machine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from attention import BlockAllocator, RequestToTokenTable
from model_runner import PENDING_TOKEN, SamplingParams, ScheduledRequest, Step, StepOutput
from serving.engine import EngineCore
from serving.requests import EngineStatistics, RequestInput, RequestOutput
from serving.scheduler import Scheduler, SchedulerConfig
from ubatch import Decision, DeclineReason

EOS = 0
VOCAB = 97

DECLINED = Decision(False, DeclineReason.DISABLED, None, ((1,),))
ENGAGED = Decision(True, None, None, ((1, 1),))


def next_token(tokens: Sequence[int]) -> int:
    """What this model says after `tokens`: depends on every one of them."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCAB


def expected_output(prompt: Sequence[int], params: SamplingParams, max_len: int = 1 << 30) -> list[int]:
    """What a request must give."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens and len(tokens) < max_len:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


@dataclass
class Clock:
    """The host's time in seconds, and what happened, in order."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)


class FakeDevice:
    """Runs one step after the other, each for `step_s` seconds.

    Attributes:
        decide: what the vote of a step says.
        peers_busy: other ranks have work, so that an empty step is not an idle one.
    """

    def __init__(self, clock: Clock, step_s: float = 0.0) -> None:
        self.clock = clock
        self.step_s = step_s
        self.decide: Callable[[], Decision] = lambda: DECLINED
        self.peers_busy = False
        self.on_launch: Callable[[], None] = lambda: None
        self.future: dict[str, int] = {}
        self._free_at = 0.0
        self._steps = 0

    def launch(self, step: Step, /) -> FakeStep:
        number = self._steps
        self._steps += 1
        self.clock.log.append(f"launch {number}")
        self.on_launch()
        if step.shares:
            self._free_at = max(self.clock.now, self._free_at) + self.step_s
        return FakeStep(self, number, step, self._free_at)

    def restart_clock(self) -> None:
        """Its votes tell no times."""


class FakeStep:
    """A step on the device, from its launch on."""

    def __init__(self, device: FakeDevice, number: int, step: Step, done_at: float) -> None:
        self.step, self._shares = step, step.shares
        self._device, self._number, self._done_at = device, number, done_at
        self._lengths = [len(share.request.token_ids) if share.samples else 0 for share in step.shares]
        self._decision = device.decide()
        self._tokens: list[tuple[int, ...]] | None = None

    def sample(self) -> None:
        assert self._tokens is None, "sampled twice"
        self._device.clock.log.append(f"sample {self._number}")
        self._tokens = [self._sample(share, length) for share, length in zip(self._shares, self._lengths, strict=True)]

    def _sample(self, share: ScheduledRequest, length: int) -> tuple[int, ...]:
        if not length:
            return ()
        request, future = share.request, self._device.future
        tokens = request.token_ids[:length]
        if request.params.needs_history:
            assert PENDING_TOKEN not in tokens, "its sampling depends on a token that the host does not know"
        assert PENDING_TOKEN not in tokens[:-1], "only the step before may be unprocessed"
        if tokens[-1] == PENDING_TOKEN:
            tokens[-1] = future[str(request.request_id)]
        future[str(request.request_id)] = next_token(tokens)
        return (future[str(request.request_id)],)

    def result(self) -> StepOutput:
        assert self._tokens is not None, "not sampled"
        clock = self._device.clock
        if self._shares:
            clock.now = max(clock.now, self._done_at)
        clock.log.append(f"result {self._number}")
        nothing: tuple[tuple[()], ...] = ((),) * len(self._shares)
        idle = not self._shares and not self._device.peers_busy
        return StepOutput(tuple(self._tokens), nothing, nothing, self._decision, idle)


class TimedScheduler:
    """The real scheduler; every step of it costs the host `step_s` seconds, half before its launch and half after."""

    def __init__(self, scheduler: Scheduler, clock: Clock, step_s: float = 0.0) -> None:
        self._scheduler, self._clock, self._step_s = scheduler, clock, step_s

    def add(self, request: RequestInput) -> None:
        self._scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        return self._scheduler.abort(request_id)

    def schedule(self) -> Step:
        step = self._scheduler.schedule()
        self._work(step)
        return step

    def advance(self, step: Step) -> None:
        self._scheduler.advance(step)

    def process(self, step: Step, output: StepOutput) -> list[RequestOutput]:
        self._work(step)
        return self._scheduler.process(step, output)

    def statistics(self) -> EngineStatistics:
        return self._scheduler.statistics()

    def check(self, *, idle: bool = False) -> None:
        self._scheduler.check(idle=idle)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def _work(self, step: Step) -> None:
        if step.shares:
            self._clock.now += self._step_s / 2


def make_core(
    *,
    overlap: bool,
    device_s: float = 0.0,
    host_s: float = 0.0,
    blocks: int = 256,
    block_size: int = 4,
    config: SchedulerConfig | None = None,
) -> tuple[EngineCore, FakeDevice, Clock]:
    """A loop over the real scheduler and a fake device, with small pages."""
    config = SchedulerConfig(max_model_len=256) if config is None else config
    clock = Clock()
    device = FakeDevice(clock, device_s)
    rows = -(-config.max_model_len // block_size)
    scheduler = Scheduler(
        config,
        BlockAllocator(blocks),
        RequestToTokenTable(config.max_num_seqs, rows, block_size),
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
    )
    timed = TimedScheduler(scheduler, clock, host_s)
    return EngineCore(device, timed, overlap_schedule=overlap), device, clock


def run(core: EngineCore, requests: Iterable[RequestInput]) -> dict[str, list[int]]:
    """Serve requests to their end; returns their tokens. The books must balance after that."""
    outputs: dict[str, list[int]] = {}
    for request in requests:
        core.add(request)
        outputs[request.request_id] = []
    while core.has_work:
        for output in core.step():
            outputs[output.request_id] += output.token_ids
    core.scheduler.check(idle=True)
    return outputs
