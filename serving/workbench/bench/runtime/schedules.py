"""`ubatch bench schedules`: every named schedule, and the best of the search, on one model and link.

    calibrate   set the link so that communication takes `ratio` times the CPU time of two lanes
    stages      run 2 and 4 lanes, one after the other and traced, for every stage's time per lane and per token
    search      simulate lanes x chunks x lead x place of the shared expert x points; keep the best, measure their
                stage times with lanes one after the other, and simulate them again with these
    measure     time the best of these and every named schedule, overlapped and with lanes one after the other,
                interleaved A B B A

Per schedule, besides `speedup` over the best serial arm, and `efficiency`, max(split compute, communication) / T:

    of_two_lanes  the same with the compute and communication of two lanes, whatever the schedule has
    predicted     the simulator's time for the step, from the stage times of the split arms, which neither overlap nor
                  wait (`serving.workbench.arms.programs`), and these steps' time outside their lanes
    error         predicted / measured - 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import Field

from model_runner.parallel import most_chunks
from serving.ranks import run_ranks
from serving.workbench.arms.programs import predict_step
from serving.workbench.arms.stages import HANDOFF_S, ArmSteps, best_schedules, nameless
from serving.workbench.bench import step_setting
from serving.workbench.bench.statistics import (
    Arm,
    Interval,
    bootstrap,
    fastest,
    overlap_figures,
    paired,
    print_arms,
    table,
)
from ubatch import SCHEDULES, Schedule
from ubatch.schedules import SERIAL

_STAGE_STEPS = 7
_POOL = 4
"""Number of schedules that are simulated with stage times of their own, per schedule that is then measured."""


class Options(step_setting.StepOptions):
    """What to measure."""

    ratio: float = Field(1.0, gt=0, description="communication as a multiple of the compute of two lanes")
    top: int = Field(10, ge=1, description="schedules of the search to measure")
    max_lanes: int = Field(4, ge=1, le=8, description="most lanes in the search")
    max_chunks: int = Field(4, ge=1, le=8, description="most chunks in the search")


@dataclass(frozen=True)
class ScheduleResult:
    """Figures of one schedule: its name, or its rank in the search; its description; and those of the module's top."""

    name: str
    schedule: str
    efficiency: Interval
    of_two_lanes: Interval
    speedup: Interval
    predicted_ms: float
    measured_ms: Interval
    error: float


@dataclass(frozen=True)
class SchedulesResult:
    """Figures over one link: of every named schedule that can run here, and of the search's best schedules, ordered by
    the time predicted before they were measured. `arms_ms` has the raw block means of the slowest rank."""

    bytes_per_s: float
    latency_s: float
    arms_ms: Mapping[str, Sequence[float]]
    named: Sequence[ScheduleResult]
    searched: Sequence[ScheduleResult]


def run(options: Options) -> int:
    with step_setting.model_folder(options) as model:
        result: SchedulesResult = run_ranks(_measure_on_rank, options.ranks, options, model)
    print_result(options, result)
    options.write(vars(result))
    return 0


def _measure_on_rank(rank: int, world_size: int, options: Options, model: Path) -> SchedulesResult:
    with step_setting.open_setting(rank, options, model) as setting:
        return measure_schedules(setting, options)


@torch.inference_mode()
def measure_schedules(setting: step_setting.StepSetting, options: Options) -> SchedulesResult:
    """Run all phases listed at the top of this module. Every rank calls it; all get the same.

    Raises:
        ConfigError: stage times cannot be measured, as where the transport cannot serve four lanes.
    """
    bandwidth = step_setting.calibrate(setting, 2, options.ratio)
    named = {schedule.name: schedule for schedule in _named(setting)}
    searched = {f"searched {place}": each for place, each in enumerate(_search(setting, options), 1)}
    schedules = {**named, **searched}
    works = {work_of(setting, schedule): None for schedule in schedules.values()}
    setting.check_equal([*schedules.values(), *works])

    split = {work: step_setting.SplitCompute(setting, work, f" {describe_work(work)}") for work in works}
    arms: dict[str, Arm] = {"serial_unsplit": partial(setting.timed, SERIAL)}
    arms |= {
        f"one_by_one {describe_work(work)}": partial(setting.timed, work)
        for work in works
        if work.chunks == 1 and not work.signalled  # serial arms hide nothing; chunks and signals overlap within a lane
    }
    arms |= {f"split {describe_work(work)}": arm for work, arm in split.items()}
    arms |= {name: partial(setting.timed, schedule) for name, schedule in schedules.items()}
    walls = step_setting.interleave_on_ranks(arms, options.blocks, "schedules")
    steps = {work: arm.steps() for work, arm in split.items()}
    around_ms = {work: arm.around_ms() for work, arm in split.items()}
    results = {}
    for name, each in schedules.items():
        work = work_of(setting, each)
        predicted_ms = predict_step(steps[work], each, HANDOFF_S) * 1e3 + around_ms[work]
        results[name] = _result(name, each, walls, describe_work(work), predicted_ms)
    of_named, of_searched = ([results[name] for name in names] for names in (named, searched))
    return SchedulesResult(bandwidth, setting.link.latency_s, walls, of_named, of_searched)


