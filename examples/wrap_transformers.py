"""Overlap in a Hugging Face MoE model: expert parallelism in one line, microbatches in another.

    python examples/wrap_transformers.py [--model FOLDER]

Two ranks load the same `AutoModelForCausalLM`. `moe.expert_parallel` replaces its MoE blocks, so that each rank keeps
half of the experts, and `UBatchWrapper` overlaps their dispatch and combine. Each rank has prompts of its own; logits
and `generate` must equal the untouched model's.
"""

import argparse
import sys
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


@torch.inference_mode()
def rank_main(rank: int, world_size: int, folder: Path, max_new_tokens: int) -> list[tuple[bool, str]]:
    """One rank: run the untouched model, then the same model expert-parallel and overlapped.

    Returns for each rank whether all is equal and steps overlapped, and a report.
    """
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
    difference = float((logits - expected_logits)[real].abs().max())
    same = torch.equal(tokens, expected_tokens)
    declined = {str(reason): count for reason, count in statistics.declined.items()}
    report = (
        f"rank {rank}: logits differ by at most {difference:.1e}, generated tokens {'equal' if same else 'DIFFERENT'}, "
        f"{statistics.engaged} steps overlapped, not overlapped: {declined}\n"
        f"   {tokenizer.decode(tokens[0], skip_special_tokens=True)!r}"
    )
    own = same and difference < 1e-3 and statistics.engaged > 0, report
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
    results: list[tuple[bool, str]] = run_ranks(rank_main, 2, options.model, options.max_new_tokens)
    for _, report in results:
        print(report)
    return 0 if all(good for good, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
