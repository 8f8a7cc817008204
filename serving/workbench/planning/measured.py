"""The second gate: compare the simulator's predictions with this machine.

`ubatch bench overlap` runs lanes one after the other, with every stage timed, and overlapped. From the stage times the
simulator predicts the time of the overlapped step.

    a results file    simulates each link again from the stage times that were measured with it
    live              measures stage times once, and computes the transfers for every link; all arms are interleaved, so
                      that drift of the machine affects all of them alike
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from serving.ranks import run_ranks
from serving.workbench.arms.programs import predict_step, read_steps
from serving.workbench.arms.stages import HANDOFF_S
from serving.workbench.bench.runtime.overlap import Options
from serving.workbench.bench.statistics import Arm
from serving.workbench.bench.step_setting import (
    SplitCompute,
    StepSetting,
    interleave_on_ranks,
    measure_load,
    model_folder,
    open_setting,
)
from serving.workbench.planning.gates import Gate
from ubatch import ConfigError, Schedule
from ubatch.schedules import Launch, Op

_LIMIT = 0.05


def gates_of_results(path: Path) -> list[Gate]:
    """Simulate every link and number of lanes in a file of `ubatch bench overlap --json`, and compare.

    Raises:
        ConfigError: the file cannot be read, or is no such file.
    """
    gates = []
    try:
        for link in json.loads(path.read_text(encoding="utf-8"))["links"]:
            for lanes in link["lanes"]:
                stages = link["stages"][lanes]
                schedule = Schedule.from_mapping("measured", stages["schedule"])
                predicted = predict_step(read_steps(stages["steps"]), schedule, HANDOFF_S) * 1e3 + stages["around_ms"]
                measured = median(link["arms_ms"][f"overlapped_{lanes}"])
                gates.append(_gate(f"{path.name}, {lanes} lanes", link["ratio"], predicted, measured))
    except OSError as error:
        raise ConfigError(f"--measured: cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise ConfigError(f"--measured: {path} is not what `ubatch bench overlap --json` writes ({error}).") from error
    return gates


def live_gates(options: Options) -> list[Gate]:
    """Measure stages once and lanes over every link (one for each of `ratios`), and compare."""
    with model_folder(options) as model:
        gates: list[Gate] = run_ranks(_on_rank, options.ranks, options, model)
    return gates


def over_link(
    programs: Sequence[Sequence[Op]], *, latency_s: float, measured_bytes_per_s: float, bytes_per_s: float
) -> list[list[Op]]:
    """The same programs over a link of another bandwidth and the same latency."""
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
    with open_setting(rank, options, model) as setting:
        for lanes in options.lanes:
            setting.check_equal([setting.schedule(lanes), setting.schedule(lanes).one_by_one()])
        load = measure_load(setting, min(options.lanes))
        links = {ratio: load.bandwidth(ratio, setting.link.latency_s) for ratio in options.ratios}
        first = setting.link.bytes_per_s = next(iter(links.values()))
        stages = {lanes: SplitCompute(setting, setting.schedule(lanes)) for lanes in options.lanes}
        arms: dict[str, Arm] = {f"split {lanes}": arm for lanes, arm in stages.items()}
        for ratio, bytes_per_s in links.items():
            for lanes in options.lanes:
                arms[f"overlapped {lanes} {ratio}"] = partial(_timed_over, setting, lanes, bytes_per_s)
        walls = interleave_on_ranks(arms, options.blocks, "stages and links")
        steps = {lanes: arm.steps() for lanes, arm in stages.items()}
        around_ms = {lanes: arm.around_ms() for lanes, arm in stages.items()}
    gates = []
    for ratio, bytes_per_s in links.items():
        for lanes, measured in steps.items():
            moved = partial(
                over_link, latency_s=setting.link.latency_s, measured_bytes_per_s=first, bytes_per_s=bytes_per_s
            )
            carried = [[moved(programs) for programs in ranks] for ranks in measured]
            predicted = predict_step(carried, setting.schedule(lanes), HANDOFF_S) * 1e3 + around_ms[lanes]
            overlapped = median(walls[f"overlapped {lanes} {ratio}"])
            gates.append(_gate(f"this machine, {lanes} lanes", ratio, predicted, overlapped))
    return gates


def _timed_over(setting: StepSetting, lanes: int, bytes_per_s: float) -> float:
    """Milliseconds of a step over a link of that bandwidth."""
    usual, setting.link.bytes_per_s = setting.link.bytes_per_s, bytes_per_s
    try:
        return setting.timed(setting.schedule(lanes))
    finally:
        setting.link.bytes_per_s = usual


def _gate(name: str, ratio: float, predicted_ms: float, measured_ms: float) -> Gate:
    distance = abs(predicted_ms / measured_ms - 1)
    return Gate(f"{name}, communication {ratio:g}x", predicted_ms, f"{measured_ms:.1f} ms", distance, _LIMIT, "ms")
