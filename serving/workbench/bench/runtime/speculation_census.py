"""The part of `ubatch bench speculation` with overlap: counts the verify steps of two ranks that ran in two lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.engine.speculation import SpeculationConfig
from serving.llm import LLM
from serving.workbench.bench.generate import completions
from ubatch import DeclineReason, UBatchError

_RANKS = 2
_PROMPTS_PER_RANK = 8
_VERIFY = "target_verify/"


@dataclass(frozen=True)
class Census:
    """Counts of steps over all ranks, by "mode/outcome".

    Attributes:
        threshold: fewest tokens of a verify step that overlaps.
        engaged: verify steps that ran in two lanes.
        above: verify steps in which every rank with tokens reached the threshold.
    """

    threshold: int
    engaged: int
    above: int
    steps: Mapping[str, int]

    def print(self) -> None:
        share = self.engaged / self.above if self.above else 0.0
        print(
            f"\ncensus: {_RANKS} ranks, --enable-dbo; of {self.above} verify steps with {self.threshold} tokens or "
            f"more on every rank {self.engaged} ran in two lanes ({share:.1%})"
        )
        print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.steps.items())), flush=True)


def take_census(
    model: Path, speculation: SpeculationConfig, prompts: Sequence[Sequence[int]], output_len: int
) -> Census:
    """Generate on two expert-parallel ranks, without and with overlap and guesses; the tokens must be the same. The
    prompts are repeated until every rank has enough."""
    threshold = 2 * (1 + speculation.num_draft_tokens)  # a single request cannot be split
    options: dict[str, Any] = {
        "data_parallel_size": _RANKS,
        "enable_expert_parallel": True,
        "max_num_seqs": _PROMPTS_PER_RANK,
        "max_model_len": 2 * (len(prompts[0]) + output_len),
        "kv_cache_memory": "64M",
        "skip_tokenizer_init": True,
    }
    overlap: dict[str, Any] = {
        "enable_dbo": True,
        "dbo_decode_token_threshold": threshold,
        "dbo_prefill_token_threshold": 128,
    }
    asked: dict[str, Any] = {
        "speculative_algorithm": speculation.algorithm.value,
        "speculative_draft_model_path": speculation.draft_model_path,
        "speculative_num_steps": speculation.num_steps,
    }
    many = [prompts[index % len(prompts)] for index in range(_RANKS * _PROMPTS_PER_RANK)]
    with LLM(model, **options) as llm:
        wanted = [each.token_ids for each in completions(llm, many, output_len)]
    with LLM(model, **options, **overlap, **asked) as llm:
        tokens = [each.token_ids for each in completions(llm, many, output_len)]
        steps = [dict(each.steps) for each in llm.statistics.values()]
    if tokens != wanted:
        raise UBatchError("two ranks that overlap and guess do not give the greedy tokens of two that do not.")
    engaged, above = census_of(steps)
    return Census(threshold, engaged, above, dict(sum(map(Counter, steps), Counter())))


def census_of(ranks: Sequence[Mapping[str, int]]) -> tuple[int, int]:
    """Verify steps in lanes, and all verify steps above the threshold, of two ranks; from `EngineStatistics.steps`.

    A step that is below the threshold on one rank counts as below it; the other rank has `peer_declined`.
    """
    verify = [
        {step.removeprefix(_VERIFY): count for step, count in steps.items() if step.startswith(_VERIFY)}
        for steps in ranks
    ]
    below = [own.get(DeclineReason.BELOW_DECODE_THRESHOLD, 0) for own in verify]
    above = 0
    for own, its_below, peers_below in zip(verify, below, reversed(below), strict=True):
        above += sum(own.values()) - its_below - min(own.get(DeclineReason.PEER_DECLINED, 0), peers_below)
    return sum(own.get("engaged", 0) for own in verify), above
