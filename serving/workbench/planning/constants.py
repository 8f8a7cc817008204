"""Typed and checked contents of `constants.yaml`: GPUs, kernels, links, models, and published gains for the gates.

Every block names its source. The file has microseconds and GB/s or TFLOPS, as published; all other modules use
seconds, bytes per second and operations per second.

`ModelShape` has the sizes of a model's matrices, read from `config.json` or the presets; `Workload` is the step that is
planned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from model_runner.weights import HFConfig
from ubatch.errors import ConfigError, nearest, shown


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(_Block):
    """A GPU's datasheet; TFLOPS are without sparsity."""

    sms: int
    hbm_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    source: str


class GemmKernel(_Block):
    """Share of the datasheet's peaks that matrix multiplications reach.

    Attributes:
        hbm_fraction, fp8_fraction, bf16_fraction: shares of the peaks, 0 to 1.
        launch_us: time of an empty multiplication.
        norm: p-norm that combines memory and compute time: 1 is their sum, infinity the greater of them.
        tile_rows: rows per tile; the number of rows is rounded up to whole tiles.
    """

    hbm_fraction: float
    fp8_fraction: float
    bf16_fraction: float
    launch_us: float
    norm: float
    tile_rows: int
    source: str


class ElementwiseKernel(_Block):
    """Norms, quantisation, activations and copies, all bound by memory."""

    hbm_fraction: float
    launch_us: float
    source: str


class DecodeAttentionKernel(_Block):
    """Core attention over the cache: a fixed time, plus the greater of compute and memory time."""

    flops_fraction: float
    hbm_fraction: float
    fixed_us: float
    source: str


class PrefillAttentionKernel(_Block):
    """Core attention of prompts: prompt length -> measured `tflops`, on a GPU with `peak_tflops` in bf16."""

    peak_tflops: float
    tflops: Mapping[int, float]
    source: str


class Kernels(_Block):
    """The constants of all kernels.

    Attributes:
        unlisted: mode -> time of all of a layer's kernels / time of the kernels that the roofline lists.
        gap_us: time between two kernels, inside a CUDA graph.
    """

    gemm: GemmKernel
    elementwise: ElementwiseKernel
    attention_decode: DecodeAttentionKernel
    attention_prefill: PrefillAttentionKernel
    unlisted: Mapping[str, float]
    unlisted_source: str
    gap_us: float
    gap_source: str


class Link(_Block):
    """A transport between ranks, as DeepEP publishes it.

    Attributes:
        gpus_per_node: ranks that reach each other over NVLink.
        nic_gb_per_s: network bandwidth of one rank, between nodes.
        reference_nic_gb_per_s: the same on the machine that the tables were measured on.
        reference_tokens, reference_hidden, reference_top_k: the workload that the tables were measured with.
        low_latency_us: number of ranks -> time of (dispatch, combine).
        latency_us: the part of these times that does not depend on the bytes.
        send_us, receive_us: kind of transfer -> time on the SMs (without tokens, with the reference's tokens).
        high_throughput_gb_per_s: number of ranks -> speed of (dispatch, combine); a token's bytes count once for each
            node that it goes to.
        high_throughput_sms: SMs that the high-throughput kernels occupy.
    """

    gpus_per_node: int
    nic_gb_per_s: float
    reference_nic_gb_per_s: float
    reference_tokens: int
    reference_hidden: int
    reference_top_k: int
    low_latency_us: Mapping[int, tuple[float, float]]
    latency_us: float
    send_us: Mapping[str, tuple[float, float]]
    receive_us: Mapping[str, tuple[float, float]]
    high_throughput_gb_per_s: Mapping[int, tuple[float, float]]
    high_throughput_sms: int
    source: str


class Hardware(_Block):
    """A GPU, and the link between several of them."""

    name: str
    gpu: Gpu
    link: Link


class _Prefill(_Block):
    ep: int
    tokens: int
    contexts: tuple[int, ...]
    gain: tuple[float, float]


class _Decode(_Block):
    ep: int
    context: int
    gains: Mapping[int, float]
    crossover: tuple[int, int]


class _Verify(_Block):
    ep: int
    context: int
    tokens: int
    tokens_per_sequence: int
    gain: float
    miss: str


class PublishedGains(_Block):
    """Published gains of two-batch overlap; `points` is the largest error that a prediction may have, and `miss` says
    why a prediction has a larger one."""

    source: str
    redundant_experts: int
    prefill: _Prefill
    decode: _Decode
    verify: _Verify
    points: float


class PublishedBalance(_Block):
    """Published gains of balanced experts, as shares of the throughput, and what is assumed of the skew.

    Attributes:
        step: the schedule.
        context: tokens of a sequence in the cache, or of a prompt.
        redundant_experts: copies of the first experts, where nothing is balanced.
        model: sizes in which the model differs from DeepSeek-V3.
        zipf: the skew: exponents of the experts' popularity in the least and in the most skewed layer.
        balancedness: the skew: the mean rank's load over the busiest's, in all layers.
        fitted_to: the gain that the skew was fitted to; empty if to none of these.
        gains: `perfect` balance, `rearranged` experts, or a placement with `N redundant` ones.
    """

    name: str
    source: str
    hardware: str
    step: str
    mode: str
    ep: int
    tokens: int
    context: int
    redundant_experts: int
    model: Mapping[str, int] = {}
    zipf: tuple[float, float] | None = None
    balancedness: float | None = None
    fitted_to: str = ""
    gains: Mapping[str, float]


class Constants(_Block):
    """The whole file, except `deepgemm`, `decode_profile` and `prefill_profile`: measurements that some constants were
    derived from."""

    kernels: Kernels
    hardware: Mapping[str, Hardware]
    models: Mapping[str, Mapping[str, int]]
    gates: PublishedGains
    balancing: tuple[PublishedBalance, ...]

    def machine(self, name: str) -> Hardware:
        """The hardware of that name.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in self.hardware:
            raise ConfigError(f"unknown hardware {shown(name)}{nearest(name, self.hardware)}")
        return self.hardware[name]


@cache
def load_constants() -> Constants:
    text = resources.files(__package__).joinpath("constants.yaml").read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml.safe_load(text)
    links, gpus, *_ = [raw.pop(name) for name in ("links", "gpus", "deepgemm", "decode_profile", "prefill_profile")]
    raw["hardware"] = {
        name: {"name": name, "gpu": gpus[parts["gpu"]], "link": links[parts["link"]]}
        for name, parts in raw["hardware"].items()
    }
    return Constants.model_validate(raw)


# -- the model and the step --------------------------------------------------------------------------------------------


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
