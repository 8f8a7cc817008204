"""`ubatch bench auto`: what `--enable-dbo` decides over a mixed load, against serial steps and every fixed setting.

Two expert-parallel ranks run a load of decodes, whose batch grows and shrinks, mixed with few, many or hardly any
prefills. `dbo` runs every step. Steps drawn at random are also run by every arm, in a random order, so that drift of
the machine affects all arms alike, and no arm is always first with cold caches. These steps are compared:

    serial, two-lanes, three-lanes, single-batch, two-by-two     under fixed settings
    dbo                                                          as it decides, its trials included

The time of any fixed setting (an arm from a token threshold, for each kind of step) is computed from these. The best
fixed setting is known only afterwards, and noise favours it: it is the smallest of many sums.

    against serial        time of the serial arm / time of `dbo`
    against the best      time of the best fixed setting / time of `dbo`
    pooled                both again, with the mean forward time of all arms that ran a step in the same schedule

On a noisy machine the same forward varies by some per cent, and all of `dbo`'s forwards repeat another arm's. Pooling
removes this noise. Each arm keeps its own time outside the forward: deciding, voting and bookkeeping. Pooling would
hide an effect of deciding on the forward itself.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from pydantic import Field

from model_runner import ModelRunner, Step, StepSettings
from model_runner.auto import Proposal
from model_runner.parallel import most_chunks
from moe import EmulatedLink
from serving.progress import progress
from serving.ranks import run_ranks
from serving.workbench.arms.cells import SERIAL_ARM, Cell, Grid, Setting, arm_config, make_batch
from serving.workbench.bench.options import DECIDING, LatencyUs, ModelFolder, Ranks, ReportOptions
from serving.workbench.bench.statistics import Interval, ratio_of_sums
from serving.workbench.bench.step_setting import StepSetting, calibrate, slowest_rank
from ubatch import SCHEDULES, CommGroup, Schedule, UBatchConfig
from ubatch.schedules import SERIAL

_DBO = "dbo"
_BLOCK_SIZE = 16


class Options(ReportOptions):
    """What to measure."""

    measures = DECIDING

    model: ModelFolder
    ranks: Ranks = 2
    steps: int = Field(800, ge=20, description="steps of the load, over each link")
    compared: float = Field(0.25, gt=0, le=1, description="share of the steps that every arm runs")
    ratios: tuple[float, ...] = Field(
        (0.0, 0.25, 0.5, 1.0, 2.0, 4.0),
        description="communication as a multiple of the compute of a large prefill; 0 is no link",
    )
    latency_us: LatencyUs = 20.0
    max_decode_tokens: int = Field(128, ge=8, description="requests of the largest decode step of a rank")
    max_prefill_tokens: int = Field(512, ge=32, description="tokens of the largest prefill step of a rank")
    seed: int = Field(0, description="of the load")

    @property
    def grid(self) -> Grid:
        return Grid(("decode", "prefill"), self.max_decode_tokens, self.max_prefill_tokens, 64, 128, 0)


@dataclass(frozen=True)
class AutoResult:
    """Figures over one link; see the top of this module.

    Attributes:
        ratio: target of communication / compute.
        bytes_per_s: bandwidth of the link; None without a link.
        load: kind and tokens of the compared steps.
        seconds: arm -> seconds of each of these steps, on its slowest rank.
        best: kind of step -> the best fixed setting.
        forwards: arm -> the forwards' part of `seconds`.
        ran: `dbo`'s schedule in each of the steps, as its description; "" for serial.
        decided: kind of step -> the decision at the end, and why.
        trials: steps that ran the other way than decided.
    """

    ratio: float
    bytes_per_s: float | None
    load: Sequence[str]
    seconds: Mapping[str, Sequence[float]]
    best: Mapping[str, Setting]
    against_serial: Interval
    against_best: Interval
    pooled_serial: Interval
    pooled_best: Interval
    forwards: Mapping[str, Sequence[float]]
    ran: Sequence[str]
    decided: Mapping[str, str]
    trials: int


def run(options: Options) -> int:
    results: list[AutoResult] = run_ranks(_measure_on_rank, options.ranks, options)
    options.write({"links": results})
    return 0


def fixed_arms(config: UBatchConfig, max_chunks: int) -> dict[str, Schedule]:
    """Name -> schedule of every fixed arm that has at most `max_chunks` chunks, with the names of `bench link`."""
    two = config.resolved_schedule().with_lanes(2)
    arms = {
        SERIAL_ARM: SERIAL,
        "two-lanes": two,
        "three-lanes": two.with_lanes(3),
        "single-batch": SCHEDULES["single_batch"],
        "two-by-two": replace(two, name=f"{two.name}_2_chunks", chunks=2),
    }
    return {name: each for name, each in arms.items() if each.chunks <= max_chunks}


def mixed_load(options: Options) -> Iterator[Cell]:
    """Decodes of a slowly changing batch, mixed with few, many or hardly any prefills; the same on every rank."""
    draw = random.Random(options.seed)
    most = options.max_decode_tokens
    decoding, phase = most // 3, max(1, options.steps // 6)
    for step in range(options.steps):
        if draw.random() < (0.15, 0.02, 0.6)[step // phase % 3]:
            large = options.max_prefill_tokens
            yield Cell("prefill", draw.choice([large] * 3 + [draw.randint(large // 16, large)]))
        else:
            decoding = max(4, min(most, decoding + draw.randint(-5, 5)))
            yield Cell("decode", decoding)


def pooled(
    seconds: Mapping[str, Sequence[float]],
    forwards: Mapping[str, Sequence[float]],
    schedules: Mapping[str, Sequence[str]],
) -> dict[str, list[float]]:
    """Seconds of every step, with its forward replaced by the mean over the arms that ran it in the same schedule.

    All three are by arm and step; `forwards` are a part of `seconds`.
    """
    found: dict[str, list[float]] = {name: [] for name in seconds}
    for step in range(len(seconds[SERIAL_ARM])):
        alike: dict[str, list[float]] = {}
        for name, values in forwards.items():
            alike.setdefault(schedules[name][step], []).append(values[step])
        for name, values in found.items():
            times = alike[schedules[name][step]]
            values.append(seconds[name][step] - forwards[name][step] + sum(times) / len(times))
    return found


def best_fixed(load: Sequence[Cell], seconds: Mapping[str, Sequence[float]]) -> dict[str, Setting]:
    """For each kind of step, the arm and threshold that would have taken the least `seconds` of its arm."""
    found = {}
    for kind in dict.fromkeys(cell.mode for cell in load):
        own = [index for index, cell in enumerate(load) if cell.mode == kind]
        arms = [arm for arm in seconds if arm != SERIAL_ARM]
        sizes = sorted({load[index].tokens for index in own})
        settings = [Setting(), *(Setting(arm, tokens) for arm in arms for tokens in sizes)]
        found[kind] = min(settings, key=lambda setting: sum(seconds[setting.arm_for(load[i].tokens)][i] for i in own))
    return found


# -- the ranks ------------------------------------------------------------------------------------------------------


def _measure_on_rank(rank: int, world_size: int, options: Options) -> list[AutoResult]:
    grid = options.grid
    group = CommGroup.from_process_group(timeout_s=300.0)
    link = EmulatedLink(0.0, float("inf"))
    with ModelRunner(
        options.model,
        group=group,
        link=link,
        dbo=UBatchConfig(timeout_s=300.0),
        block_size=_BLOCK_SIZE,
        num_kv_blocks=grid.kv_blocks_needed(_BLOCK_SIZE),
        max_num_seqs=grid.requests_needed(),
    ) as runner:
        results = []
        for ratio in options.ratios:
            _set_link(runner, link, ratio, options)
            results.append(_measure(runner, link, ratio, options))
            if rank == 0:
                print_result(results[-1])
    return results


@torch.inference_mode()
def _measure(runner: ModelRunner, link: EmulatedLink, ratio: float, options: Options) -> AutoResult:
    auto = StepSettings(runner.dbo, runner.group, runner.device)
    fixed = fixed_arms(runner.dbo, most_chunks(runner.all2all))
    arms = {name: arm_config(runner.dbo, schedule) for name, schedule in fixed.items()}
    ran: dict[str, list[tuple[float, float, str]]] = {name: [] for name in (*arms, _DBO)}
    load: list[Cell] = []
    rank, draw = dist.get_rank(), random.Random(options.seed + 1)
    steps = progress(mixed_load(options), f"communication {ratio:g}x", options.steps, show=rank == 0)
    for number, cell in enumerate(steps):
        with make_batch(runner, cell, options.grid, seed=number * 64 + rank) as batch:
            if draw.random() >= options.compared:
                _run(runner, auto, batch)
                continue
            _run(runner, arms[SERIAL_ARM], batch)  # a warm-up: caches are cold
            for name in draw.sample(list(ran), len(ran)):
                dist.barrier()
                ran[name].append(_run(runner, auto if name == _DBO else arms[name], batch))
            load.append(cell)
    seconds = slowest_rank({name: [whole for whole, _, _ in own] for name, own in ran.items()})
    forwards = slowest_rank({name: [forward for _, forward, _ in own] for name, own in ran.items()})
    schedules = {name: [schedule for _, _, schedule in own] for name, own in ran.items()}

    def against(times: Mapping[str, Sequence[float]]) -> tuple[dict[str, Setting], Interval, Interval]:
        """The best fixed setting; time of serial steps / time of `dbo`, and that of the best / time of `dbo`."""
        best = best_fixed(load, {name: times[name] for name in arms})
        under = [times[best[cell.mode].arm_for(cell.tokens)][step] for step, cell in enumerate(load)]
        return best, ratio_of_sums(times[SERIAL_ARM], times[_DBO]), ratio_of_sums(under, times[_DBO])

    best, against_serial, against_best = against(seconds)
    _, pooled_serial, pooled_best = against(pooled(seconds, forwards, schedules))
    found = auto.policy
    return AutoResult(
        ratio=ratio,
        bytes_per_s=link.bytes_per_s if ratio else None,
        load=list(map(str, load)),
        seconds=_rounded(seconds),
        best=best,
        against_serial=against_serial,
        against_best=against_best,
        pooled_serial=pooled_serial,
        pooled_best=pooled_best,
        forwards=_rounded(forwards),
        ran=schedules[_DBO],
        decided=found.reasons,
        trials=found.trials,
    )


def _run(runner: ModelRunner, how: UBatchConfig | StepSettings, batch: Step) -> tuple[float, float, str]:
    """Run a step; its seconds on this rank, vote and decision included, its forward's part, its schedule."""
    start = time.perf_counter()
    step = runner.agree(batch, how.settings(batch) if isinstance(how, StepSettings) else Proposal(how))
    with how.timed(step.decision) if isinstance(how, StepSettings) else nullcontext():
        begun = time.perf_counter()
        runner.forward(step)
        ended = time.perf_counter()
    schedule = "" if step.schedule is None else step.schedule.describe()
    return time.perf_counter() - start, ended - begun, schedule


