"""From logits to the next token: greedy, or sampled with temperature, top-k, top-p and min-p; every request for itself.

A sampled row brings one uniform number, and the token is where that number falls in the cumulative distribution. So
what a request gets depends on its seed, its place and its logits only, not on who shares its batch. The tokens stay on
the device, and nothing waits for it: what the host knows of the rows goes there in one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runner.flashinfer_sampling import keep_most_likely, truncates
from model_runner.penalties import SamplingRow, adjust_logits
from ubatch.small_copies import to_device

__all__ = ["distributions", "fall", "sample"]

_FEW = 256


def sample(logits: Tensor, rows: Mapping[int, SamplingRow]) -> Tensor:
    """One token per row: `[R]` int64 on the device of the logits.

    Args:
        logits: `[R, vocab]`, floating; not changed.
        rows: how to sample, by number of the row; a row that is missing is greedy.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary.
    """
    num_rows, vocab = logits.shape
    if not num_rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    adjusted = {index: row for index, row in rows.items() if row.params.adjusts}
    as_they_are = _Draws.of({index: row for index, row in rows.items() if index not in adjusted}, vocab)
    changed = _Draws.of(dict(enumerate(adjusted.values())), vocab)
    where = torch.tensor(list(adjusted), dtype=torch.int64)

    draws = (*as_they_are, *changed)
    wanted = [tensor for each in draws for tensor in (each.where, each.columns)]
    if wanted or adjusted:
        where, *moved = to_device((where, *wanted), logits.device)
        pairs = iter(moved)
        draws = tuple(replace(each, where=next(pairs), columns=next(pairs)) for each in draws)

    tokens = _choose(logits, draws[: len(as_they_are)])
    if adjusted:
        logits = adjust_logits(logits.index_select(0, where), tuple(adjusted.values()))
        tokens.index_copy_(0, where, _choose(logits, draws[len(as_they_are) :]))
    return tokens


def distributions(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """What `sample` draws each row from: `[R, vocab]` float64, each row sums to 1.

    Args:
        logits: `[R, vocab]`, floating; not changed.
        rows: how each is sampled; none is greedy.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary.
    """
    if any(row.params.adjusts for row in rows):
        logits = adjust_logits(logits.to(torch.float32, copy=True), rows)
    found = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    draws = _Draws.of(dict(enumerate(rows)), logits.shape[-1])
    pairs = iter(to_device([tensor for each in draws for tensor in (each.where, each.columns)], logits.device))
    for each in draws:
        placed = replace(each, where=next(pairs), columns=next(pairs))
        found.index_copy_(0, placed.where, placed.distribution(logits.index_select(0, placed.where)))
    return found


def fall(probabilities: Tensor, draws: Tensor) -> Tensor:
    """`[n, 1]`, where each row's draw falls in its cumulative distribution.

    Args:
        probabilities: `[n, vocab]` float64, which need not sum to 1.
        draws: `[n, 1]` float64, 0 to 1.
    """
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    place = torch.searchsorted(cumulative, draws * total, right=True)
    # A draw next to 1 may round up to the total: the last token that has any probability.
    return torch.minimum(place, (cumulative < total).sum(dim=-1, keepdim=True))


def _choose(logits: Tensor, draws: tuple[_Draws, ...]) -> Tensor:
    """One token per row of logits as they are."""
    tokens = logits.argmax(dim=-1)
    for each in draws:
        picked = logits if each.num_rows == logits.shape[0] else logits.index_select(0, each.where)
        tokens.index_copy_(0, each.where, each.tokens(picked))
    return tokens


@dataclass(frozen=True)
class _Draws:
    """Rows that are sampled in the same way.

    Attributes:
        where: `[n]` int64, their numbers; like `columns` made on the host, and replaced by what arrived on the device.
        columns: `[5, n, 1]` float64: temperatures, draws, min_p, top_p, and how many tokens top-k leaves.
        limits: the latter, on the host.
        is_truncated: whether top-k or top-p leaves out any token.
        has_min_p: whether min-p may.
    """

    where: Tensor
    columns: Tensor
    limits: tuple[int, ...]
    is_truncated: bool
    has_min_p: bool

    @classmethod
    def of(cls, rows: Mapping[int, SamplingRow], vocab: int) -> tuple[_Draws, ...]:
        """Those of these rows that are not greedy."""
        return tuple(cls._of_kind(rows, vocab))

    @classmethod
    def _of_kind(cls, rows: Mapping[int, SamplingRow], vocab: int) -> Iterator[_Draws]:
        for truncated in (False, True):
            drawn = {i: row for i, row in rows.items() if not row.params.greedy and row.params.truncated is truncated}
            if not drawn:
                continue
            params = [row.params for row in drawn.values()]
            limits = tuple(min(each.top_k, vocab) if each.top_k > 0 else vocab for each in params)
            columns = (
                [each.temperature for each in params],
                [row.draw for row in drawn.values()],
                [each.min_p for each in params],
                [each.top_p for each in params],
                limits,
            )
            yield cls(
                torch.tensor(list(drawn), dtype=torch.int64),
                torch.tensor(columns, dtype=torch.float64)[:, :, None],
                limits,
                truncated,
                any(each.min_p for each in params),
            )

    @property
    def num_rows(self) -> int:
        return len(self.limits)

    def tokens(self, logits: Tensor) -> Tensor:
        """Where the draws fall among the tokens that are left, `[n]`."""
        order, probabilities = self._left(logits)
        place = fall(probabilities, self.columns[1])
        return (place if order is None else order.gather(1, place)).flatten()

    def distribution(self, logits: Tensor) -> Tensor:
        """What the draws fall in, in the vocabulary's order, `[n, vocab]`."""
        order, probabilities = self._left(logits)
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        if order is None:
            return probabilities
        return probabilities.new_zeros(logits.shape).scatter_(1, order, probabilities)

    def _left(self, logits: Tensor) -> tuple[Tensor | None, Tensor]:
        """What top-k, top-p and min-p leave: tokens, most likely first, or None for all in the vocabulary's order; and
        their probabilities, which need not sum to 1."""
        if not self.is_truncated:
            return None, self._whole(logits)
        return (None, self._truncated_unsorted(logits)) if truncates(logits.device) else self._truncated(logits)

    def _whole(self, logits: Tensor) -> Tensor:
        """In the vocabulary's order: without sorting, which costs the most."""
        probabilities = self._scaled(logits).softmax(dim=-1)
        if self.has_min_p:
            self._cut_min_p(probabilities, probabilities.amax(dim=-1, keepdim=True))
        return probabilities

    def _truncated(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Most likely first."""
        vocab, top_p, limits, width = logits.shape[-1], self.columns[3], self.columns[4], max(self.limits)
        # Top-p alone mostly keeps few tokens, and sorting a whole vocabulary is slow. A GPU sorts fast, and to ask it
        # whether few were enough would be to wait for it.
        few = max(_FEW, *(limit for limit in (0, *self.limits) if limit < vocab))
        on_host = logits.device.type == "cpu"
        order, probabilities = self._ranked(logits, few if few < width and on_host else width)
        if probabilities.shape[-1] < width:
            reached = probabilities.cumsum(dim=-1)[:, -1:] >= top_p
            if not (reached | (limits <= few)).all():
                order, probabilities = self._ranked(logits, width)

        before = probabilities.cumsum(dim=-1) - probabilities
        before[:, 0] = 0  # exactly, so that a tiny top_p keeps the most likely token
        probabilities.masked_fill_(before >= top_p, 0)
        if self.has_min_p:
            self._cut_min_p(probabilities, probabilities[:, :1])
        return order, probabilities

    def _truncated_unsorted(self, logits: Tensor) -> Tensor:
        """The same in the vocabulary's order; see `model_runner.flashinfer_sampling`."""
        top_k, top_p = self.columns[4, :, 0], self.columns[3, :, 0]
        kept = keep_most_likely(self._scaled(logits).softmax(dim=-1), top_k, top_p).double()
        if self.has_min_p:
            self._cut_min_p(kept, kept.amax(dim=-1, keepdim=True))
        return kept

    def _ranked(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The `width` most likely tokens of each row, and their probabilities among as many as its limit.

        Args:
            logits: `[n, vocab]`.
            width: at least every limit that is below the vocabulary.
        """
        ranked, order = logits.topk(width, dim=-1)
        limits, scaled = self.columns[4], self._scaled(ranked)
        scaled.masked_fill_(torch.arange(width, device=ranked.device) >= limits, -torch.inf)
        mass = scaled.logsumexp(dim=-1, keepdim=True)
        if width < max(self.limits):
            mass = torch.where(limits > width, self._scaled(logits).logsumexp(dim=-1, keepdim=True), mass)
        return order, (scaled - mass).exp()

    def _cut_min_p(self, probabilities: Tensor, highest: Tensor) -> None:
        probabilities.masked_fill_(probabilities < self.columns[2] * highest, 0)

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits.double() / self.columns[0]
