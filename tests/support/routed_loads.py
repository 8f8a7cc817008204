"""Loads of experts, of a router over this repository's source text.

`PYTHONPATH=. python tests/support/routed_loads.py` writes the files in `examples/expert_loads`: 32 steps of 2,048
tokens. They were written once: the source text changes.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from repository import ROOT, TINY_MOE
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from moe.balance import write_loads
from moe.placement import Floats


def of_source_text(windows: int, tokens: int = 2048, experts: int = 0, layers: int = 4, top_k: int = 8) -> Floats:
    """`[windows, layers, experts]`: tokens that tiny-moe routes to each expert, window after window of source files.

    Args:
        tokens: of a window.
        experts: if given, a model with random weights and so many experts takes tiny-moe's place.
        layers, top_k: of that model.
    """
    torch.manual_seed(0)
    if experts:
        config = Qwen3MoeConfig(
            **{"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 32, "num_experts": experts, "num_experts_per_tok": top_k},
            **{"moe_intermediate_size": 32, "initializer_range": 0.05, "norm_topk_prob": True},
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32)
        experts, top_k = model.config.num_experts, model.config.num_experts_per_tok
    loads = []
    with torch.inference_mode():
        for ids in _source_tokens(windows, tokens):
            routed = model(input_ids=ids.view(-1, 256), output_router_logits=True, use_cache=False).router_logits
            chosen = [layer.topk(top_k, dim=-1).indices.flatten() for layer in routed]
            loads.append([torch.bincount(each, minlength=experts).numpy() for each in chosen])
    return np.array(loads, dtype=np.float64)


def _source_tokens(windows: int, tokens: int) -> Iterator[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MOE)
    left: list[int] = []
    for file in sorted(Path(ROOT).glob("[a-z]*/**/*.py")):
        left += tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
        while len(left) >= tokens:
            yield torch.tensor(left[:tokens])
            left, windows = left[tokens:], windows - 1
            if not windows:
                return


if __name__ == "__main__":
    EXAMPLES = ROOT / "examples" / "expert_loads"
    write_loads(EXAMPLES / "tiny-moe.npy", of_source_text(32).astype(np.uint16))
    write_loads(EXAMPLES / "128-experts.npy", of_source_text(32, experts=128).astype(np.uint16))
