"""Simulate a step under a schedule, with the runtime's own program of a layer and the transfers' kernels.

Predict the best schedule for a machine that is not at hand, its token threshold, and what limits it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving.workbench.planning.constants import Hardware, ModelShape, Workload
from serving.workbench.planning.costs import LaneCosts, LayerCosts
from ubatch import SCHEDULES, Schedule
from ubatch.schedules import SERIAL, Compute, Launch, Op, Timeline, Wait, layer_program, search_schedules, simulate


@dataclass(frozen=True)
class Step:
    """The simulator's prediction for one step.

    Attributes:
        seconds: time of the whole step, the dense layers and the head included.
        compute_s, communication_s: compute time and busy time of the link in the MoE layers, over all lanes.
        exposed_s: time that compute waited for the link.
    """

    schedule: Schedule
    seconds: float
    compute_s: float
    communication_s: float
    exposed_s: float


def lane_program(costs: Sequence[LaneCosts], schedule: Schedule) -> list[Op]:
    """One lane's operations: `layer_program`, with sending before every launch and receiving after every wait.

    Args:
        costs: of every MoE layer.
    """
    chunks = {"dispatch": schedule.chunks if schedule.chunk_dispatch else 1, "combine": schedule.chunks}

    def kernel_s(way: str, key: str) -> float:
        kind, layer, _ = key.split(".")
        seconds: float = getattr(costs[int(layer)], f"{way}_{kind}")
        return seconds / chunks[kind]

    program: list[Op] = []
    for op in layer_program([each.times for each in costs], len(costs), schedule):
        match op:
            case Launch(key):
                program += [Compute(kernel_s("send", key)), op]
            case Wait(key):
                program += [op, Compute(kernel_s("receive", key))]
            case _:
                program.append(op)
    return program


def predict_step(costs: LayerCosts, schedule: Schedule) -> Step:
    lanes = costs.of_layers(schedule.lanes, schedule.chunks, schedule.chunk_dispatch)
    program = lane_program(lanes, schedule)
    return _step(costs, schedule, simulate([program] * schedule.lanes, schedule))


def plain_step(costs: LayerCosts) -> Step:
    """Simulate one step with nothing overlapped, not even the shared expert: the plain forward of most engines."""
    lanes = [
        replace(lane, times=replace(lane.times, attn_core=lane.times.attn_core + lane.times.shared, shared=0.0))
        for lane in costs.of_layers()
    ]
    return _step(costs, SERIAL, simulate([lane_program(lanes, SERIAL)], SERIAL))


def _step(costs: LayerCosts, schedule: Schedule, line: Timeline) -> Step:
    seconds = line.seconds + costs.rest_s()
    return Step(schedule, seconds, line.compute_s, line.communication_s, line.exposed_s)


_PAYS = 1.01
"""A schedule pays if it is faster than serial by at least this factor; a smaller gain is noise."""
_MOST_TOKENS = 32768
_EXPOSED = 0.05
"""Share of a step: if more of it is waiting for the link, waiting bounds the step."""


@dataclass(frozen=True)
class Plan:
    """A prediction.

    Attributes:
        best: the step under the fastest schedule found.
        serial: the step in one lane, without chunks.
        named: steps under the named schedules, for comparison.
        threshold: fewest tokens per rank from which the best schedule pays; None if it never pays, or is serial.
        extrapolated: the number of ranks is outside the link's published figures.
    """

    model: ModelShape
    hardware: Hardware
    workload: Workload
    best: Step
    serial: Step
    named: Mapping[str, Step]
    threshold: int | None
    extrapolated: bool

    @property
    def speedup(self) -> float:
        return self.serial.seconds / self.best.seconds

    @property
    def bound(self) -> str:
        """What bounds the best step, in words."""
        best = self.best
        busy = f"compute {best.compute_s * 1e3:.1f} ms, communication {best.communication_s * 1e3:.1f} ms"
        if best.exposed_s <= _EXPOSED * best.seconds:
            return f"compute ({busy}; the link is hidden)"
        waits = f"{best.exposed_s * 1e3:.1f} ms of {best.seconds * 1e3:.1f} wait for the link"
        if best.communication_s >= best.compute_s:
            return f"communication ({busy}; {waits})"
        return f"the order of the stages ({busy}; {waits})"

    def as_json(self) -> dict[str, Any]:
        return {
            "prediction": True,
            "hardware": self.hardware.name,
            "model": self.model.name,
            "workload": vars(self.workload),
            "best": _as_json(self.best),
            "serial": _as_json(self.serial),
            "named": {name: _as_json(step) for name, step in self.named.items()},
            "speedup": self.speedup,
            "threshold": self.threshold,
            "bound": self.bound,
            "extrapolated": self.extrapolated,
        }


def make_plan(
    model: ModelShape, hardware: Hardware, workload: Workload, *, max_lanes: int = 4, max_chunks: int = 4
) -> Plan:
    """Search all schedules, simulate the best exactly, and find the token threshold; never more lanes than tokens. The
    search takes all layers as alike in their skew.

    Raises:
        ConfigError: there are no published figures for this machine, or a limit of the search is too small.
    """
    costs = LayerCosts(model, hardware, workload)
    found = search_schedules(
        lambda *shape: costs.lane(*shape).folded(),
        model.moe_layers,
        max_lanes=min(max_lanes, workload.tokens),
        max_chunks=max_chunks,
    )
    serial = predict_step(costs, SERIAL)
    steps = [predict_step(costs, candidate.schedule) for candidate in found]
    best = min([serial, *steps], key=lambda step: step.seconds)
    if best.seconds * _PAYS > serial.seconds:
        best = serial
    named = {
        name: predict_step(costs, schedule)
        for name, schedule in SCHEDULES.items()
        if schedule.lanes <= workload.tokens and schedule != SERIAL and not schedule.signalled
    }
    threshold = None if best is serial else _threshold(model, hardware, workload, best.schedule)
    return Plan(
        model, hardware, workload, best, serial, named, threshold, costs.transfers.extrapolated(prefill=costs.prefill)
    )


def _threshold(model: ModelShape, hardware: Hardware, workload: Workload, schedule: Schedule) -> int | None:
    """Fewest tokens at which the schedule pays: find the first power of two, then search below it exactly."""

    def pays(tokens: int) -> bool:
        costs = LayerCosts(model, hardware, replace(workload, tokens=tokens))
        return predict_step(costs, SERIAL).seconds >= _PAYS * predict_step(costs, schedule).seconds

    fewest = max(2, schedule.lanes)
    above = fewest
    while not pays(above):
        above *= 2
        if above > _MOST_TOKENS:
            return None
    below = above // 2
    while above > fewest and above - below > 1:
        middle = (above + below) // 2
        below, above = (below, middle) if pays(middle) else (middle, above)
    return above


def _as_json(step: Step) -> dict[str, Any]:
    return vars(step) | {"schedule": {"name": step.schedule.name, **step.schedule.to_mapping()}}