def work_of(setting: step_setting.StepSetting, schedule: Schedule) -> Schedule:
    """The schedule's lanes one by one."""
    return _without_place(setting, schedule.one_by_one())


def _without_place(setting: step_setting.StepSetting, schedule: Schedule) -> Schedule:
    """Without a shared expert, schedules that differ in its place become equal."""
    return schedule if setting.has_shared_experts else replace(schedule, shared_expert=SERIAL.shared_expert)


def describe_work(work: Schedule) -> str:
    """Describe the work in a few words: lanes x chunks, what is chunked, where the shared expert runs."""
    chunks = "" if work.chunk_dispatch else " of combine"
    signalled = ", signalled" if work.signalled else ""
    return f"{work.lanes}x{work.chunks}{chunks}, shared at {work.shared_expert}{signalled}"


def _named(setting: step_setting.StepSetting) -> list[Schedule]:
    """The named schedules that the transport supports; of schedules that run the same order, only one."""
    runner = setting.runner
    most = most_chunks(runner.all2all)
    in_blocks = runner.all2all.traits.sends_blocks and runner.device.type == "cpu"  # only CPU experts run in blocks
    found: dict[Schedule, Schedule] = {}
    for schedule in SCHEDULES.values():
        if schedule != SERIAL and schedule.chunks <= most and (in_blocks or not schedule.signalled):
            found.setdefault(nameless(_without_place(setting, schedule)), schedule)
    return list(found.values())


# -- the search -----------------------------------------------------------------------------------------------------


def _search(setting: step_setting.StepSetting, options: Options) -> list[Schedule]:
    """The best schedules, best first, the same on every rank; none if serial is all there is. Errors as in
    `measure_schedules`."""
    limits = {"max_lanes": options.max_lanes, "max_chunks": options.max_chunks, "keep": _POOL * options.top}
    with ArmSteps(setting.runner, setting.link) as arms:
        found = arms.search(setting.batch, lambda model: best_schedules(model, "prefill", [], **limits))
    pool = [arm.schedule for arm in found]
    works = {work_of(setting, schedule): None for schedule in pool}
    splits = {work: step_setting.SplitCompute(setting, work) for work in works}
    for _ in range(_STAGE_STEPS):  # interleaved, so that drift affects all alike
        for split in splits.values():
            split()
    steps = {work: split.steps() for work, split in splits.items()}
    seconds = {each: predict_step(steps[work_of(setting, each)], each, HANDOFF_S) for each in pool}
    return sorted(pool, key=lambda each: seconds[each])[: options.top]


# -- results --------------------------------------------------------------------------------------------------------


def _result(
    name: str, schedule: Schedule, arms: Mapping[str, Sequence[float]], work: str, predicted_ms: float
) -> ScheduleResult:
    best = fastest(arms, (arm for arm in arms if arm.startswith(("serial_unsplit", "one_by_one"))))
    two = next(arm.partition(" ")[2] for arm in arms if arm.startswith("split_compute 2x1"))
    efficiency, of_two_lanes = (
        overlap_figures(arms[f"split_compute {each}"], arms[f"communication {each}"], arms[name])[0]
        for each in (work, two)
    )
    measured = bootstrap(arms[name])
    return ScheduleResult(
        name=name,
        schedule=schedule.describe().partition(": ")[2],
        efficiency=efficiency,
        of_two_lanes=of_two_lanes,
        speedup=paired(arms[best], arms[name]),
        predicted_ms=predicted_ms,
        measured_ms=measured,
        error=predicted_ms / measured.median - 1,
    )


def print_result(options: Options, result: SchedulesResult) -> None:
    speed, latency = result.bytes_per_s / 1e6, result.latency_s * 1e6
    print(options.describe())
    print(f"communication {options.ratio:g}x compute (link: {speed:.1f} MB/s, {latency:g} us)")
    print_arms(result.arms_ms, ".1f")
    head = {"schedule": "", "efficiency": ".3f", "of_two_lanes": ".3f", "speedup": ".3f"}
    head |= {"predicted": ".1f", "measured": ".1f", "error": "+.1%"}
    rows = [
        (each.name, each.efficiency, each.of_two_lanes, each.speedup, each.predicted_ms, each.measured_ms, each.error)
        for each in (*result.named, *result.searched)
    ]
    print(table(head, rows))
    for each in result.searched:
        print(f"  {each.name}: {each.schedule}")
