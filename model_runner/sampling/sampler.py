"""From logits to the next token: greedy, or sampled with temperature, min-p, top-k and top-p; every request for itself.

A sampled row brings one uniform number, and the token is where that number falls in the cumulative distribution. So
what a request gets depends on its seed, its place and its logits only, not on who shares its batch. The tokens stay on
the device, and nothing waits for it: what the host knows of the rows goes there in one copy.

Rows go one of three ways, each by its own parameters, whoever else is in the batch:

    no truncation         softmax of the vocabulary
    at most 1024 tokens   top-k: the most likely tokens alone are looked at, 64 or 1024 of them
    the rest              top-p by itself, or a larger top-k: the vocabulary is sorted, or cut by flashinfer. On a CPU
                          256 tokens are looked at first

What is as long as the vocabulary is float32; numbers of few tokens, and sums of blocks of the vocabulary, are float64.
So a draw falls on another token than exact arithmetic would choose only where it lies within some 1e-6 of an edge.

The order is vLLM's: first what `model_runner.sampling.penalties` changes (allowed tokens, bad sequences, `min_tokens`,
bias, penalties), then temperature, min-p, top-k of what min-p leaves, and top-p of the mass that both leave.

Ties: tokens that are equally likely are ranked in the vocabulary's order. Which of them top-k keeps, where its limit
falls among more of them than are looked at, is left to `torch.topk`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from model_runner.sampling.flashinfer_sampling import keep_most_likely, truncates
from model_runner.sampling.penalties import SamplingRow, adjust_logits
from model_runner.sampling.sampling_params import SamplingParams
from ubatch.streams.small_copies import to_device

__all__ = ["NO_TOKEN", "OUT_OF_TOKENS", "distributions", "fall", "sample"]

NO_TOKEN, OUT_OF_TOKENS = -1, -2
"""In place of a token, where a row's logits are not finite; and where they are, but its parameters leave none."""

_FEW = 256
_WIDTHS = (64, 1024)
"""How many tokens are ranked for a top-k of at most so many. A row's width is its own, so that its ties are, too."""
_BLOCK = 1024
_SHORT_BLOCK = 64


def sample(logits: Tensor, rows: Mapping[int, SamplingRow]) -> Tensor:
    """One token per row: `[R]` int64 on the device of the logits.

    `NO_TOKEN` where a row has a nan or +inf, or nothing but -inf; `OUT_OF_TOKENS` where its parameters leave
    nothing but -inf. The other rows' tokens do not depend on it.

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

    best = logits.argmax(dim=-1)  # of a row with a nan its place
    highest = logits.gather(1, best[:, None])[:, 0]
    tokens = _choose(logits, best, draws[: len(as_they_are)])
    if adjusted:
        logits = adjust_logits(logits.index_select(0, where), tuple(adjusted.values()))
        left = logits.amax(dim=-1) != -torch.inf
        chosen = _choose(logits, logits.argmax(dim=-1), draws[len(as_they_are) :])
        tokens.index_copy_(0, where, chosen.where(left, OUT_OF_TOKENS))
    return tokens.masked_fill_(highest - highest != 0, NO_TOKEN)  # inf - inf is nan, too


def distributions(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """What `sample` draws each row from: `[R, vocab]` float32, each row sums to 1; nan where nothing is left.

    Args:
        logits: `[R, vocab]`, floating; not changed.
        rows: how each is sampled; none is greedy.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary.
    """
    if any(row.params.adjusts for row in rows):
        logits = adjust_logits(logits.to(torch.float32, copy=True), rows)
    found = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    draws = _Draws.of(dict(enumerate(rows)), logits.shape[-1])
    pairs = iter(to_device([tensor for each in draws for tensor in (each.where, each.columns)], logits.device))
    for each in draws:
        placed = replace(each, where=next(pairs), columns=next(pairs))
        found.index_copy_(0, placed.where, placed.distribution(logits.index_select(0, placed.where)))
    return found.masked_fill_(logits.amax(dim=-1, keepdim=True) == -torch.inf, torch.nan)


def fall(weights: Tensor, draws: Tensor) -> Tensor:
    """`[n, 1]`, where each row's draw falls in its cumulative distribution.

    Of more than 1024 numbers, sums of blocks are added up first, and then the numbers of one block, in float64: one
    sum over a whole vocabulary in float32 would lose its unlikely tokens.

    Args:
        weights: `[n, vocab]`, not negative; they need not sum to 1.
        draws: `[n, 1]` float64, 0 to 1.
    """
    vocab = weights.shape[-1]
    if vocab <= _BLOCK:
        cumulative = weights.double().cumsum(dim=-1)
        return _first_beyond(cumulative, draws * cumulative[:, -1:])
    cumulative = _block_sums(weights).cumsum(dim=-1)
    target = draws * cumulative[:, -1:]
    block = _first_beyond(cumulative, target)
    before = cumulative.gather(1, (block - 1).clamp_min(0)).masked_fill_(block == 0, 0)
    place = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    own = weights.gather(1, place.clamp_max(vocab - 1)).double().masked_fill_(place >= vocab, 0)
    return block * _BLOCK + _first_beyond(own.cumsum(dim=-1), target - before)


def _block_sums(weights: Tensor) -> Tensor:
    """`[n, blocks]` float64, the sums of each row's blocks; on a CPU whatever rows and threads there are."""
    count = weights.shape[1] // _BLOCK
    whole, part = weights[:, : count * _BLOCK], weights[:, count * _BLOCK :]
    sums = whole.unflatten(1, (count, _BLOCK)).sum(dim=-1), part.sum(dim=-1, keepdim=True)
    return torch.cat(sums, dim=-1).double()


