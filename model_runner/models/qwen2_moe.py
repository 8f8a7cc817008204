"""Qwen2-MoE: Qwen2's attention, and a softmax-routed MoE whose shared expert has a gate.

Layers named in `mlp_only_layers`, or skipped by `decoder_sparse_step`, have a dense MLP instead.

Source: Qwen1.5-MoE (2024) and the `Qwen2MoeForCausalLM` checkpoints on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from model_runner.decoder.config import DecoderConfig, MoEConfig, TensorNames, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.models.mixtral import read_softmax_moe
from model_runner.models.qwen2 import read_qwen_windows
from model_runner.weights.hf_config import HFConfig


class Qwen2MoeForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        renormalize = config.flag("norm_topk_prob", False)
        moe = read_gated_moe(config, read_sparse_layers(config), renormalize=renormalize)
        attention = read_grouped_query(config, layer_windows=_windows(config))
        return read_decoder(config, generation, attention, moe=moe, qkv_bias=config.flag("qkv_bias", True))


def _windows(config: HFConfig) -> list[int | None]:
    """The sliding window of every layer: by default of every other one before `max_window_layers`."""
    used, last = config.flag("use_sliding_window", False), config.integer("max_window_layers", default=28, at_least=0)
    slides = [used and layer % 2 == 0 and layer < last for layer in range(config.integer("num_hidden_layers"))]
    return read_qwen_windows(config, ["sliding_attention" if each else "full_attention" for each in slides])


def read_gated_moe(config: HFConfig, layers: Iterable[int], *, renormalize: bool) -> MoEConfig:
    """The MoE of some layers, with a shared expert that has a gate; see `read_softmax_moe`."""
    names, shared = TensorNames(shared="mlp.shared_expert"), config.integer("shared_expert_intermediate_size")
    own: dict[str, Any] = {"shared_intermediate_size": shared, "shared_gate": True, "names": names}
    return read_softmax_moe(config, renormalize=renormalize, layers=layers, size="moe_intermediate_size", **own)


def read_sparse_layers(config: HFConfig) -> frozenset[int]:
    """Numbers of the layers with a MoE."""
    dense, step = frozenset(config.integers("mlp_only_layers")), config.integer("decoder_sparse_step", default=1)
    layers = range(config.integer("num_hidden_layers"))
    return frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
