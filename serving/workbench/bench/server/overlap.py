"""The part of `ubatch bench engine` that measures overlap: `enable_dbo` against the same engines without it.

Two data- and expert-parallel ranks over an emulated link, whose bandwidth is set so that the communication of a full
prefill step takes about as long as its compute. The decode threshold is tuned first: the fewest tokens per rank from
which overlapped decode steps are faster over that link. Both `LLM`s are loaded, and one works at a time. Their tokens
are compared before anything is timed.

    prefill   long prompts and short answers, in full steps
    decode    short prompts and long answers
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model_runner import ModelRunner
from moe import EmulatedLink
from serving.llm import LLM
from serving.ranks import run_ranks
from serving.workbench.arms.cells import Cell, Grid, make_batch
from serving.workbench.bench.generate import completions, share_of_equal
from serving.workbench.bench.runtime.overlap import measure_overlap
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.statistics import Interval, interleave_arms, paired, print_arms, timed
from serving.workbench.bench.step_setting import StepOptions, StepSetting, interleave_on_ranks, open_setting

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
