"""Overlap in a model that transformers itself shards over two ranks: one line, and the model is not touched.

    python examples/wrap_transformers_parallel.py [--model FOLDER]

`AutoModelForCausalLM.from_pretrained(..., distributed_config=DistributedConfig(...))` shards a model while it loads it.
Two forms, each with and without the wrapper; logits and `generate` must equal the whole model's:

    transformers' own all-to-all    attention and experts are shared by ranks with the same batch;
                                    with `intercept_collectives=True` waits inside torch switch lanes
    ep_implementation="ubatch"      each rank has its own batch (`fsdp_size`), and this project's transports carry the
                                    tokens to their experts; works for every MoE with an expert-parallel plan
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

from moe import register_with_transformers
from serving.ranks import run_ranks
from ubatch import CommGroup, UBatchConfig, UBatchWrapper, summarise, tracing

MODEL = Path(__file__).parent / "models" / "tiny-moe"
PROMPTS = ("import os\n", "class Server:\n    def __init__(self", "def main(", "    for line in ", "def test_")


@torch.no_grad()  # in inference_mode() torch would gather weights instead of activations, and `fully_shard` fails
def rank_main(rank: int, world_size: int, folder: Path) -> bool:
    """One rank: run the whole model, then both forms; whether all is equal and both overlapped."""
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same, own = prompts(folder, 0), prompts(folder, rank)
    config = UBatchConfig(
        group=CommGroup.from_process_group(), dbo_prefill_token_threshold=16, dbo_decode_token_threshold=4
    )

    model = load(folder, DistributedConfig(tp_size=world_size, ep_size=world_size, ep_implementation="all_to_all"))
    overlapped = UBatchWrapper(model, config, intercept_collectives=True)
    good = compare("all_to_all", overlapped, whole, same, rank)

    register_with_transformers()
    model = load(folder, DistributedConfig(fsdp_size=world_size, ep_size=world_size, ep_implementation="ubatch"))
    overlapped = UBatchWrapper(model, config)
    return compare("ubatch", overlapped, whole, own, rank) and good


def load(folder: Path, layout: DistributedConfig) -> Any:
    """Load this rank's shard."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=layout)


def prompts(folder: Path, rank: int) -> Mapping[str, Tensor]:
    """A rank's prompts; rank 1 has one less than rank 0."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(list(PROMPTS[rank:]), return_tensors="pt", padding=True)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def compare(form: str, overlapped: UBatchWrapper, whole: Any, inputs: Mapping[str, Tensor], rank: int) -> bool:
    """Compare the wrapped shard with the whole model; rank 0 prints what happened."""
    expected, real = whole(**inputs).logits, inputs["attention_mask"].bool()
    overlapped(**inputs)  # the first call may run unsplit
    with tracing() as trace:
        logits = overlapped(**inputs).logits
    tokens, expected_tokens = (
        model.generate(**inputs, do_sample=False, min_new_tokens=8, max_new_tokens=8) for model in (overlapped, whole)
    )
    statistics = overlapped.statistics()
    overlapped.close()
    difference = float((logits - expected)[real].abs().max())
    same = torch.equal(tokens, expected_tokens)
    if rank == 0:
        declined = {str(reason): count for reason, count in statistics.declined.items()}
        print(
            f"{form}: logits differ by at most {difference:.1e}, generated tokens {'equal' if same else 'DIFFERENT'}, "
            f"{statistics.engaged} steps overlapped, not overlapped: {declined}\n"
            f"   communication hidden: {summarise(trace.spans).hidden_fraction:.0%}"
        )
    return same and difference < 1e-3 and statistics.engaged > 0


def main() -> int:
    """Run two ranks; exit status 1 if anything differs or nothing overlapped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a MoE checkpoint that transformers shards")
    return 0 if run_ranks(rank_main, 2, parser.parse_args().model) else 1


if __name__ == "__main__":
    sys.exit(main())
