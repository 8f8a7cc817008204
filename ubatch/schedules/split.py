"""Where a batch is cut into microbatches.

    fixed        every request has the same number of tokens (decode, verify): cut at equal request counts
    balanced     requests of different length (prefill): cut between requests, the largest lane as small as possible
    two-chunk    one long request prevents a balanced split: cut at the token midpoint, through that request
    by cost      balanced or two-chunk, by cost of requests instead of tokens (`ubatch.schedules.split_cost`)

Lanes are contiguous and in order, so outputs merge by concatenation and every token belongs to exactly one lane.
Where a cut goes through a request, both lanes' request slices contain it; their token slices say which part each
one has. The earlier lane has the earlier tokens.

Pure Python, without torch: a scheduler calls this on the host once a step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ubatch.errors import ConfigError, SplitError


@dataclass(frozen=True, slots=True)
class UBatchSlice:
    """One lane's part of a batch.

    Attributes:
        request_slice: its requests, `slice(start, stop)` into the batch's requests.
        token_slice: its tokens, `slice(start, stop)` into the batch's tokens.

    Raises:
        SplitError: a slice has a step, or does not satisfy 0 <= start <= stop.
    """

    request_slice: slice
    token_slice: slice

    def __post_init__(self) -> None:
        for what, part in (("request_slice", self.request_slice), ("token_slice", self.token_slice)):
            if part.step is not None or part.start is None or part.stop is None or not 0 <= part.start <= part.stop:
                raise SplitError(f"{what} must be slice(start, stop) with 0 <= start <= stop, not {part}.")

    @property
    def num_tokens(self) -> int:
        """Tokens of this lane."""
        return int(self.token_slice.stop - self.token_slice.start)

    @property
    def num_requests(self) -> int:
        """Requests of this lane; one that straddles a cut counts in both lanes."""
        return int(self.request_slice.stop - self.request_slice.start)

    def is_empty(self) -> bool:
        """Whether this lane has no tokens. Such a lane still passes every collective point."""
        return self.num_tokens == 0


def split_requests(
    query_lens: Sequence[int], *, decode: bool, num_ubatches: int = 2, two_chunk_threshold: float = 0.0
) -> tuple[UBatchSlice, ...]:
    """Split a batch as its mode requires.

    Args:
        query_lens: tokens of every request in this step.
        decode: every request has the same number of tokens (decode: 1, verify: 1 + drafts); split by count.
        two_chunk_threshold: between 0 and 0.5. A request may be cut in two when the balanced split leaves one lane
            less than this share of the tokens. 0 never cuts a request; 0.5 does whenever the lanes differ.

    Returns:
        `num_ubatches` slices. With fewer requests than lanes some of them are empty (for one request, lane 0);
        whether to overlap such a batch at all is the caller's decision.

    Raises:
        ConfigError: `num_ubatches` or `two_chunk_threshold` is out of range, or two-chunk is asked of 3 lanes or more.
        SplitError: a negative length, or `decode` with requests of different length.
    """
    check_threshold(two_chunk_threshold, num_ubatches)
    if not decode:
        return split_two_chunk(query_lens, two_chunk_threshold, num_ubatches)
    tokens_per_request = query_lens[0] if query_lens else 1
    for request, length in enumerate(query_lens):
        if length != tokens_per_request:
            raise SplitError(
                f"a decode batch has the same number of tokens in every request, but request {request} has {length} "
                f"and request 0 has {tokens_per_request}. Split it with decode=False."
            )
    return split_fixed(len(query_lens), tokens_per_request, num_ubatches)


def split_fixed(num_requests: int, tokens_per_request: int = 1, num_ubatches: int = 2) -> tuple[UBatchSlice, ...]:
    """Split requests of equal length by count; lanes differ by at most one request, earlier ones being smaller.

    With `tokens_per_request` 1 this also splits a plain run of tokens, or any batch dimension.

    Args:
        num_requests: requests in the batch; 0 gives empty lanes.

    Raises:
        ConfigError: fewer than 2 lanes.
        SplitError: `num_requests` is negative or `tokens_per_request` is not positive.
    """
    _check_lanes(num_ubatches)
    if num_requests < 0:
        raise SplitError(f"num_requests must be at least 0, not {num_requests}.")
    if tokens_per_request < 1:
        raise SplitError(f"tokens_per_request must be at least 1, not {tokens_per_request}.")
    offsets = range(0, (num_requests + 1) * tokens_per_request, tokens_per_request)
    return _slices(_even_cuts(num_requests, num_ubatches), offsets)


def split_balanced(query_lens: Sequence[int], num_ubatches: int = 2) -> tuple[UBatchSlice, ...]:
    """Split between requests so that the largest lane is as small as possible.

    Among the splits that reach that minimum, each cut is the one nearest to an even share of what is left, and of
    two equally near the later one. No lane is without requests when there are at least `num_ubatches` of them.
    For two lanes this is the cut that minimises `|left - right|`, ties to the later index (SGLang).

    Raises:
        ConfigError: fewer than 2 lanes.
        SplitError: a negative length.
    """
    offsets = _offsets(query_lens)
    return _slices(cuts_by_weight(query_lens, num_ubatches), offsets)


def cuts_by_weight(weights: Sequence[int], num_ubatches: int) -> list[int]:
    """The `num_ubatches - 1` request indices at which `split_balanced` cuts requests of these weights.

    Raises:
        ConfigError: fewer than 2 lanes.
    """
    _check_lanes(num_ubatches)
    if len(weights) < num_ubatches:
        return _even_cuts(len(weights), num_ubatches)
    offsets = list(accumulate(weights, initial=0))
    limit = _smallest_largest_lane(offsets, num_ubatches)
    # earliest[j]: the first request such that it and all later ones fit into j lanes of at most `limit`.
    earliest = [len(weights)]
    for _ in range(1, num_ubatches):
        earliest.append(bisect_left(offsets, offsets[earliest[-1]] - limit))

    cuts: list[int] = []
    start = 0
    for lanes_left in range(num_ubatches, 1, -1):
        first = max(start + 1, earliest[lanes_left - 1])
        last = min(bisect_right(offsets, offsets[start] + limit) - 1, len(weights) - lanes_left + 1)
        share = offsets[start] + (offsets[-1] - offsets[start]) / lanes_left
        start = _nearest(offsets, share, first, last)
        cuts.append(start)
    return cuts


def slices_at(cuts: Iterable[int], query_lens: Sequence[int]) -> tuple[UBatchSlice, ...]:
    """The lanes between cuts at request boundaries.

    Raises:
        SplitError: a negative length.
    """
    return _slices(cuts, _offsets(query_lens))


def keep_together(
    slices: Sequence[UBatchSlice], query_lens: Sequence[int], spans: Iterable[tuple[int, int]]
) -> tuple[UBatchSlice, ...]:
    """Move cuts out of spans of requests: each to the nearest place outside, ties to the later place.

    Args:
        slices: the split to change; a cut through a request counts as a cut after its first part.
        spans: (first, last) request, both inclusive, of each group that must be in one lane.

    Returns:
        `slices` itself if no span is cut. Lanes may become empty; the caller then decides whether to overlap.

    Raises:
        SplitError: a span is outside of the batch.
    """
    count = len(query_lens)
    allowed = [True] * (count + 1)
    inside = [False] * count
    for first, last in spans:
        if not 0 <= first <= last < count:
            raise SplitError(f"the span {first} to {last} is not within the batch's {count} requests.")
        allowed[first + 1 : last + 1] = [False] * (last - first)
        inside[first : last + 1] = [True] * (last + 1 - first)
    cuts = [piece.request_slice.start for piece in slices[1:]]
    torn = any(
        after.request_slice.start < before.request_slice.stop and inside[after.request_slice.start]
        for before, after in pairwise(slices)
    )
    if not torn and all(allowed[cut] for cut in cuts):
        return tuple(slices)
    offsets = _offsets(query_lens)
    places = [cut for cut in range(count + 1) if allowed[cut]]
    token_cuts = [piece.token_slice.start for piece in slices[1:]]
    return _slices([min(places, key=lambda cut: (abs(offsets[cut] - at), -cut)) for at in token_cuts], offsets)


def split_two_chunk(query_lens: Sequence[int], threshold: float, num_ubatches: int = 2) -> tuple[UBatchSlice, ...]:
    """Split two lanes at the token midpoint, through a request, when whole requests balance badly.

    The balanced split is kept if each lane gets at least the share `threshold` of the tokens, or if the batch has too
    few tokens for its requests. Otherwise lane 0 gets the first half of all tokens, rounded down. If the midpoint falls
    between two requests none is cut, so that no lane has a request without tokens.

    Args:
        threshold: between 0 (never cut a request) and 0.5 (cut whenever the lanes differ).
        num_ubatches: lanes; only 2 can be split this way.

    Raises:
        ConfigError: the threshold is out of range, or `num_ubatches` is not 2.
        SplitError: a negative length.

    Source: SGLang's two-batch overlap, two-chunk split.
    """
    check_threshold(threshold, num_ubatches)
    balanced = split_balanced(query_lens, num_ubatches)
    if threshold == 0:
        return balanced
    offsets = _offsets(query_lens)
    total = offsets[-1]
    left = balanced[0].num_tokens
    if threshold * total <= left <= (1 - threshold) * total:
        return balanced

    half = total // 2
    straddling = bisect_right(offsets, half) - 1  # the request that holds the first token of the second half
    if straddling + 1 > half:
        return balanced
    is_cut = offsets[straddling] < half
    return (
        UBatchSlice(slice(0, straddling + is_cut), slice(0, half)),
        UBatchSlice(slice(straddling, len(query_lens)), slice(half, total)),
    )


def _check_lanes(num_ubatches: int) -> None:
    if num_ubatches < 2:
        raise ConfigError(f"num_ubatches must be at least 2, not {num_ubatches}; one lane is the unsplit batch.")


def check_threshold(threshold: float, num_ubatches: int) -> None:
    """Refuse a threshold for two-chunk splitting that is out of range, or not for two lanes."""
    if not 0 <= threshold <= 0.5:
        raise ConfigError(
            f"the two_chunk_threshold must be between 0 (off) and 0.5, not {threshold}: it is the share of the tokens "
            "below which the smaller lane counts as too small, and that lane never has more than half."
        )
    if threshold > 0 and num_ubatches != 2:
        raise ConfigError(
            f"two-chunk splitting makes 2 lanes, not {num_ubatches}. Set two_chunk_threshold to 0 or num_ubatches to 2."
        )


def _offsets(query_lens: Sequence[int]) -> list[int]:
    """Start offset of every request's tokens, followed by the total."""
    for request, length in enumerate(query_lens):
        if length < 0:
            raise SplitError(f"request {request} has {length} tokens; a length cannot be negative.")
    return list(accumulate(query_lens, initial=0))