def _total(weights: Tensor) -> Tensor:
    """`[n, 1]` float64, the sum of each row."""
    return _block_sums(weights).sum(dim=-1, keepdim=True)


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """`[n, 1]`, the first number of each row above its target; the last one that adds anything, if rounding puts the
    target at the total."""
    place = torch.searchsorted(cumulative, target, right=True)
    return torch.minimum(place, (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True))


def _choose(logits: Tensor, tokens: Tensor, draws: tuple[_Draws, ...]) -> Tensor:
    """One token per row of logits as they are: `tokens`, the most likely, with those that are drawn written over."""
    for each in draws:
        picked = logits if each.num_rows == logits.shape[0] else logits.index_select(0, each.where)
        tokens.index_copy_(0, each.where, each.tokens(picked))
    return tokens


class _Left(NamedTuple):
    """What is left of some rows.

    Attributes:
        rows: `[n]` int64, which of them; None for all.
        order: `[n, any]` int64, tokens, most likely first; None for the whole vocabulary in its own order.
        weights: `[n, any]`, of these tokens; they need not sum to 1.
    """

    rows: Tensor | None
    order: Tensor | None
    weights: Tensor


@dataclass(frozen=True)
class _Draws:
    """Rows that are sampled in the same way.

    Attributes:
        where: `[n]` int64, their numbers; like `columns` made on the host, and replaced by what arrived on the device.
        columns: `[5, n, 1]` float64: temperatures, draws, min_p, top_p, and how many tokens top-k leaves.
        width: how many of the most likely tokens are ranked; 0 where none are left out but by min-p.
        has_min_p: whether min-p may leave out any.
    """

    where: Tensor
    columns: Tensor
    width: int
    has_min_p: bool

    @classmethod
    def of(cls, rows: Mapping[int, SamplingRow], vocab: int) -> tuple[_Draws, ...]:
        """Those of these rows that are not greedy."""
        drawn = {index: (row, _width(row.params, vocab)) for index, row in rows.items() if not row.params.greedy}
        widths = sorted({width for _, width in drawn.values()})
        return tuple(
            cls._of_width({index: row for index, (row, own) in drawn.items() if own == width}, width, vocab)
            for width in widths
        )

    @classmethod
    def _of_width(cls, rows: Mapping[int, SamplingRow], width: int, vocab: int) -> _Draws:
        params = [row.params for row in rows.values()]
        columns = (
            [each.temperature for each in params],
            [row.draw for row in rows.values()],
            [each.min_p for each in params],
            [each.top_p for each in params],
            [_limit(each, vocab) for each in params],
        )
        return cls(
            torch.tensor(list(rows), dtype=torch.int64),
            torch.tensor(columns, dtype=torch.float64)[:, :, None],
            width,
            any(each.min_p for each in params),
        )

    @property
    def num_rows(self) -> int:
        return int(self.where.shape[0])

    def tokens(self, logits: Tensor) -> Tensor:
        """Where the draws fall among the tokens that are left, `[n]`."""
        tokens = torch.empty(self.num_rows, dtype=torch.int64, device=logits.device)
        for rows, order, weights in self._left(logits):
            place = fall(weights, self.columns[1] if rows is None else self.columns[1][rows])
            own = (place if order is None else order.gather(1, place)).flatten()
            if rows is None:
                return own
            tokens.index_copy_(0, rows, own)
        return tokens

    def distribution(self, logits: Tensor) -> Tensor:
        """What the draws fall in, in the vocabulary's order, `[n, vocab]` float32."""
        found = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for rows, order, weights in self._left(logits):
            own = weights.div_(_total(weights).to(weights.dtype)).float()
            if order is not None:
                own = own.new_zeros(own.shape[0], logits.shape[1]).scatter_(1, order, own)
            if rows is None:
                return own
            found.index_copy_(0, rows, own)
        return found

    def _left(self, logits: Tensor) -> Iterator[_Left]:
        """What min-p, top-k and top-p leave."""
        if not self.width:
            weights = self._lowered(logits).softmax(dim=-1)
            if self.has_min_p:
                self._cut_min_p(weights, weights.amax(dim=-1, keepdim=True))
            yield _Left(None, None, weights)
        elif self.width <= _WIDTHS[-1]:
            order, weights = self._ranked(logits, self.width)
            yield _Left(None, order, self._cut(weights))
        elif truncates(logits.device):
            yield _Left(None, None, self._cut_by_flashinfer(logits))
        else:
            yield from self._cut_by_sorting(logits)

    def _cut_by_flashinfer(self, logits: Tensor) -> Tensor:
        """In the vocabulary's order; see `model_runner.sampling.flashinfer_sampling`."""
        top_k, top_p = self.columns[4, :, 0], self.columns[3, :, 0]
        weights = self._lowered(logits).softmax(dim=-1)
        weights.nan_to_num_(nan=1 / weights.shape[-1])  # a row that is not finite ends its request, whatever is drawn
        if self.has_min_p:
            self._cut_min_p(weights, weights.amax(dim=-1, keepdim=True))
            weights.div_(_total(weights).float())
        return keep_most_likely(weights, top_k, top_p)

    def _cut_by_sorting(self, logits: Tensor) -> Iterator[_Left]:
        """Top-p alone mostly keeps few tokens, and sorting a whole vocabulary is slow. A GPU sorts fast, and to ask it
        which rows have enough in few would be to wait for it. On a CPU the others are sorted by themselves."""
        rows, lowered, rest = None, self._lowered(logits), self
        if _may_ask(logits.device):
            order, weights = self._ranked(logits, _FEW)
            every = lowered.exp()
            if self.has_min_p:
                self._cut_min_p(weights, weights[:, :1])
                self._cut_min_p(every, every.amax(dim=-1, keepdim=True))
            mass = _total(every)
            # Without those as likely as the last one, of which there may be more: else who is kept would be chance.
            surely = weights.masked_fill(weights == weights[:, -1:], 0).sum(dim=-1, keepdim=True)
            enough = ((surely >= self.columns[3] * mass) & (self.columns[4] == logits.shape[1])).flatten()
            few, rows = (each.nonzero().flatten() for each in (enough, ~enough))
            if few.shape[0]:
                yield _Left(few, order[few], self._of_rows(few)._cut(weights[few], mass[few]))
            if not rows.shape[0]:
                return
            logits, lowered, rest = logits[rows], lowered[rows], self._of_rows(rows)
        order = logits.argsort(dim=-1, descending=True, stable=True)
        yield _Left(rows, order, rest._cut(lowered.gather(1, order).exp_()))

    def _of_rows(self, rows: Tensor) -> _Draws:
        return replace(self, where=self.where[rows], columns=self.columns[:, rows])

    def _cut(self, weights: Tensor, mass: Tensor | None = None) -> Tensor:
        """Weights, most likely first, with zeros where min-p, top-k and top-p leave nothing; changed in place.

        Args:
            weights: `[n, any]`.
            mass: `[n, 1]`, of all that min-p and top-k leave; by default these are all.
        """
        top_p, limits = self.columns[3], self.columns[4].long()
        weights.masked_fill_(torch.arange(weights.shape[1], device=weights.device) >= limits, 0)
        if self.has_min_p:
            self._cut_min_p(weights, weights[:, :1])
        cumulative = weights.cumsum(dim=-1)
        before = cumulative - weights
        before[:, 0] = 0  # exactly, so that a tiny top_p keeps the most likely token
        reached = top_p * (cumulative[:, -1:] if mass is None else mass)
        weights.masked_fill_((before >= reached.to(before.dtype)) & (top_p < 1), 0)
        return weights

    def _ranked(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The `width` most likely tokens, equal ones in the vocabulary's order, and their weights, float64; 1 is the
        most likely one's."""
        order = _highest(logits, width).sort(dim=-1).values
        ranked, place = logits.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ranked = ranked.double()
        return order.gather(1, place), ((ranked - ranked[:, :1]) / self.columns[0]).exp_()

    def _lowered(self, logits: Tensor) -> Tensor:
        """`[n, vocab]` float32, logits over temperature, 0 for the most likely token. It is taken off before the
        division, whose rounding would grow with it."""
        temperature = self.columns[0].float().clamp_min(torch.finfo(torch.float32).tiny)
        highest = logits.amax(dim=-1, keepdim=True)
        return torch.sub(logits, highest.float()).float().div_(temperature)

    def _cut_min_p(self, weights: Tensor, highest: Tensor) -> None:
        weights.masked_fill_(weights < (self.columns[2] * highest).to(weights.dtype), 0)


def _highest(logits: Tensor, width: int) -> Tensor:
    """The `width` tokens of each row with the highest logits, in any order.

    On a CPU, which takes long for long rows, in as many short blocks with the highest maxima: no other has any.
    """
    vocab = logits.shape[1]
    count = vocab // _SHORT_BLOCK
    if logits.device.type != "cpu" or count < 4 * width:
        return logits.topk(width, dim=-1, sorted=False).indices
    maxima = logits[:, : count * _SHORT_BLOCK].unflatten(1, (count, _SHORT_BLOCK)).amax(dim=-1)
    blocks = maxima.topk(width, dim=-1, sorted=False).indices[:, :, None]
    rest = torch.arange(count * _SHORT_BLOCK, vocab).expand(logits.shape[0], -1)
    tokens = torch.cat(((blocks * _SHORT_BLOCK + torch.arange(_SHORT_BLOCK)).flatten(1), rest), dim=-1)
    return tokens.gather(1, logits.gather(1, tokens).topk(width, dim=-1, sorted=False).indices)


def _may_ask(device: torch.device) -> bool:
    """Whether the host may look at what was computed without waiting for a queue."""
    return device.type == "cpu"


def _limit(params: SamplingParams, vocab: int) -> int:
    """How many tokens top-k leaves."""
    return min(params.top_k, vocab) if params.top_k > 0 else vocab


def _width(params: SamplingParams, vocab: int) -> int:
    """See `_Draws.width`."""
    if not params.truncated:
        return 0
    limit = _limit(params, vocab)
    return min(next((width for width in _WIDTHS if limit <= width), vocab), vocab)
