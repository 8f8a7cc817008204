"""From logits to the next token: greedy, or sampled with temperature, min-p, top-k and top-p; each row separately.

Each sampled row has one uniform random number; its token is where that number falls in the cumulative distribution. So
a request's tokens depend only on its seed, position and logits, not on the other requests of its batch. The tokens stay
on the device, and the host does not wait: the rows' parameters go to the device in one copy.

A row takes one of three paths, chosen by its own parameters only:

    no truncation         softmax of the vocabulary
    top-k up to 1024      only the 64 or 1024 most likely tokens are ranked
    the rest              top-p alone, or a larger top-k: the vocabulary is sorted, or truncated by flashinfer. On a CPU
                          256 tokens are tried first

Tensors as long as the vocabulary are float32; those of few tokens, and sums of blocks of the vocabulary, are float64.
So a draw picks another token than exact arithmetic only if it lies within about 1e-6 of an edge.

The order is vLLM's: first `model_runner.sampling.rows` (a grammar, allowed tokens, bad sequences, `min_tokens`,
bias, penalties), then temperature, min-p, top-k of the rest, and top-p of the mass that is left.

Ties: equally likely tokens are ranked in the vocabulary's order. If more tokens tie at the limit of top-k than are
ranked, `torch.topk` decides which are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from model_runner.kernels import small_ops
from model_runner.sampling.flashinfer_sampling import keep_most_likely, truncates
from model_runner.sampling.rows import SamplingRow, StepMasks, adjust_logits
from model_runner.sampling.sampling_params import SamplingParams
from ubatch.kernels import runs_in_c
from ubatch.streams import to_device

NO_TOKEN, OUT_OF_TOKENS = -1, -2
"""In place of a token: the row's logits are not finite; or its parameters allow no token."""

_GREEDY = SamplingParams()
_FEW = 256
_WIDTHS = (64, 1024)
"""Numbers of tokens to rank, for a top-k up to that number. The width depends on the row alone, so ties do, too."""
_BLOCK = 1024
_SHORT_BLOCK = 64


def sample(logits: Tensor, rows: Mapping[int, SamplingRow], masks: StepMasks | None = None) -> Tensor:
    """One token per row: `[R]` int64 on the device of the logits.

    `NO_TOKEN` for a row with a nan or +inf, or with only -inf; `OUT_OF_TOKENS` for a row whose parameters leave only
    -inf. Other rows are not affected.

    Args:
        logits: `[R, vocab]`, floating point; not changed.
        rows: row index -> how to sample it; missing rows are greedy.
        masks: of rows with a grammar.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary.
    """
    num_rows, vocab = logits.shape
    if not num_rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    adjusted = {index: row for index, row in rows.items() if row.params.adjusts}
    as_they_are = _Draws.of({index: row for index, row in rows.items() if index not in adjusted}, vocab)
    in_place = masks is not None and masks.greedy and runs_in_c(logits)
    if masks is not None and not in_place:  # one upload and one operation, for all rows with a mask
        adjusted |= {index: SamplingRow(_GREEDY, mask=mask) for index, mask in masks.greedy.items()}
    changed = _Draws.of(dict(enumerate(adjusted.values())), vocab)
    where = torch.tensor(list(adjusted), dtype=torch.int64)

    draws = (*as_they_are, *changed)
    if draws or adjusted:
        draws, (where,) = _move(draws, logits.device, where)

    best, highest = _most_likely(logits)
    tokens = _choose(logits, best, draws[: len(as_they_are)])
    if masks is not None and in_place:
        greedy, own = (torch.tensor(list(each)) for each in (masks.greedy.keys(), masks.greedy.values()))
        tokens.index_copy_(0, greedy, small_ops.find_allowed(logits, greedy, masks.masks, own, OUT_OF_TOKENS))
    if adjusted:
        all_masks = None if masks is None else masks.masks
        logits = adjust_logits(logits.index_select(0, where), tuple(adjusted.values()), all_masks)
        left = logits.amax(dim=-1) != -torch.inf
        chosen = _choose(logits, _most_likely(logits)[0], draws[len(as_they_are) :])
        tokens.index_copy_(0, where, chosen.where(left, OUT_OF_TOKENS))
    return tokens.masked_fill_(highest - highest != 0, NO_TOKEN)  # inf - inf is nan, too


def _most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's most likely token and its logit; in a row with a nan, the nan and its index."""
    if runs_in_c(logits):
        return small_ops.find_highest(logits)
    best = logits.argmax(dim=-1)
    return best, logits.gather(1, best[:, None])[:, 0]


