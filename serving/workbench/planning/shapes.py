"""Sizes of a model's matrices for the simulator, read from `config.json` or the presets; the step to plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from model_runner.weights import HFConfig
from serving.workbench.planning.constants import load_constants
from ubatch.errors import ConfigError, nearest, shown


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with MoE layers.

    Attributes:
        layers: number of layers, dense ones included.
        dense_layers, dense_intermediate: layers with a dense MLP instead of experts, and its width.
        experts, top_k, intermediate: number of routed experts, experts per token, width of one expert.
        shared_intermediate: width of all shared experts together; 0 for none.
        groups, top_groups: groups of experts, and how many of them a token uses; 1 and 1 without groups.
        head_dim: size of a head's value.
        kv_heads: number of key/value heads; not used with latent attention.
        q_lora_rank: size of the compressed query; 0 if it is not compressed.
        kv_lora_rank: size of the latent; 0 for multi-head and grouped-query attention.
        nope_dim, rope_dim: sizes of the parts of a head's key without and with rotary embedding. Latent attention only.
    """

    name: str
    hidden: int
    layers: int
    dense_layers: int
    dense_intermediate: int
    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    groups: int
    top_groups: int
    heads: int
    head_dim: int
    kv_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    vocab: int

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    @property
    def latent(self) -> bool:
        """Whether attention is latent (MLA)."""
        return self.kv_lora_rank > 0

    @classmethod
    def from_config(cls, name: str, values: Mapping[str, Any], path: Path) -> ModelShape:
        """Make a shape from the entries of a `config.json`.

        Raises:
            CheckpointError: an entry is missing or not a number.
            ConfigError: the model has no routed experts, or layers with linear attention.
        """
        text = values.get("text_config")  # of models that can see
        if any("linear_num_value_heads" in each for each in (values, text) if isinstance(each, dict)):
            raise ConfigError(
                f"{path}: layers with linear attention cannot be planned, since constants.yaml has no times of their "
                "kernels. Measure them where the model runs, with `ubatch tune`."
            )
        config = HFConfig(values, path)
        experts = config.integer("n_routed_experts", "num_experts", "num_local_experts", default=0, at_least=0)
        if not experts:
            raise ConfigError(f"{path}: the model has no routed experts; there is no expert-parallel step to plan.")
        inner = config.integer("moe_intermediate_size", "intermediate_size")
        shared = config.integer("n_shared_experts", default=0, at_least=0)
        heads = config.integer("num_attention_heads")
        latent = config.integer("kv_lora_rank", default=0, at_least=0)
        hidden = config.integer("hidden_size")
        return cls(
            name=name,
            hidden=hidden,
            layers=config.integer("num_hidden_layers"),
            dense_layers=config.integer("first_k_dense_replace", default=0, at_least=0),
            dense_intermediate=config.integer("intermediate_size"),
            experts=experts,
            top_k=config.integer("num_experts_per_tok"),
            intermediate=inner,
            shared_intermediate=config.integer("shared_expert_intermediate_size", default=shared * inner, at_least=0),
            groups=config.integer("n_group", default=1),
            top_groups=config.integer("topk_group", default=1),
            heads=heads,
            head_dim=config.integer("v_head_dim", "head_dim", default=hidden // heads),
            kv_heads=config.integer("num_key_value_heads", default=heads),
            q_lora_rank=config.integer("q_lora_rank", default=0, at_least=0),
            kv_lora_rank=latent,
            nope_dim=config.integer("qk_nope_head_dim") if latent else 0,
            rope_dim=config.integer("qk_rope_head_dim") if latent else 0,
            vocab=config.integer("vocab_size"),
        )


def read_model(name: str) -> ModelShape:
    """Read the sizes of a preset (`deepseek-v3`, `qwen3-30b-a3b`, ...) or of a checkpoint folder.

    Raises:
        ConfigError: the name is neither a preset nor such a folder.
    """
    presets = load_constants().models
    if name in presets:
        return ModelShape.from_config(name, presets[name], Path("constants.yaml"))
    path = Path(name) / "config.json"
    if not os.path.isfile(path):  # `Path.is_file` raises if the name is too long
        raise ConfigError(
            f"{shown(name)} is neither a folder with a config.json nor one of {', '.join(presets)}"
            f"{nearest(name, presets)}"
        )
    return ModelShape.from_config(Path(name).name, json.loads(path.read_text(encoding="utf-8")), path)


class Mode(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True)
class Workload:
    """One step of every rank.

    Attributes:
        mode: prefill uses the high-throughput kernels, decode and verify use the low-latency ones.
        tokens: tokens per rank.
        context: tokens of a sequence in the cache (decode, verify), or tokens of a prompt (prefill).
        ep: number of ranks.
        tokens_per_sequence: 1, except in verify.
        redundant_experts: copies of experts besides the model's own.
        skew: load of the busiest rank over the mean; 1 is balanced. The mean of `skews`, if those are given.
        skews: the same of every MoE layer; empty if layers are alike.
    """

    mode: Mode
    tokens: int
    context: int
    ep: int
    tokens_per_sequence: int = 1
    redundant_experts: int = 0
    skew: float = 1.0
    skews: tuple[float, ...] = ()
