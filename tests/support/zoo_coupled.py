"""The zoo's modules whose rows are no rows: they look at one another, keep something, or draw random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_entry import (
    CANNOT_MERGE,
    DRAWS_RANDOM,
    KEEPS_STATE,
    ROWS_DEPEND,
    Call,
    Entry,
    floats,
    given,
    of,
    one_of,
)

WIDTH = 4
PAIRS = CANNOT_MERGE
"""An output `[B, B]`: neither dimension can be put together from the lanes."""


class FlatAttention(nn.Module):
    """Attention over all tokens of a flat batch `[T, width]`, as serving engines have it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.project(tokens).chunk(3, -1)
        return F.scaled_dot_product_attention(query[None], key[None], value[None])[0]


class Counter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class PythonCounter(nn.Module):
    """Counts its calls in an attribute."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class RunningMean(nn.Module):
    """Normalises by what it has seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class IntoBuffer(nn.Module):
    """Writes its output into a buffer of its own and returns the rows of it that it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("out", torch.zeros(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.out[: x.shape[0]] = self.linear(x)
        return self.out[: x.shape[0]]


class KeptKeys(nn.Module):
    """Keeps the keys and values of earlier calls in the module, `[32 rows, length, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("kept", torch.zeros(2, 32, 8, WIDTH))
        self.length = 0

    def forward(self, x: Tensor) -> Tensor:
        query, *pair = self.project(x).chunk(3, -1)
        for kept, new in zip(self.kept, pair, strict=True):
            kept[: len(x), self.length % 8] = new
        self.length += 1
        keys, values = (kept[: len(x), : self.length] for kept in self.kept)
        return F.scaled_dot_product_attention(query[:, None], keys, values)[:, 0]


class KeptInList(nn.Module):
    """Keeps its hidden states in a list, for whoever asks later."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.tanh()]
        return x * 2


class Lazy(nn.Module):
    """Makes a table when it is first called, from the sizes of that call; nothing in it depends on the rows."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1], dtype=x.dtype).cos()
        return x * self.table


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn_like(x)


def always_drops(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True)


def drops_in_python(x: Tensor) -> Tensor:
    return x * random.random()


def drops_in_numpy(x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def unused_draw(x: Tensor) -> Tensor:
    """Layer drop, as it is often written: the number is drawn in eval, too."""
    torch.rand([])
    return x * 2


def _entry(name: str, function: Callable[..., Any], outcome: str | frozenset[str], **more: Any) -> Entry:
    more = {"collides": 4, "with_what": "width", **more}
    return Entry(name, "coupled rows", of(function), more.pop("arguments", floats(WIDTH)), outcome, **more)


def two_batches(batch: int) -> Call:
    return given(torch.randn(batch, WIDTH), torch.randn(batch, WIDTH))


ENTRIES = [
    _entry("softmax(0)", lambda x: x.softmax(0), ROWS_DEPEND),
    _entry("x @ x.T", lambda x: x @ x.T, PAIRS),
    _entry("cdist(x, y)", torch.cdist, PAIRS, arguments=two_batches),
    _entry("cumsum(0)", lambda x: x.cumsum(0), ROWS_DEPEND),
    _entry("roll(0)", lambda x: x.roll(1, 0), ROWS_DEPEND),
    _entry("flip(0)", lambda x: x.flip(0), ROWS_DEPEND),
    _entry("sorted along the batch", lambda x: x.sort(0).values, ROWS_DEPEND),
    _entry("the last row moves", lambda x: torch.cat([x[:-1], x[-1:] + x[:1]]), ROWS_DEPEND),
    _entry("less the mean of the batch", lambda x: x - x.mean(0), ROWS_DEPEND),
    _entry("divided by the batch", lambda x: x / x.shape[0], ROWS_DEPEND),
    _entry("row numbers", lambda x: x + torch.arange(len(x))[:, None], ROWS_DEPEND),
    _entry(
        "softmax(0) in bf16",
        lambda x: x.softmax(0),
        ROWS_DEPEND,
        arguments=lambda batch: given(torch.randn(batch, WIDTH).bfloat16()),
        acts=4,
    ),
    Entry(
        "attention over flat tokens [T, E]",
        "coupled rows",
        FlatAttention,
        lambda batch: given(torch.randn(3 * batch, WIDTH)),
        ROWS_DEPEND,
        4,
        "width",
    ),
    Entry("counter in a buffer", "keeps state", Counter, floats(WIDTH), KEEPS_STATE, 4, "width"),
    Entry("counter in an attribute", "keeps state", PythonCounter, floats(WIDTH), KEEPS_STATE, 4, "width"),
    Entry("running mean", "keeps state", RunningMean, floats(WIDTH), KEEPS_STATE, 4, "width"),
    Entry("output in a buffer of its own", "keeps state", IntoBuffer, floats(WIDTH), KEEPS_STATE, 4, "width"),
    Entry("keys and values in the module", "keeps state", KeptKeys, floats(WIDTH), KEEPS_STATE, 8, "length"),
    Entry("hidden states in a list of the module", "keeps state", KeptInList, floats(WIDTH), KEEPS_STATE, 4, "width"),
    Entry(
        "a table made at the first call",
        "keeps state",
        Lazy,
        floats(WIDTH),
        one_of("overlaps", KEEPS_STATE),
        4,
        "width",
    ),
    Entry("noise in eval", "random", of(noisy), floats(WIDTH), DRAWS_RANDOM, 4, "width"),
    Entry("functional dropout in eval", "random", of(always_drops), floats(WIDTH), DRAWS_RANDOM, 4, "width"),
    Entry("Python's random", "random", of(drops_in_python), floats(WIDTH), DRAWS_RANDOM, 4, "width"),
    Entry("numpy's random", "random", of(drops_in_numpy), floats(WIDTH), DRAWS_RANDOM, 4, "width"),
    Entry("a number drawn and not used", "random", of(unused_draw), floats(WIDTH), DRAWS_RANDOM, 4, "width"),
]
