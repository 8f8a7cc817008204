"""Draft heads: the layers for multi-token prediction that some checkpoints have, and an EAGLE-style one.

The latter estimates the target's next hidden state, from which the output layer drafts a token.

    input at t     the target's hidden state of token t, and token t + 1
    one step       fc(embedding of token t + 1 | hidden state of token t) -> decoder layers -> norm
    output         an estimate of the hidden state of token t + 1, from which the output layer drafts token t + 2
    the next step  reads the estimate instead of the hidden state, and the draft

Embeddings and output layer are the target's. The layers are Qwen3's, dense: grouped-query attention with normalised
queries and keys. The target may be of any family with the same hidden size and vocabulary.

A checkpoint has `fc.weight` `[hidden, 2 * hidden]`, the layers and the last norm, under the prefix `model.`, and names
the architecture `EagleQwen3ForCausalLM`. `examples/train_eagle_head.py` trains one.

Source: EAGLE (Li and others, 2024), which has neither the first nor the last norm.

The multi-token-prediction layer of DeepSeek, GLM-4.5 and Qwen3-Next is a draft head of the model in the same checkpoint
(`MTPLayer`).

    step at t  eh_proj(enorm(embedding of token t + 1) | hnorm(hidden state of token t)) -> decoder layer -> norm
    output     an estimate of the hidden state of token t + 1, from which the model's output layer drafts token t + 2

The layer follows the model's last one in the checkpoint (`model.layers.{num_hidden_layers}`) and is built like it, with
its attention and MoE. Embeddings and output layer are the model's; the copies in published checkpoints are not read.
If a checkpoint has several such layers, the first one drafts every token, from its own estimates.

Qwen3-Next and Qwen3.5 keep the layer apart, as `mtp.layers.0`. It has full attention, so drafting needs no states.

Source of the layer: DeepSeek-V3 (2024), section 2.2.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attention import AttentionShape
from model_runner.decoder.base import ExpertParallel, ModelConfig, current_plan
from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLayer, DecoderLM
from model_runner.decoder.layers import frozen, load_norm
from model_runner.decoder.ops import add_rms_norm, rms_norm
from model_runner.decoder.rope import RotaryEmbedding
from model_runner.errors import CheckpointFileMissing
from model_runner.models.registry import HYBRID
from model_runner.weights.weights import Checkpoint
from moe import linear
from ubatch import ConfigError

EAGLE_ARCHITECTURE = "EagleQwen3ForCausalLM"
"""Architecture name in a head's `config.json`."""


