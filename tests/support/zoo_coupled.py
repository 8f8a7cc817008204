"""The zoo's modules whose rows are no rows: they look at one another, keep something, or draw random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from wrapping import made
from zoo_entry import (
    CANNOT_MERGE,
    DRAWS_RANDOM,
    KEEPS_STATE,
    ROWS_DEPEND,
    floats,
    of,
    of_family,
    one_of,
    several,
)

WIDTH = 4
WIDE = (WIDTH, "width")
PAIRS = CANNOT_MERGE
"""An output `[B, B]`: neither dimension can be put together from the lanes."""


def flat_attention(self: Any, tokens: Tensor) -> Tensor:
    """Attention over all tokens of a flat batch `[T, width]`, as serving engines have it."""
    query, key, value = self.project(tokens).chunk(3, -1)
    return F.scaled_dot_product_attention(query[None], key[None], value[None])[0]


def counting(self: Any, x: Tensor) -> Tensor:
    """Counts its calls."""
    self.calls += 1
    return x * 2


def running_mean(self: Any, x: Tensor) -> Tensor:
    """Normalises by what it has seen so far."""
    self.mean.lerp_(x.mean(0), 0.1)
    return x - self.mean


def into_buffer(self: Any, x: Tensor) -> Tensor:
    """Writes its output into a buffer of its own and returns the rows of it that it wrote."""
    with torch.no_grad():
        self.out[: x.shape[0]] = self.linear(x)
    return self.out[: x.shape[0]]


def kept_keys(self: Any, x: Tensor) -> Tensor:
    """Keeps the keys and values of earlier calls in the module, `[32 rows, length, width]`."""
    query, *pair = self.project(x).chunk(3, -1)
    for kept, new in zip(self.kept, pair, strict=True):
        kept[: len(x), self.length % 8] = new
    self.length += 1
    keys, values = (kept[: len(x), : self.length] for kept in self.kept)
    return F.scaled_dot_product_attention(query[:, None], keys, values)[:, 0]


def kept_in_list(self: Any, x: Tensor) -> Tensor:
    """Keeps its hidden states in a list, for whoever asks later."""
    self.seen = [x.tanh()]
    return x * 2


def lazy(self: Any, x: Tensor) -> Tensor:
    """Makes a table when it is first called, from the sizes of that call; nothing in it depends on the rows."""
    if self.table is None:
        self.table = torch.arange(x.shape[-1], dtype=x.dtype).cos()
    return x * self.table


def unused_draw(x: Tensor) -> Tensor:
    """Layer drop, as it is often written: the number is drawn in eval, too."""
    torch.rand([])
    return x * 2


def projection() -> nn.Module:
    return nn.Linear(WIDTH, 3 * WIDTH)


BUFFER = made(into_buffer, linear=lambda: nn.Linear(WIDTH, WIDTH), out=lambda: torch.zeros(32, WIDTH))
KEYS = made(kept_keys, project=projection, kept=lambda: torch.zeros(2, 32, 8, WIDTH), length=int)
ROWS, ROWS_16 = floats(WIDTH), floats(WIDTH, dtype=torch.bfloat16)

_coupled = of_family("coupled rows", collides=WIDE)
_keeping = of_family("keeps state", collides=WIDE)
_random = of_family("random", collides=WIDE)

ENTRIES = [
    _coupled("softmax(0)", of(lambda x: x.softmax(0)), ROWS, ROWS_DEPEND),
    _coupled("x @ x.T", of(lambda x: x @ x.T), ROWS, PAIRS),
    _coupled("cdist(x, y)", of(torch.cdist), several((WIDTH,), (WIDTH,)), PAIRS),
    _coupled("cumsum(0)", of(lambda x: x.cumsum(0)), ROWS, ROWS_DEPEND),
    _coupled("roll(0)", of(lambda x: x.roll(1, 0)), ROWS, ROWS_DEPEND),
    _coupled("flip(0)", of(lambda x: x.flip(0)), ROWS, ROWS_DEPEND),
    _coupled("sorted along the batch", of(lambda x: x.sort(0).values), ROWS, ROWS_DEPEND),
    _coupled("the last row moves", of(lambda x: torch.cat([x[:-1], x[-1:] + x[:1]])), ROWS, ROWS_DEPEND),
    _coupled("less the mean of the batch", of(lambda x: x - x.mean(0)), ROWS, ROWS_DEPEND),
    _coupled("divided by the batch", of(lambda x: x / x.shape[0]), ROWS, ROWS_DEPEND),
    _coupled("row numbers", of(lambda x: x + torch.arange(len(x))[:, None]), ROWS, ROWS_DEPEND),
    _coupled("softmax(0) in bf16", of(lambda x: x.softmax(0)), ROWS_16, ROWS_DEPEND, acts=4),
    _coupled(
        "attention over flat tokens [T, E]",
        made(flat_attention, project=projection),
        lambda batch: ROWS(3 * batch),
        ROWS_DEPEND,
    ),
    _keeping("counter in a buffer", made(counting, calls=lambda: torch.tensor(0)), ROWS, KEEPS_STATE),
    _keeping("counter in an attribute", made(counting, calls=int), ROWS, KEEPS_STATE),
    _keeping("running mean", made(running_mean, mean=lambda: torch.zeros(WIDTH)), ROWS, KEEPS_STATE),
    _keeping("output in a buffer of its own", BUFFER, ROWS, KEEPS_STATE),
    _keeping("keys and values in the module", KEYS, ROWS, KEEPS_STATE, collides=(8, "length")),
    _keeping("hidden states in a list of the module", made(kept_in_list, seen=list), ROWS, KEEPS_STATE),
    _keeping("a table made at the first call", made(lazy, table=lambda: None), ROWS, one_of("overlaps", KEEPS_STATE)),
    _random("noise in eval", of(lambda x: x + torch.randn_like(x)), ROWS, DRAWS_RANDOM),
    _random("functional dropout in eval", of(lambda x: F.dropout(x, 0.5, training=True)), ROWS, DRAWS_RANDOM),
    _random("Python's random", of(lambda x: x * random.random()), ROWS, DRAWS_RANDOM),
    _random("numpy's random", of(lambda x: x * float(np.random.rand())), ROWS, DRAWS_RANDOM),
    _random("a number drawn and not used", of(unused_draw), ROWS, DRAWS_RANDOM),
]
