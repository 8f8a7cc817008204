"""`ubatch bench engine`: whole engines, offline and served.

    offline     `LLM.generate` against transformers' `generate`
    served      `ubatch serve`, streamed and not, against `LLM.generate` with the same options
    overlap     `enable_dbo` against none, two expert-parallel ranks over an emulated link
    scheduler   time that scheduling adds to a step, and how much of it the overlapped loop hides

The model is a random 100 M Qwen3-MoE. Arms are interleaved A B B A; figures are medians of paired ratios.

The bandwidth of overlap's link is set so that the communication of a full prefill step takes about as long as its
compute. The decode threshold is tuned first: the fewest tokens per rank from which overlapped decode steps are faster
over that link. Both `LLM`s are loaded, and one works at a time. Their tokens are compared before anything is timed.

    prefill   long prompts and short answers, in full steps
    decode    short prompts and long answers
"""

import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field

from model_runner import ModelRunner
from moe import EmulatedLink
from serving.arguments.fields import Flag
from serving.llm import LLM
from serving.ranks import run_ranks
from serving.workbench.arms.cells import Cell, Grid, make_batch
from serving.workbench.bench.generate import completions, share_of_equal
from serving.workbench.bench.options import SERVER, BlockOptions, Counts
from serving.workbench.bench.runtime.overlap import measure_overlap
from serving.workbench.bench.server.fake_device import measure_scheduler
from serving.workbench.bench.server.offline import Workload, make_served_model, measure_offline, random_prompts
from serving.workbench.bench.statistics import Interval, interleave_arms, paired, print_arms, timed
from serving.workbench.bench.step_setting import StepOptions, StepSetting, interleave_on_ranks, open_setting


class Part(StrEnum):
    OFFLINE = "offline"
    SERVED = "served"
    OVERLAP = "overlap"
    SCHEDULER = "scheduler"


class Options(BlockOptions):
    """What to measure."""

    measures = SERVER

    only: tuple[Part, ...] = Field((*Part,), description="the parts to measure")
    ranks: tuple[int, ...] = Field((1, 2), description="offline, served: numbers of data-parallel ranks")
    tensor_parallel_size: Annotated[Counts, Flag(alias="-tp")] = Field(
        (1,), description="offline, served: processes per rank; combined with every --ranks"
    )
    prompts: int = Field(64, ge=1, description="offline, served: prompts")
    input_len: int = Field(128, ge=1, description="their tokens")
    output_len: int = Field(64, ge=1, description="tokens of their answers")
    step_tokens: int = Field(2048, ge=1024, description="overlap: most tokens of a rank's step")
    running: int = Field(64, ge=1, description="scheduler: running requests")


PREFILL_HEAVY = Workload(prompts=32, input_len=512, output_len=16)
DECODE_HEAVY = Workload(prompts=64, input_len=32, output_len=64)


def run(options: Options) -> int:
    parts: dict[str, Any] = {}
    if set(options.only) - {Part.SCHEDULER}:
        with tempfile.TemporaryDirectory() as folder:
            parts |= _measure_model(options, make_served_model(Path(folder)))
    if Part.SCHEDULER in options.only:
        scheduler = measure_scheduler(options.blocks, options.running)
        scheduler.print()
        parts["scheduler"] = scheduler
    options.write(parts)
    return 0


def _measure_model(options: Options, model: Path) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if Part.OFFLINE in options.only or Part.SERVED in options.only:
        offline = measure_offline(
            model,
            options.blocks,
            Workload(options.prompts, options.input_len, options.output_len),
            ranks=list(product(options.ranks, options.tensor_parallel_size)),
            transformers=Part.OFFLINE in options.only,
            served=Part.SERVED in options.only,
        )
        offline.print()
        parts["generate"] = offline
    if Part.OVERLAP in options.only:
        workloads = {"prefill": PREFILL_HEAVY, "decode": DECODE_HEAVY}
        overlap = measure_served_overlap(model, options.blocks, step_tokens=options.step_tokens, workloads=workloads)
        overlap.print()
        parts["overlap"] = overlap
    return parts


# -- overlap -----------------------------------------------------------------------------------------------------------


_RANKS = 2
_LATENCY_US = 20.0
_DECODE_TOKENS = (8, 16, 32, 64, 128)
_DECODE_CONTEXT = 64
_DECODE_BLOCKS = 9
_MARGIN = 1.05  # a step that is hardly faster in calibration may be slower in service


@dataclass(frozen=True)
class Calibration:
    """Measurements of the ranks before the engines start: the link's bandwidth; over it, best serial time / overlapped
    time of one full prefill step, and of a decode step by tokens per rank; and the decode threshold from these."""

    bytes_per_s: float
    step_speedup: Interval
    decode_speedup: Mapping[int, float]
    decode_threshold: int


@dataclass(frozen=True)
class ServedOverlapResult:
    """Figures of one workload.

    Attributes:
        speedup: time without / time with `enable_dbo`.
        same: share of the prompts whose tokens are the same.
        steps: rank 0's steps with `enable_dbo`, by mode and outcome, as in `EngineStatistics`.
    """

    workload: Workload
    arms_ms: Mapping[str, Sequence[float]]
    speedup: Interval
    same: float
    steps: Mapping[str, int]


