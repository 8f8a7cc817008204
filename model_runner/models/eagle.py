"""An EAGLE-style draft head: it estimates the target's next hidden state, from which the output layer drafts a token.

    input at t     the target's hidden state of token t, and token t + 1
    one step       fc(embedding of token t + 1 | hidden state of token t) -> decoder layers -> norm
    output         an estimate of the hidden state of token t + 1, from which the output layer drafts token t + 2
    the next step  reads the estimate instead of the hidden state, and the draft

Embeddings and output layer are the target's. The layers are Qwen3's, dense: grouped-query attention with normalised
queries and keys. The target may be of any family with the same hidden size and vocabulary.

A checkpoint has `fc.weight` `[hidden, 2 * hidden]`, the layers and the last norm, under the prefix `model.`, and names
the architecture `EagleQwen3ForCausalLM`. `examples/train_eagle_head.py` trains one.

Source: EAGLE (Li and others, 2024), which has neither the first nor the last norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from model_runner.decoder.base import ExpertParallel, current_plan
from model_runner.decoder.config import DecoderConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLayer, DecoderLM
from model_runner.decoder.layers import frozen
from model_runner.decoder.ops import add_rms_norm
from model_runner.decoder.rope import RotaryEmbedding
from model_runner.weights.weights import Checkpoint
from moe import linear

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
