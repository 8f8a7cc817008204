"""`ubatch bench overlap`: how much communication is hidden, and how close to the bound.

Two expert-parallel ranks run prefill steps of a model with random weights (or of a checkpoint), over an emulated link
whose bandwidth is set so that communication takes a chosen share of compute. Arms, interleaved A B B A:

    compute_unsplit   the whole batch, link infinitely fast
    serial_unsplit    the whole batch over the link, nothing overlapped
    serial_N          N lanes one after the other over the link; its CPU time is "split compute", its stages' CPU times
                      and the link's times feed the simulator
    overlapped_N      N lanes under the schedule

and reckoned by the link: communication only. A step's time is that of its slowest rank.

    efficiency           max(split compute, communication) / T
    schedule_efficiency  time of this schedule on an ideal machine, from the medians of the measured stage times / T
    hidden               (split compute + communication - T) / min(split compute, communication)
    speedup              best serial arm / T
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from pydantic import BaseModel, Field
from torch import Tensor

from model_runner import (
    InputBatch,
    ModelRunner,
    Request,
    SamplingParams,
    ScheduledRequest,
    build_input_batch,
    make_random_qwen3_moe,
)
from moe import EmulatedLink
from serving.bench.statistics import Interval, bootstrap, environment, interleave_arms, paired, write_json
from serving.ranks import run_ranks
from ubatch import CommGroup, UBatchConfig, UBatchError, UBatchWrapper, set_forward_context, tracing
from ubatch.schedule import KNOWN_POINTS
from ubatch.simulate import Op, median_programs, programs_of, simulate

__all__ = [
    "LaneResult",
    "Options",
    "OverlapResult",
    "Setting",
    "measure_overlap",
    "model_folder",
    "open_setting",
    "run",
]

_DRIFT = 1.02


class Options(BaseModel):
    """What to measure."""

    model: Annotated[Path | None, Field(description="checkpoint folder; a random 100 M Qwen3-MoE if not given")] = None
    ranks: Annotated[int, Field(ge=2, description="data- and expert-parallel ranks")] = 2
    sequences: Annotated[int, Field(ge=2, description="prompts per rank and step")] = 8
    sequence_length: Annotated[int, Field(ge=1, description="tokens of a prompt")] = 128
    lanes: Annotated[tuple[int, ...], Field(description="numbers of lanes to compare")] = (2, 3, 4)
    ratios: Annotated[tuple[float, ...], Field(description="communication as a multiple of split compute")] = (
        0.25,
        0.5,
        1.0,
        2.0,
        4.0,
    )
    latency_us: Annotated[float, Field(ge=0, description="the link's latency")] = 20.0
    schedule: str = "mlp_shared_overlap"
    all2all_backend: Annotated[str, Field(description="what carries the data under the emulated link")] = "torch_dist"
    blocks: Annotated[int, Field(ge=2, description="A B B A blocks; 15 or more for figures to quote")] = 15
    json_file: Annotated[
        Path | None, tyro.conf.arg(name="json", metavar="FILE"), Field(description="write raw arms and results here")
    ] = None


@dataclass(frozen=True)
class LaneResult:
    """Figures of one number of lanes over one link."""

    lanes: int
    efficiency: Interval
    schedule_efficiency: Interval
    hidden: Interval
    speedup: Interval

    @property
    def void(self) -> bool:
        """Better than physics allows: the machine drifted, the run proves nothing."""
        return any(x.low > _DRIFT for x in (self.efficiency, self.schedule_efficiency, self.hidden))


@dataclass(frozen=True)
class OverlapResult:
    """Figures over one link.

    Attributes:
        ratio: communication over split compute (two lanes, or the fewest measured) that was aimed at.
        bytes_per_s, latency_s: the link.
        arms_ms: raw block means per arm, slowest rank.
        lanes: per number of lanes.
    """

    ratio: float
    bytes_per_s: float
    latency_s: float
    arms_ms: Mapping[str, Sequence[float]]
    lanes: Mapping[int, LaneResult]


@dataclass
class Setting:
    """One rank's model, batch and link, and what its arms record beside their times."""

    runner: ModelRunner
    batch: InputBatch
    link: EmulatedLink
    wrappers: dict[tuple[int, bool], UBatchWrapper] = field(default_factory=dict)

    def wrapper(self, lanes: int, *, overlapped: bool) -> UBatchWrapper:
        """The runner's model in `lanes` lanes, interleaved or one after the other."""
        key = (lanes, overlapped)
        if key not in self.wrappers:
            config = self.runner.dbo
            schedule = config.resolved_schedule().with_lanes(lanes)
            if not overlapped:
                schedule = replace(schedule, points_off=KNOWN_POINTS)  # one lane after the other
            lowest = max(2, lanes)  # every step is above these thresholds
            config = replace(
                config,
                num_ubatches=lowest,
                schedule=schedule,
                enable_dbo=lanes > 1,
                dbo_decode_token_threshold=lowest,
                dbo_prefill_token_threshold=lowest,
            )
            self.wrappers[key] = UBatchWrapper(self.runner.model, config)
        return self.wrappers[key]

    def step(self, lanes: int, *, overlapped: bool = True) -> Tensor:
        """Vote, plan and run one step; hidden states `[tokens, hidden]`."""
        wrapper = self.wrapper(lanes, overlapped=overlapped)
        agreed = self.runner.coordinate(self.batch, wrapper.ubatch_config)
        if agreed.decision.engaged != (lanes > 1):
            raise UBatchError(f"{lanes} lanes asked for, but the ranks decided otherwise: {agreed.decision.reason}.")
        with set_forward_context(self.runner.forward_context(self.batch, agreed)):
            hidden: Tensor = wrapper(self.batch.input_ids, self.batch.positions)
        return hidden

    def close(self) -> None:
        """Stop all lanes."""
        for wrapper in self.wrappers.values():
            wrapper.close()