@dataclass(frozen=True)
class ServedOverlap:
    calibration: Calibration
    step_tokens: int
    results: Mapping[str, ServedOverlapResult]

    def print(self) -> None:
        link = self.calibration
        print(
            f"\noverlap: {_RANKS} ranks over {link.bytes_per_s / 1e6:.1f} MB/s, {_LATENCY_US:g} us; "
            f"steps of {self.step_tokens} tokens a rank"
        )
        print(f"  one prefill step alone   {link.step_speedup:.2f}x")
        tuned = ", ".join(f"{tokens}: {speedup:.2f}x" for tokens, speedup in link.decode_speedup.items())
        print(f"  decode steps by tokens of a rank   {tuned}   -> threshold {link.decode_threshold}")
        for name, result in self.results.items():
            print(f"  {name}-heavy ({result.workload}); same tokens in {result.same:.0%} of the prompts")
            print_arms(result.arms_ms, ".0f", indent=4)
            print(f"    speed-up     {result.speedup:.3f}")
            print(
                "    steps        " + ", ".join(f"{kind} {count}" for kind, count in result.steps.items()), flush=True
            )


def measure_served_overlap(
    model: Path, blocks: int, *, step_tokens: int, workloads: Mapping[str, Workload]
) -> ServedOverlap:
    """Calibrate, start both engines, run all arms, and compute the figures. `step_tokens` is the most tokens of a
    rank's step; the link is calibrated on a prefill of this size."""
    prompt_len = max(workload.input_len for workload in workloads.values())
    calibration: Calibration = run_ranks(_calibrate, _RANKS, model, step_tokens, prompt_len)
    options: dict[str, Any] = {
        "data_parallel_size": _RANKS,
        "enable_expert_parallel": True,
        "emulated_link": (_LATENCY_US, calibration.bytes_per_s / 1e6),
        "enable_prefix_caching": False,
        "max_num_batched_tokens": step_tokens,
        "max_num_seqs": max(workload.prompts for workload in workloads.values()),
    }
    with (
        LLM(model, **options) as plain,
        LLM(model, **options, enable_dbo=True, dbo_decode_token_threshold=calibration.decode_threshold) as dbo,
    ):
        results = {
            name: _compare(name, plain, dbo, random_prompts(model, workload), workload, blocks)
            for name, workload in workloads.items()
        }
    return ServedOverlap(calibration, step_tokens, results)


def _compare(
    name: str, plain: LLM, dbo: LLM, prompts: list[list[int]], workload: Workload, blocks: int
) -> ServedOverlapResult:
    generate = [partial(completions, llm, prompts, workload.output_len) for llm in (plain, dbo)]
    expected, got = ([each.token_ids for each in run()] for run in generate)
    same = share_of_equal(f"{name} with overlap", [expected], [got])
    arms = {arm: timed(run) for arm, run in zip(("without", "enable_dbo"), generate, strict=True)}
    before = Counter(dbo.statistics[0].steps)
    measured = interleave_arms(arms, blocks, label=f"{name}-heavy")
    steps = Counter(dbo.statistics[0].steps) - before
    return ServedOverlapResult(workload, measured, paired(measured["without"], measured["enable_dbo"]), same, steps)


# -- on the ranks ---------------------------------------------------------------------------------------------------


def _calibrate(rank: int, world_size: int, model: Path, step_tokens: int, prompt_len: int) -> Calibration:
    """The link's bandwidth and the decode threshold; every rank takes part."""
    options = StepOptions(
        sequences=max(2, step_tokens // prompt_len),
        sequence_length=min(prompt_len, step_tokens // 2),
        latency_us=_LATENCY_US,
    )
    with open_setting(rank, options, model) as setting:
        step = measure_overlap(setting, lanes=(2,), ratio=1.0, blocks=3)
        decode = {tokens: _decode_speedup(setting.runner, setting.link, tokens) for tokens in _DECODE_TOKENS}
    return Calibration(step.bytes_per_s, step.lanes[2].speedup, decode, _threshold(decode))


def _threshold(speedup: Mapping[int, float]) -> int:
    """Fewest tokens from which every measured size is faster with overlap; a number above all if there is none."""
    slower = [tokens for tokens, value in speedup.items() if value < _MARGIN]
    faster = [tokens for tokens in speedup if tokens > max(slower, default=0)]
    return min(faster, default=2 * max(speedup))


@torch.inference_mode()
def _decode_speedup(runner: ModelRunner, link: EmulatedLink, tokens: int) -> float:
    """Serial time / overlapped time of a decode step with `tokens` tokens per rank; the same on all ranks."""
    grid = Grid(("decode",), tokens, 0, _DECODE_CONTEXT, 0, 0)
    with make_batch(runner, Cell("decode", tokens), grid, seed=dist.get_rank()) as batch:
        setting = StepSetting(runner, batch, link)
        arms = {str(lanes): partial(setting.timed, setting.schedule(lanes)) for lanes in (1, 2)}
        measured = interleave_on_ranks(arms, _DECODE_BLOCKS, "")
        setting.close()
    return statistics.median(measured["1"]) / statistics.median(measured["2"])
