"""Overlap in a Hugging Face MoE model: expert parallelism in one line, microbatches in another.

    python examples/wrap_transformers.py [--model FOLDER]

Two ranks load the same `AutoModelForCausalLM`. `moe.expert_parallel` replaces its MoE blocks, so that each rank keeps
half of the experts, and `UBatchWrapper` overlaps their dispatch and combine. Each rank has prompts of its own; logits
and `generate` must equal the untouched model's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe import expert_parallel
from serving.ranks import run_ranks
from ubatch import CommGroup, UBatchConfig, UBatchWrapper

MODEL = Path(__file__).parent / "models" / "tiny-moe"
PROMPTS = (
    ("import os\n", "class Server:\n    def __init__(self", "def main(", "    for line in ", "def test_"),
    ("    raise ValueError(", "def _parse(self, ", "    return self.", "from typing import "),
)


@dataclass(frozen=True)
class Result:
    """The results of one rank."""

    largest_difference: float
    same_tokens: bool
    engaged: int
    declined: dict[str, int]
    texts: Sequence[str]


@torch.inference_mode()
def rank_main(rank: int, world_size: int, folder: Path, max_new_tokens: int) -> list[Result]:
    """One rank: run the untouched model, then the same model expert-parallel and overlapped."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(list(PROMPTS[rank % len(PROMPTS)]), return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    untouched = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected_logits = untouched(**inputs).logits
    expected_tokens = generate(untouched, inputs, max_new_tokens)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expert_parallel(model, CommGroup.from_process_group())
    model = UBatchWrapper(model, UBatchConfig(dbo_prefill_token_threshold=16, dbo_decode_token_threshold=4))

    logits = model(**inputs).logits
    tokens = generate(model, inputs, max_new_tokens)
    statistics = model.statistics()
    model.close()
    real = inputs["attention_mask"].bool()
    own = Result(
        largest_difference=float((logits - expected_logits)[real].abs().max()),
        same_tokens=torch.equal(tokens, expected_tokens),
        engaged=statistics.engaged,
        declined={str(reason): count for reason, count in statistics.declined.items()},
        texts=tokenizer.batch_decode(tokens, skip_special_tokens=True),
    )
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, own)
    return results


def generate(model: Any, inputs: Any, max_new_tokens: int) -> Tensor:
    """Generate greedily; every rank must run the same number of steps, because they share the experts."""
    tokens: Tensor = model.generate(
        **inputs, do_sample=False, min_new_tokens=max_new_tokens, max_new_tokens=max_new_tokens
    )
    return tokens


def main() -> int:
    """Run two ranks and print what happened; exit status 1 if anything differs or nothing overlapped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a Qwen3-MoE or Mixtral checkpoint")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="tokens to generate (default 16)")
    options = parser.parse_args()
    results: list[Result] = run_ranks(rank_main, 2, options.model, options.max_new_tokens)
    for rank, result in enumerate(results):
        print(f"rank {rank}: logits differ by at most {result.largest_difference:.1e}, generated tokens ", end="")
        print("equal" if result.same_tokens else "DIFFERENT", end="")
        print(f", {result.engaged} steps overlapped, not overlapped: {result.declined}")
        print("   " + repr(result.texts[0]))
    good = all(result.same_tokens and result.largest_difference < 1e-3 and result.engaged for result in results)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
