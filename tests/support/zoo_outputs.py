"""The zoo's modules made from functions: unusual outputs, and rows that look at one another, keep or draw something."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from wrapping import made
from zoo_entry import (
    CANNOT_MERGE,
    DRAWS_RANDOM,
    KEEPS_STATE,
    LANE_FAILED,
    LOSS,
    OVERLAPS,
    ROWS_DEPEND,
    Call,
    Entry,
    Outcome,
    floats,
    given,
    inference,
    of,
    of_family,
    one_of,
    several,
)

WIDTH = 4
WIDE = (WIDTH, "width")
ROWS = floats(WIDTH)
SEQUENCES: dict[str, Any] = {"arguments": floats(5, 3), "collides": (5, "sequence")}
SUMS = CANNOT_MERGE
"""What adds up over the rows is neither rows nor the same in all lanes."""


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Heads:
    boxes: Tensor
    scores: Tensor
    names: tuple[str, ...] = ("cat", "dog")


def detector(fixed: bool, *, listed: bool = False) -> Callable[[], nn.Module]:
    """As torchvision's detection models: one dict per image of a batch; given as a list of images if `listed`."""

    def forward(self: Any, images: Any) -> list[dict[str, Tensor]]:
        boxes = self.boxes(torch.stack(images) if listed else images).reshape(-1, 3, 4)
        kept = [torch.arange(3) if fixed else row[:, 0].gt(0).nonzero()[:, 0] for row in boxes]
        return [{"boxes": row[where], "scores": row[where].mean(-1)} for row, where in zip(boxes, kept, strict=True)]

    return inference(made(forward, boxes=lambda: nn.Linear(WIDTH, 12)))


def routed(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the experts, and how many tokens each of them got."""
    scores = self.gate(x).softmax(-1)
    return scores, torch.bincount(scores.argmax(-1), minlength=scores.shape[-1])


ROUTER = inference(made(routed, gate=lambda: nn.Linear(WIDTH, 4)))
TIED = made(
    lambda self, x: (x @ self.weight, self.weight, self.scale),
    weight=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH)),
    scale=lambda: torch.tensor(2.0),
)
"""Hands its parameter and a buffer out, in addition to the rows."""
HEADS = {"a": 1, "b": 2, "c": 7}
MANY_HEADS = made(
    lambda self, x: {name: head(x) for name, head in self.heads.items()},
    heads=lambda: nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in HEADS.items()}),
)


def causal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a causal mask that is handed out, `[1, S, S]`."""
    mask = torch.ones(1, x.shape[1], x.shape[1]).tril()
    weights = (x @ x.transpose(1, 2)).masked_fill(mask == 0, float("-inf")).softmax(-1)
    return weights @ x, mask


def nan_rows(batch: int) -> Call:
    x = torch.randn(batch, WIDTH)
    x[::2, 0] = float("nan")
    return given(x)


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
ROWS_16 = floats(WIDTH, dtype=torch.bfloat16)

_output = of_family("outputs", collides=WIDE)
_detection = of_family("detection", collides=(3, "boxes"))


def _entry(name: str, function: Callable[..., Any], outcome: Outcome = OVERLAPS, **more: Any) -> Entry:
    return _output(name, of(function), more.pop("arguments", ROWS), outcome, **more)


_coupled = of_family("coupled rows", collides=WIDE)
_keeping = of_family("keeps state", collides=WIDE)
_random = of_family("random", collides=WIDE)

ENTRIES = [
    _entry("named tuple", lambda x: Pair(x * 2, x.sum(-1))),
    _entry("dataclass", lambda x: Heads(x * 2, x.softmax(-1))),
    _entry("dict by name", lambda x: {"logits": x * 2, "probabilities": x.softmax(-1), "kind": "softmax"}),
    _entry("ModelOutput", lambda x: BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1))),
    _entry("nested lists", lambda x: [x, [x * 2, (x * 3, [x.sum(-1)])]]),
    _output("several heads", inference(MANY_HEADS), ROWS, collides=(7, "head c")),
    _entry("empty outputs", lambda x: (x + 1, [], {}, (), x[:, :0])),
    _entry("None outputs", lambda x: (None, x + 1, None)),
    _entry("nothing but None", lambda x: None),
    _entry("its argument", lambda x: x),
    _entry("its argument, changed in place", lambda x: x.mul_(2).add_(1)),
    _entry("a view of its argument", lambda x: (x[:, 1:], x.T), collides=(3, "width of the view")),
    _output("its parameter and a buffer", TIED, ROWS),
    _entry("transposed, batch last", lambda x: x.T * 2),
    _entry(
        "batch in the middle",
        lambda x: x.transpose(0, 1).contiguous().tanh(),
        **SEQUENCES,
    ),
    _entry("rows times tokens", lambda x: x.reshape(-1, 3).tanh(), **SEQUENCES),
    _entry("rows in pairs", lambda x: torch.cat([x, -x], 1).reshape(-1, WIDTH)),
    _entry("causal mask [1, S, S]", causal, **SEQUENCES),
    _entry("a constant [1]", lambda x: (x + 1, torch.ones(1))),
    _entry("a constant of no dimensions", lambda x: (x + 1, torch.tensor(0.5))),
    _entry("mean over rows, [1, width]", lambda x: (x + 1, x.mean(0, keepdim=True)), SUMS),
    _entry("Python float of the batch", lambda x: (x + 1, float(x.shape[0])), CANNOT_MERGE),
    _entry("Python int of the batch", lambda x: (x + 1, x.shape[0]), CANNOT_MERGE),
    _entry("Python ints and floats, constant", lambda x: (x + 1, 3, 0.5, True)),
    _entry("Python float of the values", lambda x: (x + 1, x.sum().item()), CANNOT_MERGE),
    _entry("the batch's shape", lambda x: (x + 1, x.shape), CANNOT_MERGE),
    _entry("list per row", lambda x: list(x * 2)),
    _entry("list per row of Python floats", lambda x: [row.sum().item() for row in x]),
    _entry("list per row, unbound tuple", lambda x: x.unbind(0)),
    _detection("detection, as many boxes per row", detector(True), ROWS),
    _detection("detection, boxes by score", detector(False), ROWS),
    _detection(
        "detection, a list of images",
        detector(False, listed=True),
        lambda batch: given([torch.randn(WIDTH) for _ in range(batch)]),
        LANE_FAILED,
    ),
    _output("token counts [E]", ROUTER, ROWS, SUMS, collides=(8, "twice the experts")),
    _output("token counts [E], as many as rows", ROUTER, ROWS, SUMS, collides=(4, "experts")),
    _entry("squeezed", lambda x: x.sum(-1, keepdim=True).squeeze(), one_of(OVERLAPS, CANNOT_MERGE)),
    _entry("squeezed along the sequence", lambda x: x[:, :1].squeeze(1)),
    _entry("only rows that pass", lambda x: x[x[:, 0] > 0], one_of(OVERLAPS, CANNOT_MERGE)),
    _entry("complex and integers", lambda x: (torch.fft.rfft(x), x.argmax(-1), x > 0)),
    _entry("NaN and infinity", lambda x: (x.log(), x / 0), arguments=nan_rows),
    _entry("loss over the rows", lambda x: (F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)), x), LOSS),
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
