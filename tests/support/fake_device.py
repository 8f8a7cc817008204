"""The fake runner as an asynchronous device on a virtual clock, on which scheduling takes time, too.

Nothing here sleeps. `clock.now` is the host's time; the device works on one step after the other meanwhile, and
`result()` moves the host's time to where the step is done. So what a loop costs is exact, whatever the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fake_runner import EOS, VOCAB, FakePending, FakeRunner

from model_runner import Step, StepOutput
from serving.engine import EngineCore
from serving.engine.wire.messages import FromEngine, Outputs, ToEngine
from serving.requests import RequestInput
from serving.scheduler import Scheduler, SchedulerConfig
from ubatch import Decision, DeclineReason

DECLINED = Decision(False, DeclineReason.DISABLED, None, ((1,),))
ENGAGED = Decision(True, None, None, ((1, 1),))


@dataclass
class Clock:
    """The host's time in seconds, and what happened, in order."""

    now: float = 0.0
    log: list[str] = field(default_factory=list)


class FakeDevice:
    """Runs one step after the other, each for `device_s` seconds; half of `host_s` passes before each, half after.

    Attributes:
        decide: what the vote of a step says.
        peers_busy: other ranks have work, so that an empty step is not an idle one.
    """

    def __init__(self, runner: FakeRunner, device_s: float = 0.0, host_s: float = 0.0) -> None:
        self.runner, self.clock = runner, Clock()
        self.device_s, self.host_s = device_s, host_s
        self.decide: Callable[[], Decision] = lambda: DECLINED
        self.peers_busy = False
        self.on_launch: Callable[[], None] = lambda: None
        self._free_at = 0.0
        self._steps = 0

    def launch(self, step: Step, /) -> FakeStep:
        number = self._steps
        self._steps += 1
        self.clock.log.append(f"launch {number}")
        self.on_launch()
        if step.shares:
            self.clock.now += self.host_s / 2
            self._free_at = max(self.clock.now, self._free_at) + self.device_s
        return FakeStep(self, number, step, self.runner.launch(step.shares), self._free_at)

    def restart_clock(self) -> None:
        """Its votes tell no times."""


class FakeStep:
    """A step on the device, from its launch on."""

    def __init__(self, device: FakeDevice, number: int, step: Step, pending: FakePending, done_at: float) -> None:
        self.step, self._device, self._pending, self._done_at = step, device, pending, done_at
        self._number, self._decision = number, device.decide()

    def sample(self) -> None:
        self._device.clock.log.append(f"sample {self._number}")
        self._pending.sample()

    def result(self) -> StepOutput:
        clock, output = self._device.clock, self._pending.result()
        if self.step.shares:
            clock.now = max(clock.now, self._done_at) + self._device.host_s / 2
        clock.log.append(f"result {self._number}")
        return replace(output, decision=self._decision, all_idle=output.all_idle and not self._device.peers_busy)


def make_core(
    *,
    overlap: bool,
    device_s: float = 0.0,
    host_s: float = 0.0,
    blocks: int = 256,
    config: SchedulerConfig | None = None,
    device: type[FakeDevice] = FakeDevice,
) -> tuple[EngineCore, FakeDevice, Clock]:
    """A loop over the real scheduler and a fake device, with small pages."""
    config = SchedulerConfig(max_model_len=256) if config is None else config
    runner = FakeRunner(blocks, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len)
    made = device(runner, device_s, host_s)
    scheduler = Scheduler(config, runner.allocator, runner.table, eos_token_ids=(EOS,), vocab_size=VOCAB)
    return EngineCore(made, scheduler, overlap_schedule=overlap), made, made.clock  # type: ignore[arg-type]


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


class FakeLink:
    """The client's end of a rank's link, without a socket: what the client says, and what it hears."""

    def __init__(self, *messages: ToEngine) -> None:
        self.to_engine: list[ToEngine] = list(messages)
        self.heard: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.heard.append(message)

    def decide(self, messages: Sequence[ToEngine]) -> Sequence[ToEngine]:
        return messages

    def receive(self, wait_s: float = 0.0) -> Iterator[ToEngine]:
        if wait_s and not self.to_engine:
            time.sleep(0.001)
        while self.to_engine:
            yield self.to_engine.pop(0)

    def close(self) -> None:
        pass

    def tokens(self) -> dict[str, list[int]]:
        """What came out for each request."""
        tokens: dict[str, list[int]] = {}
        for message in self.heard:
            for output in message.outputs if isinstance(message, Outputs) else ():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        return tokens