def distributions(logits: Tensor, rows: Sequence[SamplingRow], masks: Tensor | None = None) -> Tensor:
    """The distribution that `sample` draws each row from: `[R, vocab]` float32, each row sums to 1; nan in a row
    without any allowed token.

    Args:
        logits: `[R, vocab]`, floating point; not changed.
        rows: one per row; none is greedy.
        masks: of rows with a grammar, see `adjust_logits`.

    Raises:
        RequestError: a row's bias or stop tokens are outside the vocabulary.
    """
    if any(row.params.adjusts for row in rows):
        logits = adjust_logits(logits.to(torch.float32, copy=True), rows, masks)
    found = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    draws, _ = _move(_Draws.of(dict(enumerate(rows)), logits.shape[-1]), logits.device)
    for each in draws:
        found.index_copy_(0, each.where, each.distribution(logits.index_select(0, each.where)))
    return found.masked_fill_(logits.amax(dim=-1, keepdim=True) == -torch.inf, torch.nan)


def _move(draws: tuple[_Draws, ...], device: torch.device, *others: Tensor) -> tuple[tuple[_Draws, ...], list[Tensor]]:
    """The draws with their tensors on the device, and other tensors: all in one copy."""
    moved = iter(to_device((*(tensor for each in draws for tensor in (each.where, each.columns)), *others), device))
    return tuple(replace(each, where=next(moved), columns=next(moved)) for each in draws), list(moved)


def fall(weights: Tensor, draws: Tensor) -> Tensor:
    """The index where each row's draw falls in its cumulative distribution, `[n, 1]`.

    For more than 1024 weights, it first finds the block by cumulative block sums, then the index within the block, in
    float64: a float32 sum over a whole vocabulary would lose unlikely tokens.

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
    """Sums of each row's blocks, `[n, blocks]` float64; on a CPU independent of the number of rows and threads."""
    count = weights.shape[1] // _BLOCK
    whole, part = weights[:, : count * _BLOCK], weights[:, count * _BLOCK :]
    sums = whole.unflatten(1, (count, _BLOCK)).sum(dim=-1), part.sum(dim=-1, keepdim=True)
    return torch.cat(sums, dim=-1).double()