def _even_cuts(num_requests: int, num_ubatches: int) -> list[int]:
    """Cuts at equal request counts; with fewer requests than lanes some lanes are empty."""
    return [lane * num_requests // num_ubatches for lane in range(1, num_ubatches)]


def _slices(cuts: Iterable[int], offsets: Sequence[int]) -> tuple[UBatchSlice, ...]:
    """The lanes between cuts at request boundaries."""
    edges = [0, *cuts, len(offsets) - 1]
    return tuple(
        UBatchSlice(slice(start, stop), slice(offsets[start], offsets[stop])) for start, stop in pairwise(edges)
    )


def _smallest_largest_lane(offsets: Sequence[int], lanes: int) -> int:
    """The least number of tokens T for which `lanes` lanes of at most T hold all requests in order."""

    def fits(limit: int) -> bool:
        start = 0
        for _ in range(lanes):
            start = bisect_right(offsets, offsets[start] + limit) - 1
        return start == len(offsets) - 1

    longest = max(stop - start for start, stop in pairwise(offsets))
    return longest + bisect_left(range(longest, offsets[-1]), True, key=fits)


def _nearest(offsets: Sequence[int], share: float, first: int, last: int) -> int:
    """The index between `first` and `last` (inclusive) whose offset is nearest to `share`; ties to the later."""
    above = min(max(bisect_left(offsets, share), first), last)
    below = max(above - 1, first)
    nearest = above if abs(offsets[above] - share) <= abs(offsets[below] - share) else below
    return min(bisect_right(offsets, offsets[nearest]) - 1, last)