def run(options: Options) -> int:
    """Measure, print each link as it is done, write."""
    with model_folder(options) as model:
        results: list[OverlapResult] = run_ranks(_measure_on_rank, options.ranks, options, model)
    if options.json_file is not None:
        write_json(options.json_file, as_json(options, results))
        print(f"wrote {options.json_file}")
    return 1 if any(lane.void for result in results for lane in result.lanes.values()) else 0


@contextmanager
def model_folder(options: Options) -> Iterator[Path]:
    """The checkpoint asked for, or a random one that is deleted at the end."""
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "random-qwen3-moe"
        make_random_qwen3_moe(model, seed=0)
        yield model


def _measure_on_rank(rank: int, world_size: int, options: Options, model: Path) -> list[OverlapResult]:
    results = []
    with open_setting(rank, options, model) as setting:
        for ratio in options.ratios:
            results.append(measure_overlap(setting, lanes=options.lanes, ratio=ratio, blocks=options.blocks))
            if rank == 0:
                print_result(results[-1])
    return results


@contextmanager
def open_setting(rank: int, options: Options, model: Path) -> Iterator[Setting]:
    """This rank's model and batch over an emulated link, infinitely fast so far; every rank calls it."""
    group = CommGroup.from_process_group(timeout_s=300.0)
    link = EmulatedLink(options.latency_us * 1e-6, float("inf"))
    config = UBatchConfig(schedule=options.schedule, timeout_s=300.0)
    with ModelRunner(model, group=group, all2all_backend=options.all2all_backend, link=link, dbo=config) as runner:
        generator = torch.Generator().manual_seed(rank)
        size = (options.sequences, options.sequence_length)
        prompts = torch.randint(0, runner.config.vocab_size, size, generator=generator).tolist()
        setting = Setting(runner, prefill_batch(runner, prompts), link)
        yield setting
        setting.close()


