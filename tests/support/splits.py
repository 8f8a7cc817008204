"""What every split of a batch promises, whatever it goes by."""

from collections.abc import Sequence
from itertools import accumulate

from ubatch.schedules.split import UBatchSlice


def lane_query_lens(lens: Sequence[int], part: UBatchSlice) -> list[int]:
    """The lengths of a lane's requests: each request's tokens that lie in the lane's token slice."""
    edges, tokens = list(accumulate(lens, initial=0)), part.token_slice
    requests = range(len(lens))[part.request_slice]
    return [max(0, min(edges[each + 1], tokens.stop) - max(edges[each], tokens.start)) for each in requests]


def check_covers(lens: Sequence[int], parts: Sequence[UBatchSlice], lanes: int) -> None:
    """Every token and request once, in order; each lane's requests hold exactly its tokens."""
    assert len(parts) == lanes
    tokens = [token for part in parts for token in range(sum(lens))[part.token_slice]]
    assert tokens == list(range(sum(lens)))
    requests = [request for part in parts for request in range(len(lens))[part.request_slice]]
    assert sorted(set(requests)) == list(range(len(lens)))
    assert requests == sorted(requests)
    for part in parts:
        assert sum(lane_query_lens(lens, part)) == part.num_tokens
