"""The simulator against this machine: the second gate.

`ubatch bench overlap` runs lanes one after the other, with every stage timed, and interleaved. From the first the
simulator says what the second must take.

    a results file    every link's own stage times, already simulated there (`ideal_2`), beside what was measured
    live              stage times of one link only, the transfers reckoned anew for every other link
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from serving.bench.overlap import Options, measure_overlap
from serving.bench.step_setting import StepSetting, model_folder, open_setting
from serving.planning.gates import Gate
from serving.ranks import run_ranks
from ubatch import tracing
from ubatch.errors import ConfigError
from ubatch.simulate import Launch, Op, median_programs, programs_of, simulate

__all__ = ["gates_of_results", "live_gates", "over_link"]

_LIMIT = 0.05
_TRACED_STEPS = 9


def gates_of_results(path: Path) -> list[Gate]:
    """All links and numbers of lanes in what `ubatch bench overlap --json` wrote.

    Raises:
        ConfigError: the file is not that.
    """
    gates = []
    try:
        for link in json.loads(path.read_text(encoding="utf-8"))["links"]:
            for lanes in link["lanes"]:
                predicted, measured = (median(link["arms_ms"][f"{arm}_{lanes}"]) for arm in ("ideal", "overlapped"))
                gates.append(_gate(f"{path.name}, {lanes} lanes", link["ratio"], predicted, measured))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not what `ubatch bench overlap --json` writes: {error!r}.") from error
    return gates


def live_gates(options: Options) -> list[Gate]:
    """Measure stages over the first of the links and lanes over all of them, and compare.

    Args:
        options: as for `ubatch bench overlap`; `ratios` are the links.
    """
    with model_folder(options) as model:
        gates: list[Gate] = run_ranks(_on_rank, options.ranks, options, model)
    return gates


def over_link(
    programs: Sequence[Sequence[Op]], *, latency_s: float, measured_bytes_per_s: float, bytes_per_s: float
) -> list[list[Op]]:
    """The same programs over a link of another bandwidth.

    Args:
        programs: of the lanes, as measured.
        latency_s: of both links.
        measured_bytes_per_s, bytes_per_s: of the link that was measured, and of the other.
    """
    slower = measured_bytes_per_s / bytes_per_s

    def travel(seconds: float) -> float:
        return latency_s + (seconds - latency_s) * slower if seconds > 0 else seconds

    def moved(op: Op) -> Op:
        if not isinstance(op, Launch):
            return op
        receive = None if op.receive_s is None else travel(op.receive_s)
        return replace(op, seconds=travel(op.seconds), receive_s=receive)

    return [[moved(op) for op in program] for program in programs]


@torch.inference_mode()
def _on_rank(rank: int, world_size: int, options: Options, model: Path) -> list[Gate]:
    programs: dict[int, list[list[Op]]] = {}
    gates: list[Gate] = []
    measured_bytes_per_s = 0.0
    with open_setting(rank, options, model) as setting:
        for ratio in options.ratios:
            result = measure_overlap(setting, lanes=options.lanes, ratio=ratio, blocks=options.blocks)
            if not programs:
                measured_bytes_per_s = result.bytes_per_s
                programs = {lanes: _stages(setting, lanes) for lanes in options.lanes}
            for lanes, measured in programs.items():
                schedule = setting.schedule(lanes)
                carried = over_link(
                    measured,
                    latency_s=result.latency_s,
                    measured_bytes_per_s=measured_bytes_per_s,
                    bytes_per_s=result.bytes_per_s,
                )
                slowest = _slowest_rank(simulate(carried, schedule).seconds)
                overlapped = median(result.arms_ms[f"overlapped_{lanes}"])
                gates.append(_gate(f"this machine, {lanes} lanes", ratio, slowest * 1e3, overlapped))
    return gates


def _stages(setting: StepSetting, lanes: int) -> list[list[Op]]:
    """Medians of the stage times of lanes that run one after the other, over the link as it is now."""
    samples = []
    for _ in range(_TRACED_STEPS):
        with tracing() as trace:
            setting.step(setting.schedule(lanes).one_by_one())
        samples.append(programs_of(trace, trace.step))
    return median_programs(samples)


def _slowest_rank(seconds: float) -> float:
    """Of all ranks; a step ends when its last rank has ended."""
    value: Any = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _gate(name: str, ratio: float, predicted_ms: float, measured_ms: float) -> Gate:
    distance = abs(predicted_ms / measured_ms - 1)
    return Gate(f"{name}, communication {ratio:g}x", predicted_ms, f"{measured_ms:.1f} ms", distance, _LIMIT, "ms")
