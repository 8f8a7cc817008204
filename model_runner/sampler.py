"""From logits to the next token: greedy, or sampled with temperature, top-k, top-p and min-p; every request for itself.

A sampled row brings one uniform number, and the token is where that number falls in the cumulative distribution. So
what a request gets depends on its seed, its place and its logits only, not on who shares its batch. The tokens stay on
the device, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from model_runner.host_copy import to_device
from model_runner.penalties import SamplingRow, adjust_logits

__all__ = ["sample"]

_FEW = 256


def sample(logits: Tensor, rows: Mapping[int, SamplingRow]) -> Tensor:
    """One token per row: `[R]` int64 on the device of the logits.

    Args:
        logits: `[R, vocab]`, floating; not changed.
        rows: how to sample, by number of the row; a row that is missing is greedy.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary.
    """
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    tokens = _choose(logits, {index: row for index, row in rows.items() if not row.params.adjusts})
    adjusted = {index: row for index, row in rows.items() if row.params.adjusts}
    if adjusted:
        where = _indices(adjusted, logits.device)
        members = tuple(adjusted.values())
        changed = adjust_logits(logits.index_select(0, where), members)
        tokens.index_copy_(0, where, _choose(changed, dict(enumerate(members))))
    return tokens


def _choose(logits: Tensor, rows: Mapping[int, SamplingRow]) -> Tensor:
    """One token per row of logits as they are."""
    tokens = logits.argmax(dim=-1)
    for truncated in (False, True):
        drawn = {i: row for i, row in rows.items() if not row.params.greedy and row.params.truncated is truncated}
        if drawn:
            where = _indices(drawn, logits.device)
            picked = logits if len(drawn) == logits.shape[0] else logits.index_select(0, where)
            chosen = _Drawn(picked, tuple(drawn.values()))
            tokens.index_copy_(0, where, chosen.truncated() if truncated else chosen.whole())
    return tokens


@dataclass(frozen=True)
class _Drawn:
    """Rows that are sampled, and their logits."""

    logits: Tensor
    rows: Sequence[SamplingRow]

    def whole(self) -> Tensor:
        """Where the draws fall among all tokens, in the vocabulary's order: without sorting, which costs the most."""
        probabilities = self._scaled(self.logits).softmax(dim=-1)
        if any(row.params.min_p for row in self.rows):
            self._cut_min_p(probabilities, probabilities.amax(dim=-1, keepdim=True))
        return self._fall(probabilities).flatten()

    def truncated(self) -> Tensor:
        """Where the draws fall among the tokens that top-k, top-p and min-p leave, most likely first."""
        vocab, top_p = self.logits.shape[-1], self._column(row.params.top_p for row in self.rows)
        limits = [min(row.params.top_k, vocab) if row.params.top_k > 0 else vocab for row in self.rows]
        width = max(limits)
        # Top-p alone mostly keeps few tokens, and sorting a whole vocabulary is slow. A GPU sorts fast, and to ask it
        # whether few were enough would be to wait for it.
        few = max(_FEW, *(limit for limit in (0, *limits) if limit < vocab))
        order, probabilities = self._ranked(few if few < width and self._on_host else width, limits)
        if probabilities.shape[-1] < width:
            reached = probabilities.cumsum(dim=-1)[:, -1:] >= top_p
            if not (reached | (self._column(limits) <= few)).all():
                order, probabilities = self._ranked(width, limits)

        before = probabilities.cumsum(dim=-1) - probabilities
        before[:, 0] = 0  # exactly, so that a tiny top_p keeps the most likely token
        probabilities.masked_fill_(before >= top_p, 0)
        if any(row.params.min_p for row in self.rows):
            self._cut_min_p(probabilities, probabilities[:, :1])
        return order.gather(1, self._fall(probabilities)).flatten()

    def _ranked(self, width: int, limits: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The `width` most likely tokens of each row, and their probabilities among as many as its limit.

        Args:
            width: at least every limit that is below the vocabulary.
            limits: tokens that top-k leaves, per row.
        """
        ranked, order = self.logits.topk(width, dim=-1)
        column = self._column(limits)
        scaled = self._scaled(ranked)
        scaled.masked_fill_(torch.arange(width, device=ranked.device) >= column, -torch.inf)
        mass = scaled.logsumexp(dim=-1, keepdim=True)
        if width < max(limits):
            mass = torch.where(column > width, self._scaled(self.logits).logsumexp(dim=-1, keepdim=True), mass)
        return order, (scaled - mass).exp()

    @property
    def _on_host(self) -> bool:
        return self.logits.device.type == "cpu"

    def _cut_min_p(self, probabilities: Tensor, highest: Tensor) -> None:
        probabilities.masked_fill_(probabilities < self._column(row.params.min_p for row in self.rows) * highest, 0)

    def _fall(self, probabilities: Tensor) -> Tensor:
        """`[rows, 1]`, where each row's draw falls in its cumulative distribution, which need not sum to 1."""
        cumulative = probabilities.cumsum(dim=-1)
        total = cumulative[:, -1:]
        place = torch.searchsorted(cumulative, self._column(row.draw for row in self.rows) * total, right=True)
        # A draw next to 1 may round up to the total: the last token that has any probability.
        return torch.minimum(place, (cumulative < total).sum(dim=-1, keepdim=True))

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits.double() / self._temperatures

    @cached_property
    def _temperatures(self) -> Tensor:
        return self._column(row.params.temperature for row in self.rows)

    def _column(self, values: Iterable[float]) -> Tensor:
        (column,) = to_device([torch.tensor(list(values), dtype=torch.float64)], self.logits.device)
        return column[:, None]


def _indices(rows: Iterable[int], device: torch.device) -> Tensor:
    (indices,) = to_device([torch.tensor(list(rows), dtype=torch.int64)], device)
    return indices
