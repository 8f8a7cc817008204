"""The decoder that all model families share; a family is defined by its `read_config`.

One layer, and the points it passes (those inside the MoE are in `moe.modular_kernel`):

    + residual, norm | projections, rope  ATTN_PREPARE  core attention, out
    + residual, norm | router  SELECT  dispatch DISPATCH  experts  combine COMBINE  OUTPUT, LAYER

The output of each half (one line above) is added to the residual at the start of the next half, in one kernel with the
norm. A dense layer has an MLP in place of the second line, and passes only the last point, LAYER.

Under tensor parallelism rows are also gathered and scattered between these steps, at further points:
`model_runner.decoder.scatter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attention import MLAShape
from model_runner.decoder.base import CausalLM, ExpertParallel, current_plan
from model_runner.decoder.config import DecoderConfig
from model_runner.decoder.latent_attention import LatentAttention
from model_runner.decoder.layers import (
    AllHeadsNormAttention,
    Attention,
    GatedDeltaNet,
    GatedMLP,
    Projection,
    load_norm,
    pack_projections,
)
from model_runner.decoder.repeated import RepeatedLayers
from model_runner.decoder.rope import Rope, RotaryEmbedding, RotaryTable
from model_runner.decoder.scatter import (
    Layout,
    ScatterMode,
    comm_final,
    comm_prepare_attn,
    comm_prepare_mlp,
    current_layout,
)
from model_runner.decoder.sparse_mlp import SparseMLP
from model_runner.weights.weights import Checkpoint
from ubatch import Point, dbo_yield, get_forward_context
from ubatch.process import beat


class DecoderLM(CausalLM):
    """A decoder-only model of layers with attention and a dense or sparse MLP. A family adds `read_config`."""

    config: DecoderConfig
    serves_tensor_parallel = True

    @classmethod
    def load(cls, config: DecoderConfig, checkpoint: Checkpoint, parallel: ExpertParallel) -> DecoderLM:
        """See `CausalLM.load`."""
        with checkpoint.one_pass():
            return cls(config, checkpoint, parallel)

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, parallel: ExpertParallel) -> None:
        super().__init__()
        self.config = config
        self.tensor_parallel = parallel.tensor
        vocabulary = (config.vocab_size, config.hidden_size)
        with checkpoint.once_read(lambda: pack_projections(self.lm_head, parallel.experts)):
            embedding = f"{config.tensor_prefix}.embed_tokens.weight"
            self.lm_head = self.embed_tokens = Projection(checkpoint.load(embedding, *vocabulary))
            if not config.tie_word_embeddings or checkpoint.has_other("lm_head.weight", embedding):
                self.lm_head = Projection(checkpoint.load("lm_head.weight", *vocabulary))
        ropes = (config.rope,) if config.layer_ropes is None else tuple(dict.fromkeys(config.layer_ropes))
        self.ropes = nn.ModuleList(_rotary(config, rope, checkpoint) for rope in ropes)
        self._rope_of = [ropes.index(rope) for rope in config.layer_ropes or ropes * config.num_layers]
        self.layers = nn.ModuleList(
            DecoderLayer(config, checkpoint, parallel, layer) for layer in range(config.num_layers)
        )
        self.norm = _norm(config, checkpoint, f"{config.tensor_prefix}.norm.weight")
        self._all2all = parallel.all2all
        self._repeated: RepeatedLayers | None = None
        if parallel.experts == "native":
            self._repeated = RepeatedLayers(self._run_layers, self.modules)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        plan, num_tokens = current_plan()
        layout = current_layout(self.tensor_parallel)
        own_ids = input_ids if layout is None else layout.own(input_ids)
        hidden, scale = self.embed_tokens.rows(own_ids), self.config.embedding_scale
        hidden, rotary = hidden if scale == 1 else hidden * scale, [rope(positions) for rope in self.ropes]
        needed = self._needed_rows()
        if self._repeated is not None and layout is None and needed is None:
            return self._repeated(hidden, rotary, plan, num_tokens)
        return self._run_layers(hidden, rotary, plan, num_tokens, layout, needed)

    def _needed_rows(self) -> Tensor | None:
        context = get_forward_context()
        if context is None or context.needed_rows is None:
            return None
        traits = self._all2all.traits  # one that does not route sends as many rows as the ranks voted on
        return context.needed_rows if traits.routed or not traits.other_ranks else None

    def _run_layers(
        self,
        hidden: Tensor,
        rotary: Sequence[Any],
        plan: Any,
        num_tokens: int | Tensor,
        layout: Layout | None = None,
        needed: Tensor | None = None,
    ) -> Tensor:
        update = None
        for number, (layer, rope) in enumerate(zip(self.layers, self._rope_of, strict=True), 1):
            rows = needed if number == len(self.layers) else None
            hidden, update = layer(hidden, update, rotary[rope], plan, num_tokens, layout, rows)
            beat()  # a step without lanes may take longer than the watchdog's time-out
            dbo_yield(Point.LAYER)
        return comm_final(update, hidden, self.norm, self.config.residual_eps, layout)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """See `CausalLM.compute_logits`."""
        logits, divisor = self.lm_head.scores(hidden_states), self.config.logits_divisor
        return logits if divisor == 1 else logits / divisor


class DecoderLayer(nn.Module):
    """Attention and a (dense or sparse) MLP, each behind a norm and added to the residual."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, parallel: ExpertParallel, layer: int) -> None:
        super().__init__()
        self.eps = config.residual_eps
        with checkpoint.once_read(lambda: pack_projections(self, parallel.experts)):
            prefix = f"{config.tensor_prefix}.layers.{layer}"
            self.input_norm = _norm(config, checkpoint, f"{prefix}.input_layernorm.weight")
            self.attention = _attention(config, checkpoint, layer, parallel)
            self.post_attention_norm = _norm(config, checkpoint, f"{prefix}.post_attention_layernorm.weight")
            self.mlp: GatedMLP | SparseMLP
            self.mlp_mode = ScatterMode.TP_ATTN_FULL
            if config.moe is not None and layer in config.moe.layers:
                self.mlp = SparseMLP(config.moe, config, checkpoint, layer, parallel)
                self.mlp_mode = ScatterMode.SCATTERED
            else:
                sizes = config.hidden_size, config.intermediate_size
                self.mlp = GatedMLP(checkpoint, f"{prefix}.mlp", *sizes, bias=config.mlp_bias, shard=parallel.shard)

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotary: Any,
        plan: Any,
        num_tokens: int | Tensor,
        layout: Layout | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on `[T, hidden_size]`; returns the residual, and the update still to be added to it.

        Args:
            update: the previous layer's output, not yet added to the residual; None in the first layer.
            rotary: a `Rotation` for multi-head attention, a `RopeTable` for latent attention.
            num_tokens: number of rows that are tokens; the rest is padding.
            layout: how the rows are spread over the ranks that share attention; None if this rank has all rows. With a
                layout, residual and update hold this rank's share only.
            rows: the MLP runs for these rows of this rank only, and the others' update is zero; None for all rows. A
                dense MLP whose columns are shared out runs for all.
        """
        x, hidden = comm_prepare_attn(update, hidden, self.input_norm, self.eps, layout)
        update = self.attention(x, rotary, plan)
        x, hidden = comm_prepare_mlp(update, hidden, self.post_attention_norm, self.eps, self.mlp_mode, layout)
        whole = x
        if rows is not None and layout is not None and self.mlp_mode is not ScatterMode.SCATTERED:
            rows = None
        if rows is not None:
            x, num_tokens = x.index_select(0, rows), rows.shape[0]
        elif layout is not None:
            num_tokens = layout.share_tokens
        update = self.mlp(x, num_tokens) if isinstance(self.mlp, SparseMLP) else self.mlp(x)
        if rows is not None:
            return hidden, torch.zeros_like(whole).index_copy_(0, rows, update)
        return hidden, update if layout is None else layout.scatter(update, self.mlp_mode, Point.MLP_SCATTER)


def _rotary(config: DecoderConfig, rope: Rope, checkpoint: Checkpoint) -> RotaryEmbedding | RotaryTable:
    shape, device = config.attention, checkpoint.device
    if isinstance(shape, MLAShape):
        rows, interleaved = config.max_position_embeddings, config.rope_interleaved
        return RotaryTable(rope, shape.qk_rope_head_dim, rows, interleaved=interleaved, device=device)
    return RotaryEmbedding(rope, shape.head_dim, device)


def _norm(config: DecoderConfig, checkpoint: Checkpoint, name: str) -> nn.Parameter:
    return load_norm(checkpoint, name, config.hidden_size, zero_centred=config.zero_centred_norms)


def _attention(
    config: DecoderConfig, checkpoint: Checkpoint, layer: int, parallel: ExpertParallel
) -> Attention | LatentAttention | GatedDeltaNet:
    shape, others = config.attention, (config, checkpoint, layer, parallel)
    if config.linear is not None and layer in config.linear_layers:
        return GatedDeltaNet(config.linear, *others)
    if isinstance(shape, MLAShape):
        return LatentAttention(shape, *others)
    kind = AllHeadsNormAttention if config.norms_all_heads else Attention
    return kind(shape.of_layer(config.place(layer)), *others)