def prefill_batch(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> InputBatch:
    """One step that prefills all prompts; its KV blocks stay taken."""
    shares = []
    for index, prompt in enumerate(prompts):
        request = Request(index, list(prompt), SamplingParams(max_tokens=1))
        runner.admit(request, len(prompt))
        shares.append(ScheduledRequest(request, len(prompt)))
    return build_input_batch(shares, runner.request_table, runner.kv_cache.spec, runner.device)


@torch.inference_mode()
def measure_overlap(setting: Setting, *, lanes: Sequence[int], ratio: float, blocks: int) -> OverlapResult:
    """Calibrate the link to `ratio`, run all arms, and reckon the figures. Every rank calls it; all get the same.

    Args:
        setting: this rank's model, batch and link.
        lanes: numbers of lanes to compare.
        ratio: communication as a multiple of the split compute of the fewest lanes.
        blocks: A B B A blocks.
    """
    lanes = sorted(lanes)
    link = setting.link
    bandwidth = _calibrate(setting, lanes[0], ratio)
    _check_equal(setting, lanes)

    cpu: dict[int, list[float]] = {n: [] for n in lanes}
    programs: dict[int, list[list[list[Op]]]] = {n: [] for n in lanes}
    carried: dict[int, list[float]] = {n: [] for n in lanes}

    def timed(body: Callable[[], object]) -> float:
        dist.barrier(setting.runner.group.pg if setting.runner.group is not None else None)
        start = time.perf_counter()
        body()
        return (time.perf_counter() - start) * 1e3

    def compute_unsplit() -> float:
        latency, link.latency_s, link.bytes_per_s = link.latency_s, 0.0, float("inf")
        try:
            return timed(lambda: setting.step(1))
        finally:
            link.latency_s, link.bytes_per_s = latency, bandwidth

    def serial(n: int) -> float:
        link.reset_statistics()
        with tracing() as trace:
            start = time.process_time()
            wall = timed(lambda: setting.step(n, overlapped=False))
            cpu[n].append((time.process_time() - start) * 1e3)
        carried[n].append(link.statistics().busy_s * 1e3)
        programs[n].append(programs_of(trace, trace.step))
        return wall

    arms: dict[str, Callable[[], float]] = {
        "compute_unsplit": compute_unsplit,
        "serial_unsplit": lambda: timed(lambda: setting.step(1)),
    }
    for n in lanes:
        arms[f"serial_{n}"] = functools.partial(serial, n)
        arms[f"overlapped_{n}"] = functools.partial(timed, functools.partial(setting.step, n))
    show = dist.get_rank() == 0
    walls = interleave_arms(arms, blocks, label=f"communication {ratio:g}x compute", show=show)
    for n in lanes:
        walls[f"split_compute_{n}"] = _block_means(cpu[n], blocks)
        walls[f"communication_{n}"] = _block_means(carried[n], blocks)
        schedule = setting.wrapper(n, overlapped=True).ubatch_config.resolved_schedule()
        walls[f"ideal_{n}"] = [simulate(median_programs(programs[n]), schedule).seconds * 1e3] * blocks
    slowest = _slowest(walls)
    results = {n: _lane_result(slowest, n, lanes) for n in lanes}
    return OverlapResult(ratio, bandwidth, link.latency_s, slowest, results)


def _lane_result(arms: Mapping[str, Sequence[float]], n: int, lanes: Sequence[int]) -> LaneResult:
    overlapped, compute, communication = (
        arms[f"{arm}_{n}"] for arm in ("overlapped", "split_compute", "communication")
    )
    serial_arms = ["serial_unsplit", *(f"serial_{k}" for k in lanes)]
    best = min(serial_arms, key=lambda arm: bootstrap(arms[arm]).median)
    columns = list(zip(compute, communication, overlapped, strict=True))
    return LaneResult(
        lanes=n,
        efficiency=bootstrap([max(c, m) / t for c, m, t in columns]),
        schedule_efficiency=paired(arms[f"ideal_{n}"], overlapped),
        hidden=bootstrap([(c + m - t) / min(c, m) for c, m, t in columns]),
        speedup=paired(arms[best], overlapped),
    )


def _calibrate(setting: Setting, lanes: int, ratio: float) -> float:
    """Set the link's bandwidth so that its busy time is `ratio` times the CPU time of the split step."""
    link = setting.link
    link.bytes_per_s = float("inf")
    times = []
    for _ in range(5):
        link.reset_statistics()
        start = time.process_time()
        setting.step(lanes, overlapped=False)
        times.append(time.process_time() - start)
    carried = link.statistics()
    facts = torch.tensor(
        [sorted(times)[2], max(carried.bytes_sent, carried.bytes_received), carried.transfers], dtype=torch.float64
    )
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    compute_s, num_bytes, transfers = facts.tolist()
    travel_s = ratio * compute_s - transfers * link.latency_s
    if travel_s <= 0:
        raise UBatchError(f"{transfers:.0f} latencies of {link.latency_s * 1e6:g} us exceed {ratio:g}x compute.")
    link.bytes_per_s = num_bytes / travel_s
    return link.bytes_per_s


def _check_equal(setting: Setting, lanes: Sequence[int]) -> None:
    """All arms compute the same, before anything is timed."""
    plain = setting.step(1)
    for n in lanes:
        for overlapped in (False, True):
            torch.testing.assert_close(setting.step(n, overlapped=overlapped), plain, atol=1e-3, rtol=1e-3)


def _block_means(values: Sequence[float], blocks: int) -> list[float]:
    """Two recorded values a block, after one warm-up value."""
    kept = list(values)[-2 * blocks :]
    return [(a + b) / 2 for a, b in zip(kept[::2], kept[1::2], strict=True)]


def _slowest(arms: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Per block the largest over the ranks: a step ends when its last rank has ended."""
    table = torch.tensor(list(arms.values()), dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(arms, table.tolist(), strict=True))


def print_result(result: OverlapResult) -> None:
    """The arms and the figures of one link, as text."""
    speed = result.bytes_per_s / 1e6
    print(f"\ncommunication {result.ratio:g}x compute (link: {speed:.1f} MB/s, {result.latency_s * 1e6:g} us)")
    for name, values in result.arms_ms.items():
        print(f"  {name:18} {bootstrap(values):.1f} ms")
    print(f"  {'lanes':>5} {'efficiency':>22} {'schedule_efficiency':>22} {'hidden':>22} {'speedup':>22}")
    for lane in result.lanes.values():
        cells = (lane.efficiency, lane.schedule_efficiency, lane.hidden, lane.speedup)
        note = "   void: better than the bound, the machine drifted" if lane.void else ""
        print(f"  {lane.lanes:5} " + " ".join(f"{cell:.3f}".rjust(22) for cell in cells) + note, flush=True)


def as_json(options: BaseModel, results: Sequence[OverlapResult]) -> dict[str, Any]:
    """What `--json` writes; top-level figures are those of the fewest lanes at the `ratio` nearest to 1."""
    head = min(results, key=lambda result: abs(result.ratio - 1.0))
    lane = head.lanes[min(head.lanes)]
    figures = ("efficiency", "schedule_efficiency", "hidden", "speedup")
    return {
        "environment": environment(),
        "options": options.model_dump(mode="json", exclude={"json_file"}),
        "ratio": head.ratio,
        **{name: getattr(lane, name) for name in figures},
        "arms_ms": head.arms_ms,
        "links": [
            {
                "ratio": result.ratio,
                "bytes_per_s": result.bytes_per_s,
                "latency_s": result.latency_s,
                "lanes": {
                    str(n): {**{name: getattr(lane, name) for name in figures}, "void": lane.void}
                    for n, lane in result.lanes.items()
                },
                "arms_ms": result.arms_ms,
            }
            for result in results
        ],
    }