@torch.inference_mode()
def _set_link(runner: ModelRunner, link: EmulatedLink, ratio: float, options: Options) -> None:
    """Set the bandwidth so that a large prefill's communication takes `ratio` times its CPU time; see `calibrate`."""
    link.latency_s, link.bytes_per_s = (options.latency_us * 1e-6 if ratio else 0.0), float("inf")
    if not ratio:
        return
    with make_batch(runner, Cell("prefill", options.max_prefill_tokens), options.grid, seed=dist.get_rank()) as batch:
        setting = StepSetting(runner, batch, link)
        calibrate(setting, runner.dbo.resolved_schedule().lanes, ratio)
        setting.close()


# -- results --------------------------------------------------------------------------------------------------------


def print_result(result: AutoResult) -> None:
    link = "no link" if result.bytes_per_s is None else f"{result.bytes_per_s / 1e6:.1f} MB/s"
    print(
        f"\ncommunication {result.ratio:g}x compute ({link}), {len(result.load)} steps compared, {result.trials} trials"
    )
    for name, values in result.seconds.items():
        print(f"  {name:26} {sum(values):8.2f} s")
    for kind, setting in result.best.items():
        what = "serial" if setting.threshold is None else f"{setting.arm} from {setting.threshold} tokens on"
        print(f"  best fixed, {kind:13} {what}")
    for kind, why in result.decided.items():
        print(f"  dbo, {kind:20} {why}")
    beside = {name: sum(result.seconds[name]) - sum(result.forwards[name]) for name in (SERIAL_ARM, _DBO)}
    print(f"  outside the forwards: serial {beside[SERIAL_ARM]:.2f} s, dbo {beside[_DBO]:.2f} s")
    print(f"  against serial {result.against_serial:.3f}, against the best {result.against_best:.3f}")
    print(f"  pooled         {result.pooled_serial:.3f}                   {result.pooled_best:.3f}", flush=True)


def _rounded(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 6) for value in values] for name, values in seconds.items()}
