"""A schedule on an ideal machine: no hand-off cost, no noise, one link.

The input is each lane's program: compute for some time, launch a transfer that occupies the link for some time, pass a
point, wait. The result is a time line. It uses the same `Ring` and `Schedule` as the runtime, so a difference between
its time line and a measured one is a cost of the runtime, not of the schedule.

The machine: one core per rank, run by the lane that holds the baton; one full-duplex link, first come first served in
each direction; a lane that waits keeps the baton. `simulate` assumes that all ranks are alike and simulates one;
`simulate_ranks` calls it for every rank and lets ranks wait for each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from ubatch.errors import ConfigError
from ubatch.schedules.ring import Ring
from ubatch.schedules.schedule import Recv, Schedule
from ubatch.trace.spans import Event, EventKind, Span, SpanKind, Trace


@dataclass(frozen=True)
class Compute:
    """The lane computes for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Launch:
    """The lane launches transfer `key`, which occupies the sending direction of the link for `seconds`.

    The receiving direction is occupied for `receive_s`, or `seconds` if that is None. If `hooked`, a lane that keeps
    the baton at its next point waits there for the transfer; otherwise it waits at its `Wait`.
    """

    key: str
    seconds: float
    receive_s: float | None = None
    hooked: bool = True


@dataclass(frozen=True)
class Pass:
    """The lane passes a point. `layer` is the kind of layer, as traced; the simulator does not read it."""

    point: str
    layer: str = ""


@dataclass(frozen=True)
class Wait:
    """The lane needs transfer `key`."""

    key: str


Op = Compute | Launch | Pass | Wait
Programs = Sequence[Sequence[Op]]
"""One program per lane."""
Launches = Mapping[tuple[int, str], float]
"""`(lane, key)` of a transfer -> when it was launched."""


