"""What the simulator gets to know of a step, in one place for tuning and for benchmarks.

    the lanes of a schedule run one after the other, traced      every stage's CPU time is its own
    an emulated link delivers at once, and says how long each transfer would have taken
    every such step is simulated, all ranks together     the median of these is the prediction

The link delivers at once because a core that sleeps until a transfer arrives has colder caches and a lower clock when
it goes on. Overlapped lanes hardly sleep: over a link as slow as compute, the stages of lanes one by one took 4 to 12%
more CPU time than the same stages overlapped; with nothing to wait for, 1% less to 2% more.

All ranks together because they wait for each other in every layer (`simulate_ranks`), and step by step because of two
ranks that are disturbed now and then one waits for the other each time. Stages that are too slow by as much as this
takes would give good predictions by chance.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from moe import EmulatedLink
from ubatch import Schedule, tracing
from ubatch.schedules.simulate import Compute, Launch, Op, Pass, Wait, programs_of, simulate_ranks
from ubatch.trace.spans import SpanKind

__all__ = [
    "Programs",
    "TracedStep",
    "gather_steps",
    "gather_texts",
    "middle_steps",
    "predict_step",
    "read_steps",
    "traced_step",
    "write_steps",
]

Programs = list[list[Op]]


@dataclass(frozen=True)
class TracedStep:
    """What a traced step gives away.

    Attributes:
        programs: one per lane.
        lanes_s: from when the first lane began to when the last one ended; the rest of the call is around them.
    """

    programs: Programs
    lanes_s: float


def traced_step(step: Callable[[], object], link: EmulatedLink | None) -> TracedStep:
    """Run a step, and return what every lane did in it.

    Args:
        step: one overlapped call whose lanes run one after the other (`Schedule.one_by_one`).
        link: what the ranks talk over, if it is emulated; over a real one, transfers take the time they take.
    """
    with tracing() as trace, nullcontext() if link is None else link.at_once():
        step()
    own = [span for span in trace.spans if span.kind is not SpanKind.TRANSFER]
    lanes_s = max(span.end for span in own) - min(span.start for span in own)
    return TracedStep(programs_of(trace, trace.step), lanes_s)


def gather_steps(mine: Sequence[Programs]) -> list[list[Programs]]:
    """Of every step every rank's programs, from this rank's. Every rank of the job calls it; all get the same."""
    own = json.dumps(write_steps([[programs] for programs in mine]))
    of_ranks = [read_steps(json.loads(text)) for text in gather_texts(own)]
    return [[programs for (programs,) in step] for step in zip(*of_ranks, strict=True)]


def gather_texts(mine: str) -> list[str]:
    """Every rank's text. Over CPU collectives; what comes from other machines is text, and never unpickled."""
    own = torch.frombuffer(bytearray(mine.encode() + b"\0"), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)]))
    longest = int(max(sizes))
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(own, (0, longest - len(own))))
    return [bytes(row[: int(size) - 1].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def predict_step(steps: Sequence[Sequence[Programs]], schedule: Schedule, handoff_s: float = 0.0) -> float:
    """Seconds from the first lane's start to the end of the slowest rank's last, the median over the steps.

    Args:
        steps: of every step every rank's programs, with as many lanes and chunks as `schedule`.
        schedule: who runs when.
        handoff_s: what a hand-off of the baton costs.

    Raises:
        ConfigError: see `simulate_ranks`.
    """
    return median(_seconds(ranks, schedule, handoff_s) for ranks in steps)


def middle_steps(steps: Sequence[Sequence[Programs]], schedule: Schedule) -> list[Sequence[Programs]]:
    """The step that `predict_step` says the time of, or the two that it is between: enough to say it again."""
    ordered = sorted(steps, key=lambda ranks: _seconds(ranks, schedule, 0.0))
    return ordered[(len(steps) - 1) // 2 : len(steps) // 2 + 1]


def _seconds(ranks: Sequence[Programs], schedule: Schedule, handoff_s: float) -> float:
    return max(line.seconds for line in simulate_ranks(ranks, schedule, handoff_s))


# -- in a file: of every step, rank and lane a line per operation ------------------------------------------------------


def write_steps(steps: Sequence[Sequence[Programs]]) -> list[list[list[list[str]]]]:
    """What `read_steps` reads, for a JSON file."""
    return [[[[_line(op) for op in lane] for lane in programs] for programs in ranks] for ranks in steps]


def read_steps(lines: Sequence[Sequence[Sequence[Sequence[str]]]]) -> list[list[Programs]]:
    """Of every step every rank's programs, as `write_steps` wrote them.

    Raises:
        ValueError: a line is no operation.
    """
    return [[[[_op(line) for line in lane] for lane in programs] for programs in ranks] for ranks in lines]


def _line(op: Op) -> str:
    match op:
        case Compute(seconds):
            return f"compute {seconds:.9f}"
        case Pass(point):
            return f"pass {point}"
        case Wait(key):
            return f"wait {key}"
        case Launch(key, seconds, receive_s, hooked):
            received = seconds if receive_s is None else receive_s
            return f"launch {seconds:.9f} {received:.9f} {'hooked' if hooked else 'free'} {key}"


def _op(line: str) -> Op:
    kind, _, rest = line.partition(" ")
    if kind == "compute":
        return Compute(float(rest))
    if kind == "pass":
        return Pass(rest)
    if kind == "wait":
        return Wait(rest)
    if kind == "launch":
        seconds, received, hooked, key = rest.split(" ", 3)
        return Launch(key, float(seconds), float(received), hooked=hooked == "hooked")
    raise ValueError(f"{line!r} is no operation of a lane")
