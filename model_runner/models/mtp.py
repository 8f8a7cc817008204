"""The multi-token-prediction layer of DeepSeek and GLM-4.5, as a draft head of the model in the same checkpoint.

    step at t  eh_proj(enorm(embedding of token t + 1) | hnorm(hidden state of token t)) -> decoder layer -> norm
    output     an estimate of the hidden state of token t + 1, from which the model's output layer drafts token t + 2

The layer follows the model's last one in the checkpoint (`model.layers.{num_hidden_layers}`) and is built like it, with
its attention and MoE. Embeddings and output layer are the model's; the copies in published checkpoints are not read.
If a checkpoint has several such layers, the first one drafts every token, from its own estimates.

Source: DeepSeek-V3 (2024), section 2.2.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from model_runner.decoder.base import ExpertParallel, current_plan
from model_runner.decoder.config import DecoderConfig
from model_runner.decoder.decoder import DecoderLayer, DecoderLM
from model_runner.decoder.layers import frozen
from model_runner.decoder.ops import add_rms_norm, rms_norm
from model_runner.weights.weights import Checkpoint
from moe import linear
from ubatch import ConfigError

__all__ = ["MTPLayer"]


class MTPLayer(nn.Module):
    """The first multi-token-prediction layer of a checkpoint. A `DraftNetwork`.

    Args:
        target: the model; its embeddings, rotary embeddings and output layer are used.
        parallel: settings for a single rank, which holds all experts.

    Raises:
        ConfigError: the checkpoint has no such layer.
        CheckpointError: a tensor of it is missing or has a wrong shape.
    """

    reads_hidden = True

    def __init__(self, target: DecoderLM, checkpoint: Checkpoint, parallel: ExpertParallel) -> None:
        super().__init__()
        if not checkpoint.config.integer("num_nextn_predict_layers", default=0, at_least=0):
            raise ConfigError(
                f"{checkpoint.path} has no layer for multi-token prediction (num_nextn_predict_layers); speculate with "
                "a draft head, a draft model or n-grams instead."
            )
        config: DecoderConfig = target.config
        place, hidden_size, eps = config.num_layers, config.hidden_size, config.rms_norm_eps
        moe = None if config.moe is None else replace(config.moe, layers=frozenset({place}))
        self.config = replace(config, num_layers=1, moe=moe)
        self.eps = eps
        self.embed = target.embed_tokens.rows
        self.rope = target.rope
        self.compute_logits = target.compute_logits
        prefix = f"model.layers.{place}"
        self.embedding_norm = frozen(checkpoint.load(f"{prefix}.enorm.weight", hidden_size))
        self.hidden_norm = frozen(checkpoint.load(f"{prefix}.hnorm.weight", hidden_size))
        self.fc = frozen(checkpoint.load(f"{prefix}.eh_proj.weight", hidden_size, 2 * hidden_size))
        self.layer = DecoderLayer(self.config, checkpoint, parallel, place)
        self.layer.attention.layer = 0  # the draft cache has one layer
        self.norm = frozen(checkpoint.load(f"{prefix}.shared_head.norm.weight", hidden_size))

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """One step; see `DraftNetwork`."""
        plan, num_tokens = current_plan()
        embedded = rms_norm(self.embed(input_ids), self.embedding_norm, self.eps)
        both = torch.cat((embedded, rms_norm(hidden, self.hidden_norm, self.eps)), dim=-1)
        residual, update = self.layer(linear(both, self.fc), None, self.rope(positions), plan, num_tokens)
        return add_rms_norm(update, residual, self.norm, self.eps)[0]
