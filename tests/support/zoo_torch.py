"""The zoo's layers of torch.nn: what is row by row overlaps, also where the batch is not dimension 0 of an output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_entry import (
    CANNOT_MERGE,
    LANE_FAILED,
    OVERLAPS,
    ROWS_DEPEND,
    SEQUENCE_FIRST,
    Call,
    Entry,
    floats,
    given,
    of,
    one_of,
    token_ids,
    training_step,
)

WIDTH, HEADS = 8, 4


def mlp(dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH)).to(dtype)


def conv_net(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


def encoder_layer(batch_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=batch_first).eval()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def transformer(batch_first: bool) -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout=0.0, batch_first=batch_first, norm_first=True).eval()


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence with itself, in a module of one argument."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attention(x, x, x)
        return x + out, weights


class NormOverBatch(nn.Module):
    """A `LayerNorm` over `[batch, sequence]`, with a weight for each."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm([batch, 5])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def scripted() -> nn.Module:
    return torch.jit.script(mlp())


def several(*shapes: tuple[int, ...]) -> Callable[[int], Call]:
    """Tensors `[batch, *shape]` by position."""
    return lambda batch: given(*(torch.randn(batch, *shape) for shape in shapes))


def sequences(batch: int) -> Call:
    """`[sequence, batch, width]`, torch's default layout."""
    return given(torch.randn(5, batch, WIDTH))


def source_and_target(batch_first: bool) -> Callable[[int], Call]:
    def make(batch: int) -> Call:
        source, target = torch.randn(batch, 5, WIDTH), torch.randn(batch, 3, WIDTH)
        return given(source, target) if batch_first else given(source.transpose(0, 1), target.transpose(0, 1))

    return make


def masked_source_and_target(batch: int) -> Call:
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    return given(torch.randn(batch, 5, WIDTH), torch.randn(batch, 3, WIDTH), tgt_mask=mask)


def masked_sequences(batch: int) -> Call:
    return given(torch.randn(batch, 5, WIDTH), torch.ones(5, 5).triu(1).bool())


def bags(batch: int) -> Call:
    """A flat list of tokens and where each row begins."""
    return given(torch.randint(0, 64, (3 * batch,)), torch.arange(batch) * 3)


