"""The zoo's recurrent and graph-like modules: states with the batch in the middle, nodes that see their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from wrapping import made
from zoo_entry import OVERLAPS, Call, floats, given, of_family, one_of, token_ids

from ubatch import DeclineReason as Why

WIDTH, HIDDEN, LAYERS = 6, 8, 2
WIDE, NODES = (6, "width"), (5, "nodes")
STATES = Why.LANE_FAILED
"""States `[layers, batch, hidden]` as arguments: the batch is dimension 1 there, and 0 elsewhere."""
NEIGHBOURS = Why.LANE_FAILED


def lstm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.LSTM(WIDTH, HIDDEN, LAYERS, **options).eval()


def tagger(batch_first: bool) -> Callable[[], nn.Module]:
    """An LSTM under a head."""
    return made(
        lambda self, tokens: self.head(self.rnn(self.embedding(tokens))[0]),
        embedding=lambda: nn.Embedding(64, WIDTH),
        rnn=lambda: nn.LSTM(WIDTH, HIDDEN, batch_first=batch_first, bidirectional=True),
        head=lambda: nn.Linear(2 * HIDDEN, 3),
    )


TURNED = made(
    lambda self, x: self.rnn(x.transpose(0, 1))[0].transpose(0, 1),
    rnn=lambda: nn.LSTM(WIDTH, HIDDEN),
)
"""Takes `[batch, sequence, width]`, whatever the layout of the LSTM inside."""
LAST_STATE = made(
    lambda self, x: self.head(self.rnn(x)[1][-1]),
    rnn=lambda: nn.GRU(WIDTH, HIDDEN, LAYERS, batch_first=True),
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
    return made(forward, linear=lambda: nn.Linear(WIDTH, WIDTH), **parts)


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
    return given(pack_padded_sequence(torch.randn(batch, 5, WIDTH), lengths, batch_first=True, enforce_sorted=False))


def sequence_first(batch: int) -> Call:
    return given(torch.randn(5, batch, WIDTH))


def edges(nodes: int) -> Call:
    around = torch.arange(nodes)
    return given(torch.randn(nodes, WIDTH), torch.stack([around, around.roll(1)]))


def ids(batch: int) -> Call:
    return given(token_ids(batch))


_recurrent, _graph = of_family("recurrent"), of_family("graph", collides=WIDE)

ENTRIES = [
    _recurrent("LSTM, batch first", lstm(batch_first=True), floats(5, WIDTH)),
    _recurrent(
        "LSTM, batch first, both ways",
        lstm(batch_first=True, bidirectional=True),
        floats(5, WIDTH),
        collides=(4, "layers times directions"),
    ),
    _recurrent(
        "LSTM, batch first, with states",
        lstm(batch_first=True),
        lambda batch: given(torch.randn(batch, 5, WIDTH), states(LAYERS, batch)),
        STATES,
    ),
    _recurrent("LSTM, sequence first", lstm(), sequence_first, Why.SEQUENCE_FIRST),
    _recurrent(
        "LSTM, sequence first, with states",
        lstm(),
        lambda batch: given(torch.randn(5, batch, WIDTH), states(LAYERS, batch)),
        Why.SEQUENCE_FIRST,
    ),
    _recurrent("GRU, batch first", lambda: nn.GRU(WIDTH, HIDDEN, batch_first=True), floats(5, WIDTH)),
    _recurrent(
        "GRU, batch first, with states",
        lambda: nn.GRU(WIDTH, HIDDEN, LAYERS, batch_first=True),
        lambda batch: given(torch.randn(batch, 5, WIDTH), states(LAYERS, batch)[0]),
        STATES,
    ),
    _recurrent("RNN, sequence first", lambda: nn.RNN(WIDTH, HIDDEN), sequence_first, Why.SEQUENCE_FIRST),
    _recurrent("LSTM, packed sequences", lstm(batch_first=True), packed, one_of(Why.LANE_FAILED, Why.ROWS_DEPEND)),
    _recurrent("LSTM in the default layout, under a head", tagger(False), ids, Why.ROWS_DEPEND),
    _recurrent("LSTM in the default layout, turned by its module", TURNED, floats(5, WIDTH)),
    _recurrent("LSTM, batch first, under a head", tagger(True), ids),
    _recurrent("GRU, classified by its last state", LAST_STATE, floats(5, WIDTH)),
    _recurrent(
        "LSTMCell",
        lambda: nn.LSTMCell(WIDTH, HIDDEN),
        lambda batch: given(torch.randn(batch, WIDTH), states(batch)),
        collides=(8, "hidden"),
    ),
    _recurrent(
        "LSTMCell, stepped by hand, with states",
        made(unrolled, cell=lambda: nn.LSTMCell(WIDTH, HIDDEN)),
        lambda batch: given(torch.randn(batch, 5, WIDTH), states(batch)),
    ),
    _graph(
        "graphs [B, N, E], one adjacency [N, N]",
        LAYER,
        lambda batch: given(torch.randn(batch, 5, WIDTH), adjacency_of(5)),
        collides=NODES,
        at={5: one_of(OVERLAPS, Why.LANE_FAILED, Why.ROWS_DEPEND, Why.CANNOT_MERGE)},
    ),
    _graph(
        "graphs [B, N, E], an adjacency for each",
        LAYER,
        lambda batch: given(torch.randn(batch, 5, WIDTH), adjacency_of(5).expand(batch, 5, 5).clone()),
        collides=NODES,
    ),
    _graph(
        "nodes [N, E], adjacency as an argument",
        LAYER,
        lambda nodes: given(torch.randn(nodes, WIDTH), adjacency_of(nodes)),
        NEIGHBOURS,
    ),
    _graph("nodes [N, E], adjacency as a buffer", with_buffer, floats(WIDTH), NEIGHBOURS, per_batch=True),
    _graph("nodes [N, E], a list of edges", graph(along_edges), edges, NEIGHBOURS),
    _graph(
        "nodes [N, E], a sparse adjacency",
        graph(lambda self, adjacency, x: torch.sparse.mm(adjacency, self.linear(x))),
        lambda nodes: given(adjacency_of(nodes).to_sparse(), torch.randn(nodes, WIDTH)),
        "tensor_layout",
    ),
]
