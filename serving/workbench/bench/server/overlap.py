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
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model_runner import ModelRunner, Request, SamplingParams, ScheduledRequest, build_input_batch
from moe import EmulatedLink
from serving.llm import LLM
from serving.ranks import run_ranks
from serving.workbench.bench.runtime.overlap import measure_overlap
from serving.workbench.bench.server.offline import Workload, random_prompts
from serving.workbench.bench.statistics import Interval, interleave_arms, paired, print_arms, timed
from serving.workbench.bench.step_setting import StepSetting, prefill_batch
from ubatch import CommGroup, UBatchConfig, UBatchError

__all__ = ["Calibration", "ServedOverlapResult", "measure_served_overlap"]

_RANKS = 2
_LATENCY_S = 20e-6
_DECODE_TOKENS = (8, 16, 32, 64, 128)
_DECODE_CONTEXT = 64
_DECODE_STEPS = 9
_MARGIN = 1.05  # a step that is hardly faster in calibration may be slower in service


@dataclass(frozen=True)
class Calibration:
    """Measurements of the ranks before the engines start.

    Attributes:
        bytes_per_s: the link's bandwidth.
        step_speedup: best serial time / overlapped time of one full prefill step over that link.
        decode_speedup: tokens per rank -> serial time / overlapped time of a decode step.
        decode_threshold: the tuned threshold.
    """

    bytes_per_s: float
    step_speedup: Interval
    decode_speedup: Mapping[int, float]
    decode_threshold: int


@dataclass(frozen=True)
class ServedOverlapResult:
    """Figures of one workload.

    Attributes:
        workload: prompts and answers, in words.
        arms_ms: raw block means.
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
    """All results over one link."""

    calibration: Calibration
    step_tokens: int
    results: Mapping[str, ServedOverlapResult]

    def print(self) -> None:
        """Print the results."""
        link = self.calibration
        print(
            f"\noverlap: {_RANKS} ranks over {link.bytes_per_s / 1e6:.1f} MB/s, {_LATENCY_S * 1e6:g} us; "
            f"steps of {self.step_tokens} tokens a rank"
        )
        print(f"  one prefill step alone   {link.step_speedup:.2f}x")
        tuned = ", ".join(f"{tokens}: {speedup:.2f}x" for tokens, speedup in link.decode_speedup.items())
        print(f"  decode steps by tokens of a rank   {tuned}   -> threshold {link.decode_threshold}")
        for name, result in self.results.items():
            print(f"  {name}-heavy ({result.workload}); same tokens in {result.same:.0%} of the prompts")
            print_arms(result.arms_ms, ".0f", width=12, indent=4)
            print(f"    speed-up     {result.speedup:.3f}")
            print(
                "    steps        " + ", ".join(f"{kind} {count}" for kind, count in result.steps.items()), flush=True
            )


def measure_served_overlap(
    model: Path, blocks: int, *, step_tokens: int, workloads: Mapping[str, Workload]
) -> ServedOverlap:
    """Calibrate, start both engines, run all arms, and compute the figures.

    Args:
        model: a checkpoint with a tokenizer.
        blocks: A B B A blocks.
        step_tokens: most tokens of a rank's step; the link is calibrated on a prefill of this size.
        workloads: name -> workload; prompts of all ranks together.
    """
    prompt_len = max(workload.input_len for workload in workloads.values())
    calibration: Calibration = run_ranks(_calibrate, _RANKS, model, step_tokens, prompt_len)
    options: dict[str, Any] = {
        "data_parallel_size": _RANKS,
        "enable_expert_parallel": True,
        "emulated_link": (_LATENCY_S * 1e6, calibration.bytes_per_s / 1e6),
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
    params = SamplingParams(max_tokens=workload.output_len, ignore_eos=True)

    def generate(llm: LLM) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]

    pairs = list(zip(generate(plain), generate(dbo), strict=True))
    same = sum(a == b for a, b in pairs) / len(pairs)
    if same < 0.5:
        raise UBatchError(f"{name}: only {same:.0%} of the prompts give the same tokens with overlap and without.")
    arms = {"without": timed(lambda: generate(plain)), "enable_dbo": timed(lambda: generate(dbo))}
    before = Counter(dbo.statistics[0].steps)
    measured = interleave_arms(arms, blocks, label=f"{name}-heavy")
    steps = Counter(dbo.statistics[0].steps) - before
    return ServedOverlapResult(workload, measured, paired(measured["without"], measured["enable_dbo"]), same, steps)


# -- on the ranks ---------------------------------------------------------------------------------------------------


def _calibrate(rank: int, world_size: int, model: Path, step_tokens: int, prompt_len: int) -> Calibration:
    """The link's bandwidth and the decode threshold; every rank takes part."""
    group = CommGroup.from_process_group(timeout_s=300.0)
    link = EmulatedLink(_LATENCY_S, float("inf"))
    config = UBatchConfig(timeout_s=300.0)
    with ModelRunner(model, group=group, link=link, dbo=config) as runner:
        generator = torch.Generator().manual_seed(rank)
        size = (max(2, step_tokens // prompt_len), min(prompt_len, step_tokens // 2))
        prompts = torch.randint(0, runner.config.vocab_size, size, generator=generator).tolist()
        setting = StepSetting(runner, prefill_batch(runner, prompts), link)
        step = measure_overlap(setting, lanes=(2,), ratio=1.0, blocks=3)
        setting.close()
        decode = {tokens: _decode_speedup(runner, link, tokens) for tokens in _DECODE_TOKENS}
    return Calibration(step.bytes_per_s, step.lanes[2].speedup, decode, _threshold(decode))


def _threshold(speedup: Mapping[int, float]) -> int:
    """Fewest tokens from which every measured size is faster with overlap; a number above all if there is none."""
    slower = [tokens for tokens, value in speedup.items() if value < _MARGIN]
    faster = [tokens for tokens in speedup if tokens > max(slower, default=0)]
    return min(faster, default=2 * max(speedup))


@torch.inference_mode()
def _decode_speedup(runner: ModelRunner, link: EmulatedLink, tokens: int) -> float:
    """Serial time / overlapped time of a decode step with `tokens` tokens per rank; the same on all ranks."""
    with _decode_setting(runner, link, tokens) as setting:
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for visit in range(2 * _DECODE_STEPS + 2):
            lanes = 1 + (visit + 1) // 2 % 2  # 1 2 2 1
            dist.barrier(runner.group.pg if runner.group is not None else None)
            start = time.perf_counter()
            setting.step(setting.schedule(lanes))
            seconds[lanes].append(time.perf_counter() - start)
    medians = torch.tensor([statistics.median(seconds[lanes][1:]) for lanes in (1, 2)], dtype=torch.float64)
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return float(medians[0] / medians[1])


@contextmanager
def _decode_setting(runner: ModelRunner, link: EmulatedLink, tokens: int) -> Iterator[StepSetting]:
    requests = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (tokens, _DECODE_CONTEXT + 1)
    contexts = torch.randint(0, runner.config.vocab_size, size, generator=generator).tolist()
    for index, context in enumerate(contexts):  # different tokens per request, because tokens choose the experts
        request = Request(index, context, SamplingParams(max_tokens=1))
        runner.admit(request, _DECODE_CONTEXT + 1)
        request.num_computed_tokens = _DECODE_CONTEXT
        requests.append(request)
    shares = [ScheduledRequest(request, 1) for request in requests]
    batch = build_input_batch(shares, runner.request_table, runner.kv_cache.spec, runner.device)
    setting = StepSetting(runner, batch, link)
    try:
        yield setting
    finally:
        setting.close()
        for request in requests:
            runner.release(request)
