"""The zoo's recurrent and graph-like modules: states with the batch in the middle, nodes that see their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
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
    one_of,
    token_ids,
)

WIDTH, HIDDEN, LAYERS = 6, 8, 2
STATES = LANE_FAILED
"""States `[layers, batch, hidden]` as arguments: the batch is dimension 1 there, and 0 elsewhere."""
NEIGHBOURS = LANE_FAILED


class Tagger(nn.Module):
    """An LSTM in its default layout, under a head."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.rnn = nn.LSTM(WIDTH, HIDDEN, batch_first=batch_first, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


class Turned(nn.Module):
    """Takes `[batch, sequence, width]`, whatever the layout of the LSTM inside."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


class LastState(nn.Module):
    """Classifies by the final hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, HIDDEN, LAYERS, batch_first=True)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[1][-1])


class Unrolled(nn.Module):
    """A cell, stepped over the sequence by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, HIDDEN)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state


class GraphLayer(nn.Module):
    """A graph convolution: every node takes the mean of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.relu(adjacency @ self.linear(x))


class GraphWithBuffer(GraphLayer):
    """The adjacency is the module's own."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency_of(nodes))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.adjacency)


class EdgeLayer(nn.Module):
    """Messages along a list of edges `[2, edges]`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        return torch.zeros_like(x).index_add_(0, target, self.linear(x)[source])


class SparseGraph(GraphLayer):
    """The adjacency is sparse."""

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, self.linear(x))


def adjacency_of(nodes: int) -> Tensor:
    ring = torch.eye(nodes) + torch.eye(nodes).roll(1, 0) + torch.eye(nodes).roll(-1, 0)
    return ring / ring.sum(1, keepdim=True)


def layered_states(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(LAYERS, batch, HIDDEN), torch.randn(LAYERS, batch, HIDDEN)


def packed(batch: int) -> Call:
    lengths = [5 - row % 3 for row in range(batch)]
    return given(pack_padded_sequence(torch.randn(batch, 5, WIDTH), lengths, batch_first=True, enforce_sorted=False))


def sequence_first(batch: int) -> Call:
    return given(torch.randn(5, batch, WIDTH))


def edges(nodes: int) -> Call:
    around = torch.arange(nodes)
    return given(torch.randn(nodes, WIDTH), torch.stack([around, around.roll(1)]))


def _lstm(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.LSTM(WIDTH, HIDDEN, LAYERS, **options).eval()


ENTRIES = [
    Entry("LSTM, batch first", "recurrent", _lstm(batch_first=True), floats(5, WIDTH)),
    Entry(
        "LSTM, batch first, both ways",
        "recurrent",
        _lstm(batch_first=True, bidirectional=True),
        floats(5, WIDTH),
        collides=4,
        with_what="layers times directions",
    ),
    Entry(
        "LSTM, batch first, with states",
        "recurrent",
        _lstm(batch_first=True),
        lambda batch: given(torch.randn(batch, 5, WIDTH), layered_states(batch)),
        STATES,
    ),
    Entry("LSTM, sequence first", "recurrent", _lstm(), sequence_first, SEQUENCE_FIRST),
    Entry(
        "LSTM, sequence first, with states",
        "recurrent",
        _lstm(),
        lambda batch: given(torch.randn(5, batch, WIDTH), layered_states(batch)),
        SEQUENCE_FIRST,
    ),
    Entry("GRU, batch first", "recurrent", lambda: nn.GRU(WIDTH, HIDDEN, batch_first=True), floats(5, WIDTH)),
    Entry(
        "GRU, batch first, with states",
        "recurrent",
        lambda: nn.GRU(WIDTH, HIDDEN, LAYERS, batch_first=True),
        lambda batch: given(torch.randn(batch, 5, WIDTH), layered_states(batch)[0]),
        STATES,
    ),
    Entry("RNN, sequence first", "recurrent", lambda: nn.RNN(WIDTH, HIDDEN), sequence_first, SEQUENCE_FIRST),
    Entry(
        "LSTM, packed sequences",
        "recurrent",
        _lstm(batch_first=True),
        packed,
        one_of(LANE_FAILED, ROWS_DEPEND),
    ),
    Entry(
        "LSTM in the default layout, under a head",
        "recurrent",
        lambda: Tagger(False),
        lambda batch: given(token_ids(batch)),
        ROWS_DEPEND,
    ),
    Entry("LSTM in the default layout, turned by its module", "recurrent", Turned, floats(5, WIDTH)),
    Entry("LSTM, batch first, under a head", "recurrent", lambda: Tagger(True), lambda batch: given(token_ids(batch))),
    Entry("GRU, classified by its last state", "recurrent", LastState, floats(5, WIDTH)),
    Entry(
        "LSTMCell",
        "recurrent",
        lambda: nn.LSTMCell(WIDTH, HIDDEN),
        lambda batch: given(torch.randn(batch, WIDTH), (torch.randn(batch, HIDDEN), torch.randn(batch, HIDDEN))),
        collides=8,
        with_what="hidden",
    ),
    Entry(
        "LSTMCell, stepped by hand, with states",
        "recurrent",
        Unrolled,
        lambda batch: given(torch.randn(batch, 5, WIDTH), (torch.randn(batch, HIDDEN), torch.randn(batch, HIDDEN))),
    ),
    Entry(
        "graphs [B, N, E], one adjacency [N, N]",
        "graph",
        GraphLayer,
        lambda batch: given(torch.randn(batch, 5, WIDTH), adjacency_of(5)),
        with_what="nodes",
        at={5: one_of(OVERLAPS, LANE_FAILED, ROWS_DEPEND, CANNOT_MERGE)},
    ),
    Entry(
        "graphs [B, N, E], an adjacency for each",
        "graph",
        GraphLayer,
        lambda batch: given(torch.randn(batch, 5, WIDTH), adjacency_of(5).expand(batch, 5, 5).clone()),
        with_what="nodes",
    ),
    Entry(
        "nodes [N, E], adjacency as an argument",
        "graph",
        GraphLayer,
        lambda nodes: given(torch.randn(nodes, WIDTH), adjacency_of(nodes)),
        NEIGHBOURS,
        6,
        "width",
    ),
    Entry(
        "nodes [N, E], adjacency as a buffer",
        "graph",
        GraphWithBuffer,
        floats(WIDTH),
        NEIGHBOURS,
        6,
        "width",
        per_batch=True,
    ),
    Entry("nodes [N, E], a list of edges", "graph", EdgeLayer, edges, NEIGHBOURS, 6, "width"),
    Entry(
        "nodes [N, E], a sparse adjacency",
        "graph",
        SparseGraph,
        lambda nodes: given(adjacency_of(nodes).to_sparse(), torch.randn(nodes, WIDTH)),
        "tensor_layout",
        6,
        "width",
    ),
]
