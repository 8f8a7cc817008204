"""The zoo's layers of torch.nn: what is row by row overlaps, also where the batch is not dimension 0 of an output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from wrapping import made
from zoo_entry import (
    OVERLAPS,
    Call,
    floats,
    given,
    growing,
    inference,
    of,
    of_family,
    one_of,
    several,
    token_ids,
    training_step,
)

from ubatch import DeclineReason as Why

WIDTH, HEADS = 8, 4
WIDE = (WIDTH, "width")
CHANNELS = (6, "channels, height")


def mlp(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH)).to(dtype)


def conv_net(norm: Callable[[int], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )


def encoder_layer(batch_first: bool, **options: bool) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=batch_first, **options).eval()


def encoder() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(True, norm_first=True), 2, enable_nested_tensor=False).eval()


def transformer(batch_first: bool) -> Callable[[], nn.Module]:
    options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": True}
    return lambda: nn.Transformer(WIDTH, HEADS, 1, 1, 16, **options).eval()


def self_attention(batch_first: bool) -> Callable[[], nn.Module]:
    """`nn.MultiheadAttention` of a sequence with itself, in a module of one argument."""

    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attention(x, x, x)
        return x + out, weights

    return inference(made(forward, attention=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)))


def norm_over_batch(batch: int) -> nn.Module:
    """A `LayerNorm` over `[batch, sequence]`, with a weight for each."""
    return made(lambda self, x: self.norm(x), norm=lambda: nn.LayerNorm([batch, 5]))()


def ids(batch: int) -> Call:
    return given(token_ids(batch))


def sequences(batch: int) -> Call:
    """`[sequence, batch, width]`, torch's default layout."""
    return given(torch.randn(5, batch, WIDTH))


def sequence_first_pair(batch: int) -> Call:
    return given(torch.randn(5, batch, WIDTH), torch.randn(3, batch, WIDTH))


def masked_source_and_target(batch: int) -> Call:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    return given(torch.randn(batch, 5, WIDTH), torch.randn(batch, 3, WIDTH), tgt_mask=mask)


def masked_sequences(batch: int) -> Call:
    return given(torch.randn(batch, 5, WIDTH), torch.ones(5, 5).triu(1).bool())


def bags(batch: int) -> Call:
    """A flat list of tokens and where each row begins."""
    return given(torch.randint(0, 64, (3 * batch,)), torch.arange(batch) * 3)


def rows_and_matrix(batch: int) -> Call:
    return given(torch.randn(batch, WIDTH), torch.randn(WIDTH, 5), torch.randn(5))


SQUARE_MASK = one_of(OVERLAPS, Why.LANE_FAILED, Why.ROWS_DEPEND, Why.CANNOT_MERGE)
"""A mask `[S, S]` at batch S reads as one row per sample, too."""
GROUPS = conv_net(lambda width: nn.GroupNorm(3, width))
NO_STATISTICS = conv_net(lambda width: nn.BatchNorm2d(width, track_running_stats=False))
BATCH_NORM = "batch_norm_in_training"

_layer = of_family("torch.nn")
_trained = of_family("training", grad=True, act=training_step)

