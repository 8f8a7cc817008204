"""The zoo's layers of torch.nn: what is row by row overlaps, also where the batch is not dimension 0 of an output.

Recurrent layers have states with the batch in the middle, and graphs have nodes that see their neighbours.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from wrapping import made
from zoo_entry import (
    CANNOT_MERGE,
    LANE_FAILED,
    OVERLAPS,
    ROWS_DEPEND,
    SEQUENCE_FIRST,
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


SQUARE_MASK = one_of(OVERLAPS, LANE_FAILED, ROWS_DEPEND, CANNOT_MERGE)
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
        one_of(LANE_FAILED, CANNOT_MERGE),
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
    _layer("LayerNorm over [B, S]", norm_over_batch, floats(5), LANE_FAILED, per_batch=True),
    _layer("layer_norm over the whole shape", of(lambda x: F.layer_norm(x, x.shape)), floats(5), ROWS_DEPEND),
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
    _layer("TransformerEncoderLayer, sequence first", lambda: encoder_layer(False), sequences, SEQUENCE_FIRST),
    _layer("TransformerEncoder", encoder, floats(5, WIDTH), collides=(HEADS, "heads")),
    _layer("TransformerEncoder with a mask [S, S]", encoder, masked_sequences, at={5: SQUARE_MASK}),
    _layer("Transformer", transformer(True), several((5, WIDTH), (3, WIDTH))),
    _layer("Transformer, sequence first", transformer(False), sequence_first_pair, SEQUENCE_FIRST),
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
        SEQUENCE_FIRST,
    ),
    _layer("Self-attention in a module", self_attention(True), floats(5, WIDTH)),
    _layer("Self-attention in a module, sequence first", self_attention(False), sequences, ROWS_DEPEND),
]


# -------------------------------------------------------------------------------------------- recurrent and graph-like

INPUTS, HIDDEN, LAYERS = 6, 8, 2
NODES = (5, "nodes")
STATES = LANE_FAILED
"""States `[layers, batch, hidden]` as arguments: the batch is dimension 1 there, and 0 elsewhere."""
NEIGHBOURS = LANE_FAILED


def lstm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.LSTM(INPUTS, HIDDEN, LAYERS, **options).eval()


def tagger(batch_first: bool) -> Callable[[], nn.Module]:
    """An LSTM under a head."""
    return made(
        lambda self, tokens: self.head(self.rnn(self.embedding(tokens))[0]),
        embedding=lambda: nn.Embedding(64, INPUTS),
        rnn=lambda: nn.LSTM(INPUTS, HIDDEN, batch_first=batch_first, bidirectional=True),
        head=lambda: nn.Linear(2 * HIDDEN, 3),
    )


TURNED = made(
    lambda self, x: self.rnn(x.transpose(0, 1))[0].transpose(0, 1),
    rnn=lambda: nn.LSTM(INPUTS, HIDDEN),
)
"""Takes `[batch, sequence, width]`, whatever the layout of the LSTM inside."""
LAST_STATE = made(
    lambda self, x: self.head(self.rnn(x)[1][-1]),
    rnn=lambda: nn.GRU(INPUTS, HIDDEN, LAYERS, batch_first=True),
    head=lambda: nn.Linear(HIDDEN, 3),
)
"""Classifies by the final hidden state."""


def unrolled(self: nn.Module, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A cell, stepped over the sequence by hand."""
    outputs = []
    for step in x.unbind(1):
        state = self.cell(step, state)
        outputs.append(state[0])
    return torch.stack(outputs, 1), state


def graph(forward: Callable[..., Tensor], **parts: Any) -> Callable[[], nn.Module]:
    return made(forward, linear=lambda: nn.Linear(INPUTS, INPUTS), **parts)


def with_buffer(nodes: int) -> nn.Module:
    """The adjacency is the module's own."""
    module = graph(lambda self, x: torch.relu(self.adjacency @ self.linear(x)), adjacency=lambda: adjacency_of(nodes))
    return module()


