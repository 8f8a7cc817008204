"""Cutting a batch by what its requests cost, not by how many tokens they have.

A token costs its linear layers and experts, whoever it belongs to; attention costs every pair of a query token and a
token it sees, so a chunk of a long prompt costs more per token than the start of a short one:

    cost(request) = per_token * query_len + per_pair * (query_len * prefix_len + query_len * (query_len + 1) / 2)

Behind a sliding window a token sees no more than the window. With latent attention a request takes the cheaper of two
ways: keys and values of its prefix are expanded from their latents, once per prefix token, and then every pair costs
`per_pair`; or nothing is expanded, and every pair costs `per_absorbed_pair`.

Lanes of equal cost overlap best: a lane that computes longer than the other's transfer only waits for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from ubatch.errors import ConfigError, SplitError
from ubatch.schedules.split import UBatchSlice, cuts_by_weight, slices_at

__all__ = ["SplitBy", "SplitCost", "split_by_cost"]

_SCALE = 1 << 20  # weights are compared as integers, so that ties do not depend on rounding


class SplitBy(StrEnum):
    """What lanes of a batch with prefills have equal shares of."""

    TOKENS = "tokens"
    COST = "cost"


@dataclass(frozen=True)
class SplitCost:
    """What a step costs, in any one unit.

    Attributes:
        per_token: of a token: projections, router and its expert rows.
        per_pair: of a pair of a query token and a token that it attends to.
        window: the most tokens that a token attends to, itself included; None is all before it.
        per_expanded: of expanding a token of the prefix.
        per_absorbed_pair: of a pair whose key is not expanded; None where there is no such way.
        per_sent: of sending a token to its experts, and the result back, on a link that works beside the compute.

    Raises:
        ConfigError: a negative cost, or none at all, or a window below 1.
    """

    per_token: float
    per_pair: float
    window: int | None = None
    per_expanded: float = 0.0
    per_absorbed_pair: float | None = None
    per_sent: float = 0.0

    def __post_init__(self) -> None:
        rest = min(self.per_expanded, self.per_absorbed_pair or 0.0, self.per_sent)
        if min(self.per_token, self.per_pair, rest) < 0 or self.per_token + self.per_pair <= 0:
            raise ConfigError(f"costs must not be negative, nor both zero: {self}.")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a window must be at least 1, or None, not {self.window}.")

    def of(self, query_len: int, prefix_len: int) -> float:
        """Cost of `query_len` tokens behind `prefix_len`, without what is sent."""
        return self.per_token * query_len + self.of_attention(query_len, prefix_len)

    def of_attention(self, query_len: int, prefix_len: int) -> float:
        """Cost of the attention of `query_len` tokens behind `prefix_len`."""
        if not query_len:
            return 0.0
        # The first tokens see all before them; the others a whole window.
        full = query_len if self.window is None else min(query_len, max(0, self.window - prefix_len))
        pairs = full * prefix_len + full * (full + 1) // 2 + (query_len - full) * (self.window or 0)
        expanded = self.per_expanded * prefix_len + self.per_pair * pairs
        return expanded if self.per_absorbed_pair is None else min(expanded, self.per_absorbed_pair * pairs)


def split_by_cost(
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    cost: SplitCost,
    num_ubatches: int = 2,
    threshold: float = 0.0,
) -> tuple[UBatchSlice, ...]:
    """Split so that the costliest lane is as cheap as possible.

    Between requests, as `split_balanced` does with tokens; with two lanes also inside one request, where otherwise the
    cheaper lane had less than the share `threshold` of the cost.

    Args:
        query_lens: tokens of every request in this step.
        prefix_lens: tokens of every request that are in the cache already.
        cost: what they cost.
        num_ubatches: lanes, at least 2.
        threshold: 0 (never cut a request) to 0.5 (cut whenever the lanes differ); two lanes only.

    Raises:
        ConfigError: fewer than 2 lanes, a threshold out of range, or one with more than 2 lanes.
        SplitError: lengths that are negative, or not one prefix per request.
    """
    if len(query_lens) != len(prefix_lens):
        raise SplitError(
            f"{len(query_lens)} query lengths and {len(prefix_lens)} prefix lengths; give one per request."
        )
    if not 0 <= threshold <= 0.5:
        raise ConfigError(f"threshold must be between 0 and 0.5, not {threshold}.")
    if threshold and num_ubatches != 2:
        raise ConfigError(f"a request is cut only with 2 lanes, not with {num_ubatches}; set the threshold to 0.")
    weights = [cost.of(*lens) for lens in zip(query_lens, prefix_lens, strict=True)]
    total = sum(weights)
    slices = slices_at(cuts_by_weight(_as_integers(weights, total), num_ubatches), query_lens)
    if not threshold or not total:
        return slices
    left = sum(weights[slices[0].request_slice])
    if threshold * total <= left <= (1 - threshold) * total:
        return slices
    return _cut_inside(query_lens, prefix_lens, cost, weights) or slices


def _as_integers(weights: Sequence[float], total: float) -> list[int]:
    """Small relative weights become at least 1: a request with tokens is never free."""
    return [max(1, round(weight / total * _SCALE)) if weight else 0 for weight in weights]


def _cut_inside(
    query_lens: Sequence[int], prefix_lens: Sequence[int], cost: SplitCost, weights: Sequence[float]
) -> tuple[UBatchSlice, ...] | None:
    """Two lanes of equal cost, cut at a token; None where a lane would be empty."""
    starts = list(accumulate(query_lens, initial=0))
    sums = list(accumulate(weights, initial=0.0))
    half = sums[-1] / 2
    request = next(index for index in range(len(weights)) if sums[index + 1] >= half)
    inside = _tokens_costing(half - sums[request], query_lens[request], prefix_lens[request], cost)
    token = starts[request] + inside
    if not 0 < token < starts[-1]:
        return None
    first_of_second = request + (inside == query_lens[request])
    return (
        UBatchSlice(slice(0, request + (inside > 0)), slice(0, token)),
        UBatchSlice(slice(first_of_second, len(query_lens)), slice(token, starts[-1])),
    )


def _tokens_costing(target: float, query_len: int, prefix_len: int, cost: SplitCost) -> int:
    """How many tokens of a request cost `target`, to the nearest; later tokens cost more than earlier ones."""
    low, high = 0, query_len
    while low < high:
        middle = (low + high) // 2
        if cost.of(middle, prefix_len) < target:
            low = middle + 1
        else:
            high = middle
    if low and target - cost.of(low - 1, prefix_len) <= cost.of(low, prefix_len) - target:
        return low - 1
    return low
