"""Loads of experts: of a router over this repository's source text, and made-up ones that are skewed or adverse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from repository import ROOT, TINY_MOE
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

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


def zipf(windows: int, layers: int, experts: int, exponent: float, *, drift: float = 0.05, seed: int = 0) -> Floats:
    """Loads of Zipf's law, whose experts are other ones in each layer; popularity drifts from window to window."""
    chance = np.random.default_rng(seed)
    popularity = chance.permuted(np.tile(np.arange(1, experts + 1.0) ** -exponent, (layers, 1)), axis=1)
    loads = []
    for _ in range(windows):
        popularity *= chance.lognormal(0.0, drift, popularity.shape)
        popularity /= popularity.sum(axis=1, keepdims=True)
        loads.append(chance.multinomial(100_000, popularity))
    return np.array(loads, dtype=np.float64)
