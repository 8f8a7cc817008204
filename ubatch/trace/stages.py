"""What a lane did when: the points that it passed, the names of its stages, and where its transfers were launched.

A compute span is named by what ended it: a point, the launch of a transfer (`transfer.number`), a wait, or the lane's
end. Its *stage* is the work in it. In a layer of this project's models a stage has a name of its own (`experts`);
elsewhere it is named by what it follows, as in profilers (`ubatch.trace.recorder`): `start`, or `after all_reduce`.
"""

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ubatch.trace.spans import UNSPLIT, Span, SpanKind

_START = "start"
_LINEAR = "attn_prepare of linear_attention"
"""The point `attn_prepare`, passed by a layer with linear attention."""
_STAGES: Mapping[str, Mapping[str, str]] = {
    "attn_gather": {_START: "norm", "layer": "norm"},
    "qk_gather": {"attn_gather": "qkv"},
    "attn_prepare": {_START: "norm, qkv", "layer": "norm, qkv", "attn_gather": "qkv", "qk_gather": "norm, rope"},
    _LINEAR: {
        _START: "norm, linear attention's projections",
        "layer": "norm, linear attention's projections",
        "attn_gather": "linear attention's projections",
    },
    "attn_scatter": {"attn_prepare": "attention", _LINEAR: "linear attention"},
    "select": {
        "attn_prepare": "attention, router",
        _LINEAR: "linear attention, router",
        "attn_scatter": "norm, router",
    },
    "dispatch_counts": {"select": "count tokens"},
    "dispatch": {"select": "pack tokens", "dispatch_counts": "pack tokens"},
    "combine": {"dispatch": "experts"},
    "output": {"combine": "weighted sum", "mlp_scatter": "residual"},
    "mlp_gather": {"attn_prepare": "attention", _LINEAR: "linear attention", "attn_scatter": "norm"},
    "mlp_scatter": {"mlp_gather": "dense MLP"},
    "layer": {
        "output": "residual",
        "attn_prepare": "attention, dense MLP",
        _LINEAR: "linear attention, dense MLP",
        "mlp_scatter": "residual",
    },
}
"""End of a stage -> what it follows -> its name, in the layers of this project's models."""


def by_step(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Step -> its spans."""
    steps: dict[int, list[Span]] = {}
    for span in spans:
        steps.setdefault(span.step, []).append(span)
    return steps


def by_lane(spans: Iterable[Span]) -> dict[int, list[Span]]:
    """Lane -> its spans."""
    lanes: dict[int, list[Span]] = {}
    for span in spans:
        lanes.setdefault(span.lane, []).append(span)
    return lanes


def extent(spans: Sequence[Span]) -> tuple[float, float]:
    """The first start and the last end."""
    return min(span.start for span in spans), max(span.end for span in spans)


def held_by_lanes(step: Iterable[Span]) -> list[Span]:
    """Compute and wait spans of a step's lanes, in order. Only one lane holds the baton, so they do not overlap."""
    lanes = (span for span in step if span.lane != UNSPLIT and span.kind is not SpanKind.TRANSFER)
    return sorted(lanes, key=lambda span: (span.start, span.end))


# ------------------------------------------------------------------------------------------------------------ points


@dataclass(frozen=True, slots=True)
class Mark:
    """A lane passes a point.

    Attributes:
        at: seconds of `time.monotonic`.
        to: the lane that ran next; None if this lane kept the baton.
        ran_at: when lane `to` started to run; seconds of `time.monotonic`.
    """

    step: int
    lane: int
    name: str
    at: float
    to: int | None = None
    ran_at: float | None = None


def points(spans: Iterable[Span]) -> list[Mark]:
    """The points that lanes passed, in order of time."""
    marks = []
    for step in by_step(spans).values():
        held = held_by_lanes(step)
        waits = {(span.lane, span.name, span.start) for span in held if span.kind is SpanKind.WAIT}
        transfers = _transfers(step)
        for span, after in itertools.zip_longest(held, held[1:]):
            if (
                span.kind is SpanKind.WAIT
                or span.name == "end"
                or (span.lane, span.name, span.end) in waits
                or _launched(span, transfers) is not None
            ):
                continue
            handed_on = () if after is None or after.lane == span.lane else (after.lane, after.start)
            marks.append(Mark(span.step, span.lane, span.name, span.end, *handed_on))
    return sorted(marks, key=lambda mark: mark.at)


def _transfers(step: Iterable[Span]) -> set[str]:
    return {span.name for span in step if span.kind is not SpanKind.COMPUTE}


def _launched(span: Span, transfers: set[str]) -> str | None:
    """Name of the transfer whose launch ends this compute span; None if something else ends it."""
    launch = re.fullmatch(r"(.+)\.\d+", span.name)
    return launch[1] if launch is not None and launch[1] in transfers else None


# ------------------------------------------------------------------------------------------------------------ stages


def stage_names(spans: Iterable[Span]) -> dict[Span, str]:
    """Names of the stages of all compute spans. Work outside lanes keeps the name that it was recorded with."""
    names: dict[Span, str] = {}
    for step in by_step(spans).values():
        transfers = _transfers(step)
        before: dict[int, str] = {}
        for span in held_by_lanes(step):
            end = _launched(span, transfers) or (f"{span.name} of {span.layer}" if span.layer else span.name)
            if span.kind is SpanKind.COMPUTE:
                follows = before.get(span.lane, _START)
                other = _START if follows == _START else f"after {follows}"
                names[span] = _STAGES.get(end, {}).get(follows, other)
            before[span.lane] = end
        names |= {span: span.name for span in step if span.kind is SpanKind.COMPUTE and span.lane == UNSPLIT}
    return names


# ------------------------------------------------------------------------------------------------------------- flows


def flows(spans: Iterable[Span]) -> Iterator[tuple[int, float, Span]]:
    """Every launch whose compute span was recorded, with the wait for it.

    Yields:
        The lane that launched (`UNSPLIT` outside lanes); a moment of the launching span, its last nanosecond in a lane
        (seconds of `time.monotonic`); and the wait.
    """
    for step in by_step(spans).values():
        rows = by_lane(sorted((span for span in step if span.kind is SpanKind.COMPUTE), key=lambda span: span.end))
        for wait in (span for span in step if span.kind is SpanKind.WAIT and span.launched):
            row = rows.get(wait.launcher, [])
            at = bisect_left(row, wait.launched, key=lambda span: span.end)
            if at < len(row) and row[at].start < wait.launched:
                yield wait.launcher, max(row[at].start, min(wait.launched, row[at].end - 1e-9)), wait