@dataclass
class Timeline:
    """A simulated step, filled while it is simulated.

    Attributes:
        seconds: from the first op to the last.
        compute_s: all lanes' compute.
        communication_s: time the busier direction of the link was busy.
        exposed_s: time a lane held the baton and waited.
        order: `(lane, point)` per active point passed and per lane that ended, as `Trace.order`.
        spans: for `ubatch.trace.export`.
        launched: `(lane, key)` of every transfer -> when it was launched.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    order: list[tuple[int, str]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    launched: dict[tuple[int, str], float] = field(default_factory=dict)


@dataclass(eq=False)
class _Machine:
    """The state of one simulated step; of the link, that of sending and that of receiving."""

    programs: Programs
    schedule: Schedule
    handoff_s: float
    peers: Launches
    line: Timeline = field(default_factory=Timeline)
    arrival: dict[tuple[int, str], float] = field(default_factory=dict)
    now: float = 0.0
    link_free: list[float] = field(default_factory=lambda: [0.0, 0.0])
    link_busy: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def __post_init__(self) -> None:
        self.ring = Ring(len(self.programs), self.schedule.lead)
        self.next_op = [0] * len(self.programs)
        self.pending: list[list[str]] = [[] for _ in self.programs]

    def run_lane(self, lane: int) -> int:
        """Run `lane` until it hands on; returns the next lane, -1 at the end."""
        program = self.programs[lane]
        while self.next_op[lane] < len(program):
            op = program[self.next_op[lane]]
            self.next_op[lane] += 1
            match op:
                case Compute(seconds):
                    self.compute(lane, seconds)
                case Launch():
                    if self.schedule.recv is Recv.PEER:
                        self.wait_for_all((lane - 1) % len(self.programs), lane)
                    self.launch(lane, op)
                case Wait(key):
                    self.wait(lane, lane, key)
                case Pass(point) if self.schedule.active(point):
                    self.line.order.append((lane, str(point)))
                    following = self.ring.at_point(lane)
                    if following != lane:
                        self.now += self.handoff_s
                        return following
                    self.wait_for_all(lane, lane)  # a lane that keeps the baton runs its own receive hook
                case Pass():
                    self.wait_for_all(lane, lane)
        self.wait_for_all(lane, lane)
        self.line.order.append((lane, "end"))
        return self.ring.at_end(lane)

    def compute(self, lane: int, seconds: float) -> None:
        if seconds > 0:
            self.line.spans.append(Span(SpanKind.COMPUTE, "compute", lane, self.now, self.now + seconds, 1))
        self.now += seconds
        self.line.compute_s += seconds

    def launch(self, lane: int, op: Launch) -> None:
        """Launch a transfer. A direction without data is not occupied. It arrives after all peers have launched it."""
        seconds = op.seconds, op.seconds if op.receive_s is None else op.receive_s
        begins = {way: max(self.now, self.link_free[way]) for way, needed in enumerate(seconds) if needed > 0}
        for way, begin in begins.items():
            self.link_free[way] = begin + seconds[way]
            self.link_busy[way] += seconds[way]
        start = min(begins.values(), default=self.now)
        finish = max((self.link_free[way] for way in begins), default=self.now)
        self.line.launched[lane, op.key] = self.now
        finish = max(finish, self.peers.get((lane, op.key), finish))
        self.arrival[lane, op.key] = finish
        if op.hooked:
            self.pending[lane].append(op.key)
        self.line.spans.append(Span(SpanKind.TRANSFER, op.key, lane, start, finish, 1))

    def wait(self, owner: int, runner: int, key: str) -> None:
        if (owner, key) not in self.arrival:
            raise ConfigError(f"lane {owner} waits for transfer {key!r}, which it has not launched.")
        if key in self.pending[owner]:
            self.pending[owner].remove(key)
        arrival = self.arrival[owner, key]
        if arrival > self.now:
            self.line.spans.append(Span(SpanKind.WAIT, key, runner, self.now, arrival, 1))
            self.line.exposed_s += arrival - self.now
            self.now = arrival

    def wait_for_all(self, owner: int, runner: int) -> None:
        for key in list(self.pending[owner]):
            self.wait(owner, runner, key)


def simulate(programs: Programs, schedule: Schedule, handoff_s: float = 0.0, peers: Launches | None = None) -> Timeline:
    """Run one program per lane under `schedule`.

    Args:
        schedule: the order of the lanes.
        handoff_s: seconds that a hand-off of the baton costs; 0 on an ideal machine.
        peers: `(lane, key)` of a transfer -> when its last peer launches it; it arrives no earlier.

    Raises:
        ConfigError: a program waits for a transfer that it did not launch.
    """
    machine = _Machine(programs, schedule, handoff_s, peers or {})
    lane = 0
    while lane >= 0:
        lane = machine.run_lane(lane)
    machine.line.seconds, machine.line.communication_s = machine.now, max(machine.link_busy)
    return machine.line


def simulate_ranks(of_ranks: Sequence[Programs], schedule: Schedule, handoff_s: float = 0.0) -> list[Timeline]:
    """Run every rank's programs under `schedule`; a transfer arrives only after every rank has launched it.

    Each rank has its own link, like an emulated link. A rank that is slower in one layer, because its experts got more
    tokens, makes the others wait there; in another layer it waits for them.

    Args:
        of_ranks: every rank's programs, as of `simulate`.

    Returns:
        A timeline per rank.

    Raises:
        ConfigError: as `simulate`; or the ranks do not launch the same transfers.
    """
    launched: dict[tuple[int, str], float] = {}
    while True:  # the order of lanes does not depend on times, so each round settles at least one more transfer
        lines = [simulate(programs, schedule, handoff_s, launched) for programs in of_ranks]
        if len({frozenset(line.launched) for line in lines}) != 1:
            raise ConfigError("the ranks do not launch the same transfers. Take programs of one step of all ranks.")
        if any(len(line.launched) != _launches(own) for line, own in zip(lines, of_ranks, strict=True)):
            raise ConfigError("a lane launches two transfers of the same key; the ranks' cannot be told apart.")
        before, launched = launched, {key: max(line.launched[key] for line in lines) for key in lines[0].launched}
        if launched == before:
            return lines


def _launches(programs: Programs) -> int:
    return sum(isinstance(op, Launch) for program in programs for op in program)


def programs_of(trace: Trace, step: int) -> list[list[Op]]:
    """Every lane's program, with times measured in one traced step.

    Measure a step whose lanes ran one after the other (`Schedule.one_by_one`), so that no stage's CPU time includes
    another lane's. CPU time that the transport spent during a wait counts as compute right after the launch. Transfers
    waited for right after a point, before another launch, count as `hooked`.

    Raises:
        ConfigError: the trace has no events of that step.
    """
    events = [event for event in trace.events if event.step == step and event.lane >= 0]
    if not events:
        raise ConfigError(f"the trace has no lane events of step {step}; run an overlapped step under tracing().")
    lanes = 1 + max(event.lane for event in events)
    return [_program_of([event for event in events if event.lane == lane]) for lane in range(lanes)]


def median_programs(samples: Sequence[Programs]) -> list[list[Op]]:
    """One program per lane; every time, and the total, is the median over several measurements of the same step.

    A single measurement is not enough for `simulate`: if compute and communication are balanced, every stage that was
    slow by chance makes the ideal machine wait, and a fast stage elsewhere does not compensate.

    Raises:
        ConfigError: the samples differ in more than times, so they are not of the same step.
    """
    if len({tuple(map(len, programs)) for programs in samples}) != 1:
        raise ConfigError(
            "the measured steps differ in their number of lanes or stages. Measure one and the same step."
        )
    lanes = [list(zip(*programs, strict=True)) for programs in zip(*samples, strict=True)]
    programs = [[_median_op(ops) for ops in lane] for lane in lanes]
    total = median(map(_compute_s, samples))  # medians of skewed times add up to less than the median of their sum
    scale = total / _compute_s(programs) if total else 1.0
    return [
        [replace(op, seconds=op.seconds * scale) if isinstance(op, Compute) else op for op in lane] for lane in programs
    ]


def _compute_s(programs: Programs) -> float:
    return sum(op.seconds for program in programs for op in program if isinstance(op, Compute))


def _median_op(ops: Sequence[Op]) -> Op:
    """The first of these ops, with the median of each time. Ops of one place of a step differ in nothing else."""
    first = ops[0]
    given = ((name, getattr(first, name, None)) for name in ("seconds", "receive_s"))
    times: dict[str, Any] = {name: seconds for name, seconds in given if seconds is not None}
    if any(type(op) is not type(first) or replace(op, **times) != first for op in ops):
        raise ConfigError(
            f"the measured steps differ: {sorted(set(map(str, ops)))[:2]}. Measure one and the same step."
        )
    times = {name: median(getattr(op, name) or 0.0 for op in ops) for name in times}
    return replace(first, **times)


def _program_of(events: Sequence[Event]) -> list[Op]:
    waits: dict[str, tuple[Event, bool]] = {}
    behind_a_point = False
    for event in events:
        if event.kind is EventKind.WAIT:
            waits[event.name] = event, behind_a_point
        elif event.kind in (EventKind.POINT, EventKind.LAUNCH):
            behind_a_point = event.kind is EventKind.POINT
    program: list[Op] = []
    for event in events:
        program.append(Compute(event.cpu_s))
        if event.kind is EventKind.POINT:
            program.append(Pass(event.name, event.layer))
        elif event.kind is EventKind.WAIT:
            program.append(Wait(event.name))
        elif event.kind is EventKind.LAUNCH and event.name in waits:
            wait, hooked = waits[event.name]
            program.append(Launch(event.name, wait.link.send_s, wait.link.receive_s, hooked))
            program.append(Compute(wait.wait_cpu_s))
    return program