def growing(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """In training mode, as it was made."""
    return lambda: module().train()


def inference(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: module().eval()


SQUARE_MASK = one_of(OVERLAPS, LANE_FAILED, ROWS_DEPEND, CANNOT_MERGE)
"""A mask `[S, S]` at batch S reads as one row per sample, too."""

ENTRIES = [
    Entry(
        "distances to given centres [K, E]",
        "torch.nn",
        of(torch.cdist),
        lambda batch: given(torch.randn(batch, WIDTH), torch.randn(5, WIDTH)),
        with_what="centres",
        at={5: SQUARE_MASK},
    ),
    Entry(
        "rows times a given matrix [E, F]",
        "torch.nn",
        of(lambda x, weight, bias: x @ weight + bias),
        lambda batch: given(torch.randn(batch, WIDTH), torch.randn(WIDTH, 5), torch.randn(5)),
        collides=8,
        with_what="width",
        at={8: SQUARE_MASK},
    ),
    Entry("Linear", "torch.nn", lambda: nn.Linear(WIDTH, 4), floats(WIDTH), collides=8, with_what="width"),
    Entry("Linear, rows of tokens", "torch.nn", lambda: nn.Linear(WIDTH, 4), floats(5, WIDTH)),
    Entry("MLP", "torch.nn", inference(mlp), floats(WIDTH), collides=16, with_what="inner width"),
    Entry(
        "MLP in bf16",
        "torch.nn",
        inference(lambda: mlp(torch.bfloat16)),
        lambda batch: given(torch.randn(batch, 5, WIDTH).bfloat16()),
        collides=8,
        with_what="width",
        acts=4,
    ),
    Entry(
        "MLP in fp64",
        "torch.nn",
        inference(lambda: mlp(torch.float64)),
        lambda batch: given(torch.randn(batch, WIDTH).double()),
        collides=8,
        with_what="width",
    ),
    Entry("MLP, torch.jit.script", "torch.nn", scripted, floats(WIDTH), "jit_module", 8, "width"),
    Entry("Bilinear", "torch.nn", lambda: nn.Bilinear(WIDTH, 5, 6), several((WIDTH,), (5,)), with_what="width"),
    Entry(
        "CosineSimilarity", "torch.nn", nn.CosineSimilarity, several((WIDTH,), (WIDTH,)), collides=8, with_what="width"
    ),
    Entry("Embedding", "torch.nn", lambda: nn.Embedding(64, WIDTH), lambda batch: given(token_ids(batch))),
    Entry(
        "EmbeddingBag, [B, S]", "torch.nn", lambda: nn.EmbeddingBag(64, WIDTH), lambda batch: given(token_ids(batch))
    ),
    Entry(
        "EmbeddingBag with offsets",
        "torch.nn",
        lambda: nn.EmbeddingBag(64, WIDTH),
        bags,
        one_of(LANE_FAILED, CANNOT_MERGE),
        3,
        "tokens of a bag",
    ),
    Entry("Conv1d", "torch.nn", lambda: nn.Conv1d(4, 6, 3), floats(4, 9), collides=4, with_what="channels"),
    Entry(
        "ConvTranspose2d",
        "torch.nn",
        lambda: nn.ConvTranspose2d(3, 4, 2, stride=2),
        floats(3, 5, 5),
        with_what="height",
    ),
    Entry(
        "ConvNet, BatchNorm in eval",
        "torch.nn",
        inference(lambda: conv_net(nn.BatchNorm2d)),
        floats(3, 6, 6),
        collides=6,
        with_what="channels, height",
    ),
    Entry(
        "ConvNet, BatchNorm in training",
        "torch.nn",
        growing(lambda: conv_net(nn.BatchNorm2d)),
        floats(3, 6, 6),
        "batch_norm_in_training",
        6,
        "channels, height",
    ),
    Entry(
        "ConvNet, BatchNorm without statistics",
        "torch.nn",
        inference(lambda: conv_net(lambda width: nn.BatchNorm2d(width, track_running_stats=False))),
        floats(3, 6, 6),
        "batch_norm_in_training",
        6,
        "channels, height",
    ),
    Entry(
        "ConvNet, GroupNorm",
        "torch.nn",
        inference(lambda: conv_net(lambda width: nn.GroupNorm(3, width))),
        floats(3, 6, 6),
        collides=3,
        with_what="groups, channels",
    ),
    Entry(
        "ConvNet, InstanceNorm",
        "torch.nn",
        inference(lambda: conv_net(nn.InstanceNorm2d)),
        floats(3, 6, 6),
        collides=6,
        with_what="channels, height",
    ),
    Entry("LayerNorm", "torch.nn", lambda: nn.LayerNorm(WIDTH), floats(5, WIDTH)),
    Entry("LayerNorm over [B, S]", "torch.nn", NormOverBatch, floats(5), LANE_FAILED, per_batch=True),
    Entry(
        "layer_norm over the whole shape", "torch.nn", of(lambda x: F.layer_norm(x, x.shape)), floats(5), ROWS_DEPEND
    ),
    Entry(
        "Dropout in training",
        "torch.nn",
        growing(lambda: mlp(dropout=0.5)),
        floats(WIDTH),
        "dropout_in_training",
        8,
        "width",
    ),
    Entry(
        "Dropout of rate 0 in training",
        "torch.nn",
        growing(mlp),
        floats(WIDTH),
        collides=8,
        with_what="width",
        grad=True,
        act=training_step,
    ),
    Entry(
        "ConvNet, training step",
        "training",
        growing(lambda: conv_net(lambda width: nn.GroupNorm(2, width))),
        floats(3, 6, 6),
        collides=3,
        with_what="channels",
        grad=True,
        act=training_step,
    ),
    Entry(
        "Transformer encoder, training step",
        "training",
        growing(encoder),
        floats(5, WIDTH),
        grad=True,
        act=training_step,
    ),
    Entry(
        "MLP, training step through its argument",
        "training",
        inference(mlp),
        lambda batch: given(torch.randn(batch, WIDTH, requires_grad=True)),
        collides=8,
        with_what="width",
        grad=True,
        act=training_step,
    ),
    Entry("TransformerEncoderLayer", "torch.nn", lambda: encoder_layer(True), floats(5, WIDTH)),
    Entry(
        "TransformerEncoderLayer, sequence first", "torch.nn", lambda: encoder_layer(False), sequences, SEQUENCE_FIRST
    ),
    Entry("TransformerEncoder", "torch.nn", encoder, floats(5, WIDTH), collides=HEADS, with_what="heads"),
    Entry("TransformerEncoder with a mask [S, S]", "torch.nn", encoder, masked_sequences, at={5: SQUARE_MASK}),
    Entry("Transformer", "torch.nn", lambda: transformer(True), source_and_target(True)),
    Entry(
        "Transformer, sequence first", "torch.nn", lambda: transformer(False), source_and_target(False), SEQUENCE_FIRST
    ),
    Entry(
        "Transformer with a mask [T, T]",
        "torch.nn",
        lambda: transformer(True),
        masked_source_and_target,
        collides=3,
        with_what="target length",
        at={3: SQUARE_MASK},
    ),
    Entry(
        "MultiheadAttention",
        "torch.nn",
        inference(lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)),
        several((5, WIDTH), (5, WIDTH), (5, WIDTH)),
    ),
    Entry(
        "MultiheadAttention, sequence first",
        "torch.nn",
        inference(lambda: nn.MultiheadAttention(WIDTH, HEADS)),
        lambda batch: given(*torch.randn(3, 5, batch, WIDTH)),
        SEQUENCE_FIRST,
    ),
    Entry("Self-attention in a module", "torch.nn", inference(lambda: SelfAttention(True)), floats(5, WIDTH)),
    Entry(
        "Self-attention in a module, sequence first",
        "torch.nn",
        inference(lambda: SelfAttention(False)),
        sequences,
        ROWS_DEPEND,
    ),
]
