"""Splitting a batch of decodes and prefills: lanes of equal cost, or a separate lane for the decodes.

    equal lanes           each hides the other's transfers; but both parts of a prompt that is cut read its prefix,
                          and latents are expanded twice
    decodes | prefills    no work is done twice; but a short lane hides little of a long one's transfers

Which is faster depends on the batch, so both are simulated with their costs and schedule, and the faster one is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, takewhile

from ubatch.schedules.lane_program import LayerTimes, layer_program
from ubatch.schedules.schedule import Schedule
from ubatch.schedules.simulator import simulate
from ubatch.schedules.split import UBatchSlice, slices_at
from ubatch.schedules.split_cost import SplitCost, split_by_cost

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