ENTRIES = [
    _layer(
        "distances to given centres [K, E]",
        of(torch.cdist),
        lambda batch: given(torch.randn(batch, WIDTH), torch.randn(5, WIDTH)),
        collides=(5, "centres"),
        at={5: SQUARE_MASK},
    ),
    _layer(
        "rows times a given matrix [E, F]",
        of(lambda x, weight, bias: x @ weight + bias),
        rows_and_matrix,
        collides=WIDE,
        at={8: SQUARE_MASK},
    ),
    _layer("Linear", lambda: nn.Linear(WIDTH, 4), floats(WIDTH), collides=WIDE),
    _layer("Linear, rows of tokens", lambda: nn.Linear(WIDTH, 4), floats(5, WIDTH)),
    _layer("MLP", inference(mlp), floats(WIDTH), collides=(16, "inner width")),
    _layer(
        "MLP in bf16",
        inference(lambda: mlp(torch.bfloat16)),
        floats(5, WIDTH, dtype=torch.bfloat16),
        collides=WIDE,
        acts=4,
    ),
    _layer("MLP in fp64", inference(lambda: mlp(torch.float64)), floats(WIDTH, dtype=torch.float64), collides=WIDE),
    _layer("MLP, torch.jit.script", lambda: torch.jit.script(mlp()), floats(WIDTH), "jit_module", collides=WIDE),
    _layer("Bilinear", lambda: nn.Bilinear(WIDTH, 5, 6), several((WIDTH,), (5,)), collides=(5, "width")),
    _layer("CosineSimilarity", nn.CosineSimilarity, several((WIDTH,), (WIDTH,)), collides=WIDE),
    _layer("Embedding", lambda: nn.Embedding(64, WIDTH), ids),
    _layer("EmbeddingBag, [B, S]", lambda: nn.EmbeddingBag(64, WIDTH), ids),
    _layer(
        "EmbeddingBag with offsets",
        lambda: nn.EmbeddingBag(64, WIDTH),
        bags,
        one_of(Why.LANE_FAILED, Why.CANNOT_MERGE),
        collides=(3, "tokens of a bag"),
    ),
    _layer("Conv1d", lambda: nn.Conv1d(4, 6, 3), floats(4, 9), collides=(4, "channels")),
    _layer("ConvTranspose2d", lambda: nn.ConvTranspose2d(3, 4, 2, stride=2), floats(3, 5, 5), collides=(5, "height")),
    _layer("ConvNet, BatchNorm in eval", inference(conv_net(nn.BatchNorm2d)), floats(3, 6, 6), collides=CHANNELS),
    _layer("ConvNet, BatchNorm in training", conv_net(nn.BatchNorm2d), floats(3, 6, 6), BATCH_NORM, collides=CHANNELS),
    _layer(
        "ConvNet, BatchNorm without statistics",
        inference(NO_STATISTICS),
        floats(3, 6, 6),
        BATCH_NORM,
        collides=CHANNELS,
    ),
    _layer("ConvNet, GroupNorm", inference(GROUPS), floats(3, 6, 6), collides=(3, "groups, channels")),
    _layer("ConvNet, InstanceNorm", inference(conv_net(nn.InstanceNorm2d)), floats(3, 6, 6), collides=CHANNELS),
    _layer("LayerNorm", lambda: nn.LayerNorm(WIDTH), floats(5, WIDTH)),
    _layer("LayerNorm over [B, S]", norm_over_batch, floats(5), Why.LANE_FAILED, per_batch=True),
    _layer("layer_norm over the whole shape", of(lambda x: F.layer_norm(x, x.shape)), floats(5), Why.ROWS_DEPEND),
    _layer("Dropout in training", lambda: mlp(dropout=0.5), floats(WIDTH), "dropout_in_training", collides=WIDE),
    _layer("Dropout of rate 0 in training", mlp, floats(WIDTH), collides=WIDE, grad=True, act=training_step),
    _trained(
        "ConvNet, training step",
        conv_net(lambda width: nn.GroupNorm(2, width)),
        floats(3, 6, 6),
        collides=(3, "channels"),
    ),
    _trained("Transformer encoder, training step", growing(encoder), floats(5, WIDTH)),
    _trained(
        "MLP, training step through its argument",
        inference(mlp),
        lambda batch: given(torch.randn(batch, WIDTH, requires_grad=True)),
        collides=WIDE,
    ),
    _layer("TransformerEncoderLayer", lambda: encoder_layer(True), floats(5, WIDTH)),
    _layer("TransformerEncoderLayer, sequence first", lambda: encoder_layer(False), sequences, Why.SEQUENCE_FIRST),
    _layer("TransformerEncoder", encoder, floats(5, WIDTH), collides=(HEADS, "heads")),
    _layer("TransformerEncoder with a mask [S, S]", encoder, masked_sequences, at={5: SQUARE_MASK}),
    _layer("Transformer", transformer(True), several((5, WIDTH), (3, WIDTH))),
    _layer("Transformer, sequence first", transformer(False), sequence_first_pair, Why.SEQUENCE_FIRST),
    _layer(
        "Transformer with a mask [T, T]",
        transformer(True),
        masked_source_and_target,
        collides=(3, "target length"),
        at={3: SQUARE_MASK},
    ),
    _layer(
        "MultiheadAttention",
        inference(lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
        several(*[(5, WIDTH)] * 3),
    ),
    _layer(
        "MultiheadAttention, sequence first",
        inference(lambda: nn.MultiheadAttention(WIDTH, HEADS)),
        lambda batch: given(*torch.randn(3, 5, batch, WIDTH)),
        Why.SEQUENCE_FIRST,
    ),
    _layer("Self-attention in a module", self_attention(True), floats(5, WIDTH)),
    _layer("Self-attention in a module, sequence first", self_attention(False), sequences, Why.ROWS_DEPEND),
]
