"""`ubatch bench overlap`: how much communication is hidden, and how close a step is to the bound.

Two expert-parallel ranks run prefill steps of a model with random weights (or of a checkpoint), over an emulated link
whose bandwidth is set so that communication takes a chosen share of compute. Arms, interleaved A B B A:

    compute_unsplit   the whole batch, link infinitely fast
    serial_unsplit    the whole batch over the link, nothing overlapped
    serial_N          N lanes one after the other over the link
    split_N           N lanes one after the other without waits: its CPU time is "split compute"; the simulator uses its
                      stages' CPU times and the link's computed times
    overlapped_N      N lanes under the schedule

Communication time is computed by the link, not measured. A step's time is that of its slowest rank.

    compute              split compute, or the CPU time of the overlapped step itself if that is less
    efficiency           max(compute, communication) / T, 1 at most
    schedule_efficiency  time of this schedule on an ideal machine, from the measured stage times of all ranks / T;
                         their sum is `compute`
    hidden               (compute + communication - T) / min(compute, communication), 1 at most
    of_two_lanes         max(compute, communication) of two lanes (or of the fewest measured) / T: what more lanes
                         compute again does not count for them
    speedup              best serial arm / T
    of_bound             speedup / ((compute_unsplit + communication) / max(split compute, communication)), the speed-up
                         of a step that hides all it can

The overlapped step's own CPU time is a bound because a rank has one core: no step is faster than its own compute. Lanes
one after the other may compute for longer, as each of them reads all weights again, so split compute alone is no strict
bound. The ideal machine's time is a prediction, and no bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import Field

from serving.ranks import run_ranks
from serving.workbench.arms.programs import Programs, middle_steps, predict_step, write_steps
from serving.workbench.bench import step_setting
from serving.workbench.bench.statistics import Arm, Interval, fastest, overlap_figures, paired, print_arms, table
from ubatch import Schedule
from ubatch.schedules import SERIAL, Compute, Op

_DRIFT = 1.02
_FIGURES = ("efficiency", "of_two_lanes", "schedule_efficiency", "hidden", "speedup", "of_bound")


class Options(step_setting.StepOptions):
    """What to measure."""

    lanes: tuple[int, ...] = Field((2, 3, 4), description="numbers of lanes to compare")
    ratios: tuple[float, ...] = Field(
        (0.25, 0.5, 1.0, 2.0, 4.0), description="communication as a multiple of split compute"
    )


@dataclass(frozen=True)
class LaneResult:
    """Figures of one number of lanes over one link.

    Attributes:
        void: the figures are better than the bound: then the machine drifted, and the run proves nothing.
    """

    efficiency: Interval
    of_two_lanes: Interval
    schedule_efficiency: Interval
    hidden: Interval
    speedup: Interval
    of_bound: Interval
    void: bool


@dataclass(frozen=True)
class OverlapResult:
    """Figures over one link.

    Attributes:
        ratio: target of communication / split compute (of two lanes, or the fewest measured).
        bytes_per_s, latency_s: bandwidth and latency of the link.
        lanes: figures per number of lanes.
        arms_ms: raw block means per arm, slowest rank.
        stages: per number of lanes, what the simulator needs to predict the overlapped step: its `schedule`, its time
            outside the lanes (`around_ms`), and every rank's programs of the steps with median times (`steps`).
    """

    ratio: float
    bytes_per_s: float
    latency_s: float
    lanes: Mapping[int, LaneResult]
    arms_ms: Mapping[str, Sequence[float]]
    stages: Mapping[int, Mapping[str, Any]]


def run(options: Options) -> int:
    print(options.describe(), flush=True)
    with step_setting.model_folder(options) as model:
        results: list[OverlapResult] = run_ranks(_measure_on_rank, options.ranks, options, model)
    options.write(as_json(results))
    return 1 if any(lane.void for result in results for lane in result.lanes.values()) else 0


def _measure_on_rank(rank: int, world_size: int, options: Options, model: Path) -> list[OverlapResult]:
    results = []
    with step_setting.open_setting(rank, options, model) as setting:
        for ratio in options.ratios:
            results.append(measure_overlap(setting, lanes=options.lanes, ratio=ratio, blocks=options.blocks))
            if rank == 0:
                print_result(results[-1])
    return results


@torch.inference_mode()
def measure_overlap(setting: step_setting.Setting, *, lanes: Sequence[int], ratio: float, blocks: int) -> OverlapResult:
    """Calibrate the link, run all arms for all numbers of lanes, and compute the figures. Every rank calls it; all get
    the same. `ratio` is communication as a multiple of the split compute of the fewest lanes."""
    lanes = sorted(lanes)
    link = setting.link
    bandwidth = step_setting.calibrate(setting, lanes[0], ratio)
    setting.check_equal([form for n in lanes for form in (setting.schedule(n), setting.schedule(n).one_by_one())])

    split = {n: step_setting.SplitCompute(setting, setting.schedule(n), f"_{n}") for n in lanes}

    def compute_unsplit() -> float:
        with link.at_once():
            return setting.timed(SERIAL)

    arms: dict[str, Arm] = {"compute_unsplit": compute_unsplit, "serial_unsplit": partial(setting.timed, SERIAL)}
    for n in lanes:
        arms[f"serial_{n}"] = partial(setting.timed, setting.schedule(n).one_by_one())
        arms[f"split_{n}"] = split[n]
        arms[f"overlapped_{n}"] = partial(_overlapped, setting, n)
    slowest = step_setting.interleave_on_ranks(arms, blocks, f"communication {ratio:g}x compute")
    steps = {n: split[n].steps() for n in lanes}
    for n in lanes:
        slowest[f"ideal_{n}"] = [_ideal_ms(slowest, n, steps[n], setting.schedule(n))] * blocks
    results = {n: _lane_result(slowest, n, lanes) for n in lanes}
    stages = {
        n: {
            "schedule": setting.schedule(n).to_mapping(),
            "around_ms": split[n].around_ms(),
            "steps": write_steps(middle_steps(steps[n], setting.schedule(n))),
        }
        for n in lanes
    }
    return OverlapResult(ratio, bandwidth, link.latency_s, results, slowest, stages)


def _overlapped(setting: step_setting.Setting, lanes: int) -> dict[str, float]:
    """Milliseconds of a step in lanes, and of its CPU."""
    return {f"overlapped_{lanes}": setting.timed(setting.schedule(lanes)), f"own_compute_{lanes}": setting.cpu_ms}


def _lane_result(arms: Mapping[str, Sequence[float]], n: int, lanes: Sequence[int]) -> LaneResult:
    overlapped, split_compute, communication = (
        arms[f"{arm}_{n}"] for arm in ("overlapped", "split_compute", "communication")
    )
    best = fastest(arms, ["serial_unsplit", *(f"serial_{k}" for k in lanes)])
    efficiency, hidden = overlap_figures(_compute(arms, n), communication, overlapped)
    two = lanes[0]
    of_two_lanes, _ = overlap_figures(_compute(arms, two), arms[f"communication_{two}"], overlapped)
    schedule_efficiency = paired(arms[f"ideal_{n}"], overlapped)
    void = any(figure.low > _DRIFT for figure in (efficiency, schedule_efficiency, hidden))
    gains = [
        (c + m) / max(split, m)
        for c, split, m in zip(arms["compute_unsplit"], split_compute, communication, strict=True)
    ]
    of_bound = paired(arms[best], [gain * wall for gain, wall in zip(gains, overlapped, strict=True)])
    speedup = paired(arms[best], overlapped)
    return LaneResult(efficiency, of_two_lanes, schedule_efficiency, hidden, speedup, of_bound, void)


def _ideal_ms(
    arms: Mapping[str, Sequence[float]], n: int, steps: Sequence[Sequence[Programs]], schedule: Schedule
) -> float:
    """Milliseconds of an ideal machine whose stages are those of lanes one by one, and together `_compute`."""
    share = median(_compute(arms, n)) / median(arms[f"split_compute_{n}"])

    def scaled(lane: Sequence[Op]) -> list[Op]:
        return [Compute(op.seconds * share) if isinstance(op, Compute) else op for op in lane]

    return predict_step([[[*map(scaled, lanes)] for lanes in ranks] for ranks in steps], schedule) * 1e3


def _compute(arms: Mapping[str, Sequence[float]], n: int) -> list[float]:
    """Split compute, or the overlapped step's own if that is less; milliseconds by block."""
    return [min(pair) for pair in zip(arms[f"split_compute_{n}"], arms[f"own_compute_{n}"], strict=True)]


def print_result(result: OverlapResult) -> None:
    speed = result.bytes_per_s / 1e6
    print(f"\ncommunication {result.ratio:g}x compute (link: {speed:.1f} MB/s, {result.latency_s * 1e6:g} us)")
    print_arms(result.arms_ms, ".1f")
    rows = [(str(n), *(getattr(lane, name) for name in _FIGURES)) for n, lane in result.lanes.items()]
    print(table({"lanes": "", **dict.fromkeys(_FIGURES, ".3f")}, rows))
    for n, lane in result.lanes.items():
        if lane.void:
            print(f"  {n} lanes are void: better than the bound, the machine drifted")
    print(end="", flush=True)


def as_json(results: Sequence[OverlapResult]) -> dict[str, Any]:
    """The results for `--json`; top-level figures are those of the fewest lanes at the ratio nearest to 1."""
    head = min(results, key=lambda result: abs(result.ratio - 1.0))
    lane = head.lanes[min(head.lanes)]
    figures = {name: getattr(lane, name) for name in _FIGURES}
    return {"ratio": head.ratio, **figures, "arms_ms": head.arms_ms, "links": results}
