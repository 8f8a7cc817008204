"""Traced steps as input of the simulator, for tuning and for benchmarks.

    the lanes of a schedule run one after the other, traced      so every stage's CPU time is measured separately
    an emulated link delivers at once, and reports how long each transfer would have taken
    each traced step is simulated with all ranks together        the prediction is the median over the steps

The link delivers at once because a core that sleeps until a transfer arrives has colder caches and a lower clock
afterwards. Overlapped lanes hardly sleep, and the stages of lanes one by one would take more CPU time than theirs.

All ranks are simulated together because they wait for each other in every layer (`simulate_ranks`). Each step is
simulated separately because a disturbance on either rank delays both: medians of stages over the steps would hide it.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from moe import EmulatedLink
from ubatch import CommGroup, Schedule, SpanKind, tracing
from ubatch.schedules import Compute, Launch, Op, Pass, Wait, programs_of, simulate_ranks

Programs = list[list[Op]]


@dataclass(frozen=True)
class TracedStep:
    """One program per lane, and seconds from the start of the first lane to the end of the last one."""

    programs: Programs
    lanes_s: float


def traced_step(step: Callable[[], object], link: EmulatedLink | None) -> TracedStep:
    """Run a step, and return every lane's operations.

    Args:
        step: one overlapped call whose lanes run one after the other (`Schedule.one_by_one`).
        link: the emulated link between the ranks; None for a real link, whose transfers take their real time.
    """
    with tracing() as trace, nullcontext() if link is None else link.at_once():
        step()
    own = [span for span in trace.spans if span.kind is not SpanKind.TRANSFER]
    lanes_s = max(span.end for span in own) - min(span.start for span in own)
    return TracedStep(programs_of(trace, trace.step), lanes_s)


def gather_steps(mine: Sequence[Programs], group: CommGroup | None) -> list[list[Programs]]:
    """Gather this rank's programs into step -> rank -> programs. Every rank calls it; see `gather_texts`."""
    own = json.dumps(write_steps([[programs] for programs in mine]))
    of_ranks = [read_steps(json.loads(text)) for text in gather_texts(own, group)]
    return [[programs for (programs,) in step] for step in zip(*of_ranks, strict=True)]


def gather_texts(mine: str, group: CommGroup | None) -> list[str]:
    """Gather every rank's text, by CPU collectives. Data of other machines is sent as text, and never unpickled.

    Args:
        group: the ranks, every one of which calls this; None for a single rank.

    Raises:
        PeerFailed, TransferTimeout, GroupBroken: as a vote.
    """
    if group is None:
        return [mine]
    own = torch.frombuffer(bytearray(mine.encode() + b"\0"), dtype=torch.uint8)
    sizes = _gather(torch.tensor([len(own)]), group)
    longest = int(max(sizes))
    rows = _gather(torch.nn.functional.pad(own, (0, longest - len(own))), group)
    return [bytes(row[: int(size) - 1].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def _gather(own: torch.Tensor, group: CommGroup) -> list[torch.Tensor]:
    rows = [torch.zeros_like(own) for _ in range(group.size)]
    connection = group.usable_connection()
    work = dist.all_gather(rows, own, group=connection.vote_pg, async_op=True)
    connection.wait_for_works((work,), "gather")
    return rows


def predict_step(steps: Sequence[Sequence[Programs]], schedule: Schedule, handoff_s: float = 0.0) -> float:
    """Seconds from the first lane's start to the end of the slowest rank's last lane, the median over the steps.

    Args:
        steps: step -> rank -> programs, with as many lanes and chunks as `schedule`.
        schedule: the schedule to simulate.
        handoff_s: seconds of a hand-off of the baton.
    """
    return median(_seconds(ranks, schedule, handoff_s) for ranks in steps)


def middle_steps(steps: Sequence[Sequence[Programs]], schedule: Schedule) -> list[Sequence[Programs]]:
    """The median step of `predict_step`, or the two middle ones: enough to reproduce its prediction."""
    ordered = sorted(steps, key=lambda ranks: _seconds(ranks, schedule, 0.0))
    return ordered[(len(steps) - 1) // 2 : len(steps) // 2 + 1]


def _seconds(ranks: Sequence[Programs], schedule: Schedule, handoff_s: float) -> float:
    return max(line.seconds for line in simulate_ranks(ranks, schedule, handoff_s))


# -- file format: one line per operation, by step, rank and lane -------------------------------------------------------


def write_steps(steps: Sequence[Sequence[Programs]]) -> list[list[list[list[str]]]]:
    """Convert steps to lines for a JSON file; `read_steps` reads them."""
    return [[[[_line(op) for op in lane] for lane in programs] for programs in ranks] for ranks in steps]


def read_steps(lines: Sequence[Sequence[Sequence[Sequence[str]]]]) -> list[list[Programs]]:
    """Read step -> rank -> programs from the lines of `write_steps`.

    Raises:
        ValueError: a line is no operation.
    """
    return [[[[_op(line) for line in lane] for lane in programs] for programs in ranks] for ranks in lines]


def _line(op: Op) -> str:
    match op:
        case Compute(seconds):
            return f"compute {seconds:.9f}"
        case Pass(point, layer):
            return f"pass {point}\t{layer}" if layer else f"pass {point}"
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
        point, _, layer = rest.partition("\t")
        return Pass(point, layer)
    if kind == "wait":
        return Wait(rest)
    if kind == "launch":
        seconds, received, hooked, key = rest.split(" ", 3)
        return Launch(key, float(seconds), float(received), hooked=hooked == "hooked")
    raise ValueError(f"{line!r} is no operation of a lane")