class DraftHead(nn.Module):
    """A head that drafts with embeddings and output layer of its target. A `DraftNetwork`.

    Attributes:
        rope, fc, layers, norm: set by the heads.
    """

    reads_hidden = True
    rope: nn.Module
    fc: nn.Parameter
    layers: nn.ModuleList
    norm: nn.Parameter

    def __init__(self, target: DecoderLM, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = target.embed_tokens.rows
        self.compute_logits = target.compute_logits

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """One step; see `DraftNetwork`."""
        plan, num_tokens = current_plan()
        residual = linear(torch.cat(self.inputs(self.embed(input_ids), hidden), dim=-1), self.fc)
        rotation = self.rope(positions)
        update: Any = None
        for layer in self.layers:
            residual, update = layer(residual, update, rotation, plan, num_tokens)
        return add_rms_norm(update, residual, self.norm, self.config.rms_norm_eps)[0]

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The two inputs of the projection, `[T, hidden_size]` each."""
        return embedded, hidden


class EagleHead(DraftHead):
    """The head of a target.

    Args:
        checkpoint: the head's checkpoint; its architecture is `EAGLE_ARCHITECTURE`.
        parallel: settings for a single rank; a head has no experts.

    Raises:
        CheckpointError: an entry or a tensor is missing or invalid.
    """

    def __init__(self, target: DecoderLM, checkpoint: Checkpoint, parallel: ExpertParallel) -> None:
        attention = read_grouped_query(checkpoint.config)
        config = read_decoder(checkpoint.config, checkpoint.generation_config(), attention, qk_norm=True)
        super().__init__(target, config)
        self.fc = frozen(checkpoint.load("model.fc.weight", config.hidden_size, 2 * config.hidden_size))
        self.rope = RotaryEmbedding(config.rope, attention.head_dim, checkpoint.device)
        numbers = range(config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, checkpoint, parallel, layer) for layer in numbers)
        self.norm = frozen(checkpoint.load("model.norm.weight", config.hidden_size))


_WHAT = "multi-token prediction, which only speculative algorithm mtp reads"


class LayersApart(DecoderLM):
    """A family whose checkpoints keep the layer apart from the model's."""

    @classmethod
    def left(cls, config: DecoderConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
        """See `CausalLM.left`."""
        return {_WHAT: r"mtp\..*"}


class LayersBehind(DecoderLM):
    """A family whose checkpoints may have such layers behind the model's last one."""

    @classmethod
    def left(cls, config: DecoderConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
        """See `CausalLM.left`. A layer behind is one if the config counts it and it has the projection of both inputs;
        another one is the model's."""
        first, number = config.num_layers, _num_behind(checkpoint)
        layers = [f"{config.tensor_prefix}.layers.{layer}" for layer in range(first, first + number)]
        known = [re.escape(layer) for layer in layers if f"{layer}.eh_proj.weight" in checkpoint.names]
        return {_WHAT: rf"({'|'.join(known)})\..*"} if known else {}


def has_layer(config: ModelConfig, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has such a layer. If its weights are not here yet: whether it may have one."""
    behind = not config.linear_layers and _num_behind(checkpoint) > 0
    try:
        names = checkpoint.names
    except CheckpointFileMissing:
        return behind or checkpoint.architecture in HYBRID
    if any(name.startswith("mtp.") for name in names):
        return True
    # transformers leaves the layer out of what it saves, and the count in; random weights have no names
    return behind and (not names or any(name.endswith(".eh_proj.weight") for name in names))


def no_layer(checkpoint: Checkpoint) -> ConfigError:
    """The error for a checkpoint without such a layer; it says where the layer would be."""
    counted = "num_nextn_predict_layers in config.json, and the layer's tensors"
    where = "tensors mtp.*" if checkpoint.architecture in HYBRID else counted
    return ConfigError(
        f"{checkpoint.path} has no layer for multi-token prediction ({where}). Guess with a draft head, a draft model "
        "or n-grams instead."
    )


def _num_behind(checkpoint: Checkpoint) -> int:
    return checkpoint.config.integer("num_nextn_predict_layers", default=0, at_least=0)


def _find(config: DecoderConfig, checkpoint: Checkpoint) -> tuple[str, int, str, tuple[str, ...]]:
    """Where a checkpoint has the layer: prefix and number of the decoder layer, and prefix and names of the norms of
    both inputs, the projection and the last norm."""
    if not has_layer(config, checkpoint):
        raise no_layer(checkpoint)
    if any(name.startswith("mtp.") for name in checkpoint.names):  # whatever kinds of layers the model has
        return "mtp", 0, "mtp", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    prefix, place = config.tensor_prefix, config.num_layers
    return prefix, place, f"{prefix}.layers.{place}", ("enorm", "hnorm", "eh_proj", "shared_head.norm")


class MTPLayer(DraftHead):
    """The first multi-token-prediction layer of a checkpoint.

    Args:
        target: the model; its embeddings, rotary embeddings and output layer are used.
        parallel: settings for a single rank, which holds all experts.

    Raises:
        ConfigError: the checkpoint has no such layer.
        CheckpointError: a tensor of it is missing or has a wrong shape.
    """

    def __init__(self, target: DecoderLM, checkpoint: Checkpoint, parallel: ExpertParallel) -> None:
        config: DecoderConfig = target.config
        prefix, place, own, (embedding_norm, hidden_norm, projection, last_norm) = _find(config, checkpoint)
        if isinstance(config.attention, AttentionShape) and config.attention.layers is not None:
            raise ConfigError(
                f"{checkpoint.path} has attention of several kinds, and multi-token prediction is served for one kind "
                "only. Guess with a draft head, a draft model or n-grams instead."
            )
        hidden_size = config.hidden_size
        moe = None if config.moe is None else replace(config.moe, layers=frozenset({place}))
        kept = replace(config, num_layers=1, moe=moe, linear=None, linear_layers=frozenset())
        super().__init__(target, replace(kept, tensor_prefix=prefix))
        self.rope = target.ropes[0]
        self.embedding_norm, self.hidden_norm, self.norm = (
            load_norm(checkpoint, f"{own}.{name}.weight", hidden_size, zero_centred=config.zero_centred_norms)
            for name in (embedding_norm, hidden_norm, last_norm)
        )
        self.fc = frozen(checkpoint.load(f"{own}.{projection}.weight", hidden_size, 2 * hidden_size))
        layer = DecoderLayer(self.config, checkpoint, parallel, place)
        layer.attention.layer = 0  # the draft cache has one layer
        self.layers = nn.ModuleList([layer])

    @staticmethod
    def left(config: DecoderConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
        """As `CausalLM.left`, for the layer: the model, further such layers, and copies of what the model has, too."""
        own = re.escape(_find(config, checkpoint)[2])
        return {
            "the model": rf"(?!{own}\.).*",
            "further layers": r"mtp\.layers\.[1-9]\d*\..*",
            "copies of embeddings and output layer": rf"{own}\.(embed_tokens|shared_head\.head)\..*",
        }

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftHead`: both are normalised."""
        eps = self.config.rms_norm_eps
        return rms_norm(embedded, self.embedding_norm, eps), rms_norm(hidden, self.hidden_norm, eps)
