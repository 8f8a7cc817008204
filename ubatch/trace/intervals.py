"""Sets of points in time, as sorted, disjoint intervals."""

from collections.abc import Iterable, Sequence

from ubatch.trace.spans import Span, SpanKind

Interval = tuple[float, float]


def lasting(spans: Iterable[Span], kind: SpanKind) -> list[Interval]:
    """When any span of this kind lasts."""
    return union((span.start, span.end) for span in spans if span.kind is kind)


def computing(spans: Iterable[Span]) -> list[Interval]:
    """When some lane computes: not while it waits, even inside a compute span."""
    spans = tuple(spans)
    return difference(lasting(spans, SpanKind.COMPUTE), lasting(spans, SpanKind.WAIT))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of the intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The intersection of two sets of intervals."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The first set of intervals without the second."""
    if not first:
        return []
    edges = [first[0][0], *(edge for interval in second for edge in interval), first[-1][1]]
    outside = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]
    return intersection(first, outside)


def measure(intervals: Iterable[Interval]) -> float:
    """Total length in seconds."""
    return sum(end - start for start, end in intervals)
