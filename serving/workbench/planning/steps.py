"""Simulate a step under a schedule, with the runtime's own program of a layer and the transfers' kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from serving.workbench.planning.costs import LaneCosts, LayerCosts
from ubatch.schedules.layer_program import layer_program
from ubatch.schedules.schedule import SERIAL, Schedule
from ubatch.schedules.simulate import Compute, Launch, Op, Timeline, Wait, simulate


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


def lane_program(costs: LaneCosts, layers: int, schedule: Schedule) -> list[Op]:
    """One lane's operations: `layer_program`, with sending before every launch and receiving after every wait."""
    sends = {"dispatch": costs.send_dispatch, "combine": costs.send_combine}
    receives = {"dispatch": costs.receive_dispatch, "combine": costs.receive_combine}
    chunks = {"dispatch": schedule.chunks if schedule.chunk_dispatch else 1, "combine": schedule.chunks}
    program: list[Op] = []
    for op in layer_program(costs.times, layers, schedule):
        match op:
            case Launch(key):
                kind = key.split(".")[0]
                program += [Compute(sends[kind] / chunks[kind]), op]
            case Wait(key):
                kind = key.split(".")[0]
                program += [op, Compute(receives[kind] / chunks[kind])]
            case _:
                program.append(op)
    return program


def predict_step(costs: LayerCosts, schedule: Schedule) -> Step:
    lane = costs.lane(schedule.lanes, schedule.chunks, schedule.chunk_dispatch)
    program = lane_program(lane, costs.model.moe_layers, schedule)
    return _step(costs, schedule, simulate([program] * schedule.lanes, schedule))


def plain_step(costs: LayerCosts) -> Step:
    """Simulate one step with nothing overlapped, not even the shared expert: the plain forward of most engines."""
    lane = costs.lane()
    times = replace(lane.times, attn_core=lane.times.attn_core + lane.times.shared, shared=0.0)
    program = lane_program(replace(lane, times=times), costs.model.moe_layers, SERIAL)
    return _step(costs, SERIAL, simulate([program], SERIAL))


def _step(costs: LayerCosts, schedule: Schedule, line: Timeline) -> Step:
    seconds = line.seconds + costs.rest_s()
    return Step(schedule, seconds, line.compute_s, line.communication_s, line.exposed_s)
