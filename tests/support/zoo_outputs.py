"""The zoo's modules that return unusual things: what follows the rows is merged, what all rows share stays one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from zoo_entry import (
    CANNOT_MERGE,
    LANE_FAILED,
    LOSS,
    OVERLAPS,
    Call,
    Entry,
    floats,
    given,
    of,
    one_of,
)

WIDTH = 4
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


class Detector(nn.Module):
    """As torchvision's detection models: a list of images in a batch, one dict per image."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.boxes = nn.Linear(WIDTH, 12)
        self.fixed = fixed

    def forward(self, images: Tensor) -> list[dict[str, Tensor]]:
        boxes = self.boxes(images).reshape(-1, 3, 4)
        kept = [torch.arange(3) if self.fixed else row[:, 0].gt(0).nonzero()[:, 0] for row in boxes]
        return [{"boxes": row[where], "scores": row[where].mean(-1)} for row, where in zip(boxes, kept, strict=True)]


class ListDetector(Detector):
    """The same, given a list of images."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return super().forward(torch.stack(images))


class Router(nn.Module):
    """Experts' outputs, and how many tokens each of the experts got."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        return scores, torch.bincount(scores.argmax(-1), minlength=scores.shape[-1])


class Tied(nn.Module):
    """Hands its parameter and a buffer out, in addition to the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ self.weight, self.weight, self.scale


class ManyHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in (("a", 1), ("b", 2), ("c", 7))})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: head(x) for name, head in self.heads.items()}


def causal(x: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a causal mask that is handed out, `[1, S, S]`."""
    mask = torch.ones(1, x.shape[1], x.shape[1]).tril()
    weights = (x @ x.transpose(1, 2)).masked_fill(mask == 0, float("-inf")).softmax(-1)
    return weights @ x, mask


def _entry(name: str, function: Callable[..., Any], outcome: str | frozenset[str] = OVERLAPS, **more: Any) -> Entry:
    more = {"collides": 4, "with_what": "width", **more}
    arguments = more.pop("arguments", floats(WIDTH))
    return Entry(name, "outputs", of(function), arguments, outcome, **more)


def nan_rows(batch: int) -> Call:
    x = torch.randn(batch, WIDTH)
    x[::2, 0] = float("nan")
    return given(x)


ENTRIES = [
    _entry("named tuple", lambda x: Pair(x * 2, x.sum(-1))),
    _entry("dataclass", lambda x: Heads(x * 2, x.softmax(-1))),
    _entry("dict by name", lambda x: {"logits": x * 2, "probabilities": x.softmax(-1), "kind": "softmax"}),
    _entry("ModelOutput", lambda x: BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1))),
    _entry("nested lists", lambda x: [x, [x * 2, (x * 3, [x.sum(-1)])]]),
    Entry("several heads", "outputs", lambda: ManyHeads().eval(), floats(WIDTH), collides=7, with_what="head c"),
    _entry("empty outputs", lambda x: (x + 1, [], {}, (), x[:, :0])),
    _entry("None outputs", lambda x: (None, x + 1, None)),
    _entry("nothing but None", lambda x: None),
    _entry("its argument", lambda x: x),
    _entry("its argument, changed in place", lambda x: x.mul_(2).add_(1)),
    _entry("a view of its argument", lambda x: (x[:, 1:], x.T), collides=3, with_what="width of the view"),
    Entry("its parameter and a buffer", "outputs", Tied, floats(WIDTH), OVERLAPS, 4, "width"),
    _entry("transposed, batch last", lambda x: x.T * 2),
    _entry(
        "batch in the middle",
        lambda x: x.transpose(0, 1).contiguous().tanh(),
        arguments=floats(5, 3),
        collides=5,
        with_what="sequence",
    ),
    _entry(
        "rows times tokens", lambda x: x.reshape(-1, 3).tanh(), arguments=floats(5, 3), collides=5, with_what="sequence"
    ),
    _entry("rows in pairs", lambda x: torch.cat([x, -x], 1).reshape(-1, WIDTH)),
    _entry("causal mask [1, S, S]", causal, arguments=floats(5, 3), collides=5, with_what="sequence"),
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
    Entry(
        "detection, as many boxes per row",
        "detection",
        lambda: Detector(True).eval(),
        floats(WIDTH),
        OVERLAPS,
        3,
        "boxes",
    ),
    Entry(
        "detection, boxes by score", "detection", lambda: Detector(False).eval(), floats(WIDTH), OVERLAPS, 3, "boxes"
    ),
    Entry(
        "detection, a list of images",
        "detection",
        lambda: ListDetector(False).eval(),
        lambda batch: given([torch.randn(WIDTH) for _ in range(batch)]),
        LANE_FAILED,
        3,
        "boxes",
    ),
    Entry("token counts [E]", "outputs", lambda: Router().eval(), floats(WIDTH), SUMS, 8, "twice the experts"),
    Entry("token counts [E], as many as rows", "outputs", lambda: Router().eval(), floats(WIDTH), SUMS, 4, "experts"),
    _entry("squeezed", lambda x: x.sum(-1, keepdim=True).squeeze(), one_of(OVERLAPS, CANNOT_MERGE)),
    _entry("squeezed along the sequence", lambda x: x[:, :1].squeeze(1)),
    _entry("only rows that pass", lambda x: x[x[:, 0] > 0], one_of(OVERLAPS, CANNOT_MERGE)),
    _entry("complex and integers", lambda x: (torch.fft.rfft(x), x.argmax(-1), x > 0)),
    _entry("NaN and infinity", lambda x: (x.log(), x / 0), arguments=nan_rows),
    _entry(
        "loss over the rows",
        lambda x: (F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)), x),
        LOSS,
    ),
]