def along_edges(self: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """Messages along a list of edges `[2, edges]`."""
    source, target = edge_index
    return torch.zeros_like(x).index_add_(0, target, self.linear(x)[source])


LAYER = graph(lambda self, x, adjacency: torch.relu(adjacency @ self.linear(x)))
"""A graph convolution: every node takes the mean of its neighbours."""


def adjacency_of(nodes: int) -> Tensor:
    ring = torch.eye(nodes) + torch.eye(nodes).roll(1, 0) + torch.eye(nodes).roll(-1, 0)
    return ring / ring.sum(1, keepdim=True)


def states(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, HIDDEN), torch.randn(*shape, HIDDEN)


def packed(batch: int) -> Call:
    lengths = [5 - row % 3 for row in range(batch)]
    return given(pack_padded_sequence(torch.randn(batch, 5, INPUTS), lengths, batch_first=True, enforce_sorted=False))


def sequence_first(batch: int) -> Call:
    return given(torch.randn(5, batch, INPUTS))


def edges(nodes: int) -> Call:
    around = torch.arange(nodes)
    return given(torch.randn(nodes, INPUTS), torch.stack([around, around.roll(1)]))


_recurrent, _graph = of_family("recurrent"), of_family("graph", collides=(INPUTS, "width"))

RECURRENT = [
    _recurrent("LSTM, batch first", lstm(batch_first=True), floats(5, INPUTS)),
    _recurrent(
        "LSTM, batch first, both ways",
        lstm(batch_first=True, bidirectional=True),
        floats(5, INPUTS),
        collides=(4, "layers times directions"),
    ),
    _recurrent(
        "LSTM, batch first, with states",
        lstm(batch_first=True),
        lambda batch: given(torch.randn(batch, 5, INPUTS), states(LAYERS, batch)),
        STATES,
    ),
    _recurrent("LSTM, sequence first", lstm(), sequence_first, SEQUENCE_FIRST),
    _recurrent(
        "LSTM, sequence first, with states",
        lstm(),
        lambda batch: given(torch.randn(5, batch, INPUTS), states(LAYERS, batch)),
        SEQUENCE_FIRST,
    ),
    _recurrent("GRU, batch first", lambda: nn.GRU(INPUTS, HIDDEN, batch_first=True), floats(5, INPUTS)),
    _recurrent(
        "GRU, batch first, with states",
        lambda: nn.GRU(INPUTS, HIDDEN, LAYERS, batch_first=True),
        lambda batch: given(torch.randn(batch, 5, INPUTS), states(LAYERS, batch)[0]),
        STATES,
    ),
    _recurrent("RNN, sequence first", lambda: nn.RNN(INPUTS, HIDDEN), sequence_first, SEQUENCE_FIRST),
    _recurrent("LSTM, packed sequences", lstm(batch_first=True), packed, one_of(LANE_FAILED, ROWS_DEPEND)),
    _recurrent("LSTM in the default layout, under a head", tagger(False), ids, ROWS_DEPEND),
    _recurrent("LSTM in the default layout, turned by its module", TURNED, floats(5, INPUTS)),
    _recurrent("LSTM, batch first, under a head", tagger(True), ids),
    _recurrent("GRU, classified by its last state", LAST_STATE, floats(5, INPUTS)),
    _recurrent(
        "LSTMCell",
        lambda: nn.LSTMCell(INPUTS, HIDDEN),
        lambda batch: given(torch.randn(batch, INPUTS), states(batch)),
        collides=(8, "hidden"),
    ),
    _recurrent(
        "LSTMCell, stepped by hand, with states",
        made(unrolled, cell=lambda: nn.LSTMCell(INPUTS, HIDDEN)),
        lambda batch: given(torch.randn(batch, 5, INPUTS), states(batch)),
    ),
    _graph(
        "graphs [B, N, E], one adjacency [N, N]",
        LAYER,
        lambda batch: given(torch.randn(batch, 5, INPUTS), adjacency_of(5)),
        collides=NODES,
        at={5: one_of(OVERLAPS, LANE_FAILED, ROWS_DEPEND, CANNOT_MERGE)},
    ),
    _graph(
        "graphs [B, N, E], an adjacency for each",
        LAYER,
        lambda batch: given(torch.randn(batch, 5, INPUTS), adjacency_of(5).expand(batch, 5, 5).clone()),
        collides=NODES,
    ),
    _graph(
        "nodes [N, E], adjacency as an argument",
        LAYER,
        lambda nodes: given(torch.randn(nodes, INPUTS), adjacency_of(nodes)),
        NEIGHBOURS,
    ),
    _graph("nodes [N, E], adjacency as a buffer", with_buffer, floats(INPUTS), NEIGHBOURS, per_batch=True),
    _graph("nodes [N, E], a list of edges", graph(along_edges), edges, NEIGHBOURS),
    _graph(
        "nodes [N, E], a sparse adjacency",
        graph(lambda self, adjacency, x: torch.sparse.mm(adjacency, self.linear(x))),
        lambda nodes: given(adjacency_of(nodes).to_sparse(), torch.randn(nodes, INPUTS)),
        "tensor_layout",
    ),
]
