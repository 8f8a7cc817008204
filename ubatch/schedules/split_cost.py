"""Cutting a batch by the cost of its requests instead of their tokens.

Linear layers and experts cost the same for every token. Attention costs per pair of a query token and a token that it
attends to, so a chunk of a long prompt costs more per token than the start of a short one:

    cost(request) = per_token * query_len + per_pair * (query_len * prefix_len + query_len * (query_len + 1) / 2)

With a sliding window a token attends to at most the window. With latent attention a request uses the cheaper of two
methods: expand keys and values of its prefix from their latents, once per prefix token, and pay `per_pair` for every
pair; or expand nothing and pay `per_absorbed_pair`.

Lanes of equal cost overlap best: compute beyond the other lane's transfer hides nothing.

A batch of decodes and prefills (`split_mixed`) gets lanes of equal cost, or a separate lane for the decodes:

    equal lanes           each hides the other's transfers; but both parts of a prompt that is cut read its prefix,
                          and latents are expanded twice
    decodes | prefills    no work is done twice; but a short lane hides little of a long one's transfers

Which is faster depends on the batch, so both are simulated with their costs and schedule, and the faster one is used.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, takewhile

from ubatch.errors import ConfigError, SplitError
from ubatch.schedules.lane_program import LayerTimes, layer_program
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.simulator import simulate
from ubatch.schedules.split import UBatchSlice, check_threshold, cuts_by_weight, slices_at

_SCALE = 1 << 20  # weights are compared as integers, so that ties do not depend on rounding


class SplitBy(StrEnum):
    """The quantity that is divided equally among the lanes of a batch with prefills."""

    TOKENS = "tokens"
    COST = "cost"


@dataclass(frozen=True)
class SplitCost:
    """Costs of a step, all in one arbitrary unit.

    Attributes:
        per_token: cost of a token: projections, router and its expert rows.
        per_pair: cost of a pair of a query token and a token that it attends to.
        window: most tokens that a token attends to, itself included; None: all earlier tokens.
        per_expanded: cost of expanding a token of the prefix.
        per_absorbed_pair: cost of a pair whose key is not expanded; None if that method does not exist.
        per_sent: cost of sending a token to its experts and the result back, on a link that works in parallel with
            compute.

    Raises:
        ConfigError: a cost is negative, `per_token` and `per_pair` are both zero, or the window is below 1.
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
        """Cost of `query_len` tokens after a prefix of `prefix_len`, without sending."""
        return self.per_token * query_len + self.of_attention(query_len, prefix_len)

    def of_attention(self, query_len: int, prefix_len: int) -> float:
        """Cost of attention for `query_len` tokens after a prefix of `prefix_len`."""
        if not query_len:
            return 0.0
        # The first tokens attend to all earlier ones; the others to a whole window.
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

    Cuts between requests, as `split_balanced` does with tokens. With two lanes it cuts inside a request if otherwise
    the cheaper lane has less than the share `threshold` of the cost.

    Args:
        query_lens: tokens of every request in this step.
        prefix_lens: tokens of every request that are already in the cache.
        cost: the costs.
        threshold: 0 (never cut a request) to 0.5 (cut whenever the lanes differ); two lanes only.

    Raises:
        ConfigError: fewer than 2 lanes, a threshold out of range, or one with more than 2 lanes.
        SplitError: lengths that are negative, or not one prefix per request.
    """
    if len(query_lens) != len(prefix_lens):
        raise SplitError(
            f"{len(query_lens)} query lengths and {len(prefix_lens)} prefix lengths; give one per request."
        )
    check_threshold(threshold, num_ubatches)
    weights = [cost.of(*lens) for lens in zip(query_lens, prefix_lens, strict=True)]
    total = sum(weights)
    # As integers; positive ones become at least 1, so that a request with tokens is never free.
    scaled = [max(1, round(weight / total * _SCALE)) if weight else 0 for weight in weights]
    slices = slices_at(cuts_by_weight(scaled, num_ubatches), query_lens)
    if not threshold or not total:
        return slices
    left = sum(weights[slices[0].request_slice])
    if threshold * total <= left <= (1 - threshold) * total:
        return slices
    return _cut_inside(query_lens, prefix_lens, cost, weights) or slices


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
    """Number of tokens of a request whose cost is nearest to `target`; later tokens cost more than earlier ones."""
    above = bisect_left(range(query_len), target, key=lambda count: cost.of(count, prefix_len))
    if above and target - cost.of(above - 1, prefix_len) <= cost.of(above, prefix_len) - target:
        return above - 1
    return above


_LAYERS = 3  # enough that start and end effects do not decide


def split_mixed(
    query_lens: Sequence[int], prefix_lens: Sequence[int], cost: SplitCost, schedule: Schedule, threshold: float = 0.0
) -> tuple[UBatchSlice, ...]:
    """The faster of `split_by_cost` and the cut between decodes and prefills.

    Args:
        query_lens: tokens of every request in this step; decodes (one token each) come first.
        prefix_lens: tokens of every request that are already in the cache.

    Raises:
        ConfigError, SplitError: as `split_by_cost`.
    """
    equal = split_by_cost(query_lens, prefix_lens, cost, schedule.lanes, threshold)
    decodes = sum(1 for _ in takewhile(lambda length: length == 1, query_lens))
    if not decodes or len(query_lens) - decodes < schedule.lanes - 1:
        return equal
    cuts = [decodes]  # all decodes are in the first lane, the prefills in the others
    if schedule.lanes > 2:
        rest = split_by_cost(query_lens[decodes:], prefix_lens[decodes:], cost, schedule.lanes - 1)
        cuts += [decodes + piece.request_slice.start for piece in rest[1:]]
    apart = slices_at(cuts, query_lens)
    costs = [predicted_cost(slices, query_lens, prefix_lens, cost, schedule) for slices in (equal, apart)]
    return apart if costs[1] < costs[0] else equal


def predicted_cost(
    slices: Sequence[UBatchSlice],
    query_lens: Sequence[int],
    prefix_lens: Sequence[int],
    cost: SplitCost,
    schedule: Schedule,
) -> float:
    """Simulated duration of a few layers for this split, in the cost's unit."""
    plain = replace(schedule, signalled=False)  # the best split does not depend on when a combine starts
    programs = []
    starts = list(accumulate(query_lens, initial=0))
    for piece in slices:
        attention = 0.0
        for request in range(piece.request_slice.start, piece.request_slice.stop):
            first = max(starts[request], piece.token_slice.start)
            last = min(starts[request + 1], piece.token_slice.stop)
            attention += cost.of_attention(last - first, prefix_lens[request] + first - starts[request])
        sent = cost.per_sent * piece.num_tokens / 2
        times = LayerTimes(attention, cost.per_token * piece.num_tokens, dispatch=sent, combine=sent)
        programs.append(layer_program(times, _LAYERS, plain))
    return simulate(programs, plain).seconds