def _total(weights: Tensor) -> Tensor:
    """`[n, 1]` float64, the sum of each row."""
    return _block_sums(weights).sum(dim=-1, keepdim=True)


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of each row's first cumulative value above its target, `[n, 1]`; if rounding puts the target at the total,
    the last index with a weight above 0."""
    place = torch.searchsorted(cumulative, target, right=True)
    return torch.minimum(place, (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True))


def _choose(logits: Tensor, tokens: Tensor, draws: tuple[_Draws, ...]) -> Tensor:
    """One token per row: `tokens` holds the most likely ones; rows that are drawn are overwritten."""
    for each in draws:
        picked = logits if len(each.where) == len(logits) else logits.index_select(0, each.where)
        tokens.index_copy_(0, each.where, each.tokens(picked))
    return tokens


class _Left(NamedTuple):
    """The tokens of some rows that truncation keeps.

    Attributes:
        rows: `[n]` int64, indices of the rows; None for all.
        order: `[n, any]` int64, tokens, most likely first; None for the whole vocabulary in its own order.
        weights: `[n, any]`, weights of these tokens; they need not sum to 1.
    """

    rows: Tensor | None
    order: Tensor | None
    weights: Tensor


@dataclass(frozen=True)
class _Draws:
    """Rows that are sampled in the same way.

    Attributes:
        where: `[n]` int64, their row indices; made on the host like `columns`, then replaced by copies on the device.
        columns: `[5, n, 1]` float64: temperatures, draws, min_p, top_p, and the number of tokens that top-k keeps.
        width: number of most likely tokens to rank; 0 without top-k and top-p.
        has_min_p: whether any row uses min-p.
    """

    where: Tensor
    columns: Tensor
    width: int
    has_min_p: bool

    @classmethod
    def of(cls, rows: Mapping[int, SamplingRow], vocab: int) -> tuple[_Draws, ...]:
        """The rows that are not greedy, grouped by width."""
        by_width: defaultdict[int, dict[int, SamplingRow]] = defaultdict(dict)
        for index, row in rows.items():
            if not row.params.greedy:
                by_width[_width(row.params, vocab)][index] = row
        draws = []
        for width, own in sorted(by_width.items()):
            pairs = [(row.params, row.draw) for row in own.values()]
            columns = [(each.temperature, draw, each.min_p, each.top_p, _limit(each, vocab)) for each, draw in pairs]
            where = torch.tensor(list(own), dtype=torch.int64)
            table = torch.tensor(columns, dtype=torch.float64).t().contiguous()[:, :, None]
            draws.append(cls(where, table, width, any(each.min_p for each, _ in pairs)))
        return tuple(draws)

    def tokens(self, logits: Tensor) -> Tensor:
        """The drawn tokens, `[n]`."""
        tokens = torch.empty_like(self.where)
        for rows, order, weights in self._left(logits):
            place = fall(weights, self.columns[1] if rows is None else self.columns[1][rows])
            own = (place if order is None else order.gather(1, place)).flatten()
            if rows is None:
                return own
            tokens.index_copy_(0, rows, own)
        return tokens

    def distribution(self, logits: Tensor) -> Tensor:
        """The distribution of the draws, in the vocabulary's order, `[n, vocab]` float32."""
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
        """The tokens that min-p, top-k and top-p keep."""
        if not self.width:
            weights = self._lowered(logits).softmax(dim=-1)
            self._cut_min_p(weights)
            yield _Left(None, None, weights)
        elif self.width <= _WIDTHS[-1]:
            order, weights = self._ranked(logits, self.width)
            yield _Left(None, order, self._cut(weights))
        elif truncates(logits.device):
            yield _Left(None, None, self._cut_by_flashinfer(logits))
        else:
            yield from self._cut_by_sorting(logits)

    def _cut_by_flashinfer(self, logits: Tensor) -> Tensor:
        """Truncated probabilities in the vocabulary's order; see `model_runner.sampling.flashinfer_sampling`."""
        top_k, top_p = self.columns[4, :, 0], self.columns[3, :, 0]
        weights = self._lowered(logits).softmax(dim=-1)
        weights.nan_to_num_(nan=1 / weights.shape[-1])  # such a row ends its request: its draw does not matter
        if self.has_min_p:
            self._cut_min_p(weights)
            weights.div_(_total(weights).float())
        return keep_most_likely(weights, top_k, top_p)

    def _cut_by_sorting(self, logits: Tensor) -> Iterator[_Left]:
        """Truncate by ranking. Top-p alone mostly keeps few tokens, and sorting a whole vocabulary is slow on a CPU: it
        ranks 256 tokens first, and sorts only rows that need more. A GPU sorts all rows: asking which rows need it
        would make the host wait."""
        rows, lowered, rest = None, self._lowered(logits), self
        if _may_ask(logits.device):
            order, weights = self._ranked(logits, _FEW)
            every = lowered.exp()
            self._cut_min_p(weights)
            self._cut_min_p(every)
            mass = _total(every)
            # Ties with the last ranked token do not count: not all of them may be ranked.
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
        """Set the weights of tokens that min-p, top-k or top-p remove to 0, in place.

        Args:
            weights: `[n, any]`, most likely first.
            mass: `[n, 1]`, total weight of the tokens that min-p and top-k keep; by default the sum of `weights`.
        """
        top_p, limits = self.columns[3], self.columns[4].long()
        weights.masked_fill_(torch.arange(weights.shape[1], device=weights.device) >= limits, 0)
        self._cut_min_p(weights)
        cumulative = weights.cumsum(dim=-1)
        before = cumulative - weights
        before[:, 0] = 0  # exactly, so that a tiny top_p keeps the most likely token
        reached = top_p * (cumulative[:, -1:] if mass is None else mass)
        weights.masked_fill_((before >= reached.to(before.dtype)) & (top_p < 1), 0)
        return weights

    def _ranked(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The `width` most likely tokens (ties in the vocabulary's order) and their weights, float64, 1 for the most
        likely one."""
        order = _highest(logits, width).sort(dim=-1).values
        ranked, place = logits.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ranked = ranked.double()
        return order.gather(1, place), ((ranked - ranked[:, :1]) / self.columns[0]).exp_()

    def _lowered(self, logits: Tensor) -> Tensor:
        """(logits - highest logit) / temperature, `[n, vocab]` float32. The highest is subtracted before the division,
        to keep rounding errors small."""
        temperature = self.columns[0].float().clamp_min(torch.finfo(torch.float32).tiny)
        highest = logits.amax(dim=-1, keepdim=True)
        return torch.sub(logits, highest.float()).float().div_(temperature)

    def _cut_min_p(self, weights: Tensor) -> None:
        """Set the weights of tokens that min-p removes to 0, in place."""
        if self.has_min_p:
            highest = weights.amax(dim=-1, keepdim=True)
            weights.masked_fill_(weights < (self.columns[2] * highest).to(weights.dtype), 0)


def _highest(logits: Tensor, width: int) -> Tensor:
    """The `width` tokens of each row with the highest logits, in any order.

    On a CPU, where long rows are slow, it searches only the `width` short blocks with the highest maxima: they contain
    all of these tokens.
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
    """Whether the host can read results without waiting for a queue."""
    return device.type == "cpu"


def _limit(params: SamplingParams, vocab: int) -> int:
    """Number of tokens that top-k keeps."""
    return min(params.top_k, vocab) if params.top_k > 0 else vocab


def _width(params: SamplingParams, vocab: int) -> int:
    """See `_Draws.width`."""
    if not params.truncated:
        return 0
    limit = _limit(params, vocab)
    return min(next((width for width in _WIDTHS if limit <= width), vocab), vocab)
