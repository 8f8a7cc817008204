"""A recorded step as text: a row for what is computed, and one for what is on the link, per lane.

One column is the same time in every row, also in the rows of two steps that are compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ubatch import Span, SpanKind
from ubatch.trace import UNSPLIT, by_lane, by_step, extent

KEY = "A attention, norms, router    E experts    d dispatch    c combine"
WIDTH = 100
"""Columns of a whole line."""
_LABEL = len("  lane 0 computes  ")
_MOST_TICKS = 9


def compare_steps(serial: Iterable[Span], overlapped: Iterable[Span]) -> list[str]:
    """A step that ran unsplit, below it the same step in lanes, and below both a scale in milliseconds.

    Args:
        serial: spans of the step that ran unsplit, of one rank.
        overlapped: spans of the step in lanes, of the same rank.

    Returns:
        Lines of at most 100 columns.

    Raises:
        ValueError: one of them has no span.
    """
    steps = {"serial": list(serial), "overlapped": list(overlapped)}
    for name, step in steps.items():
        if not step:
            raise ValueError(f"the {name} step has no span: record both steps under `ubatch.tracing()`.")
    extents = {name: extent(step) for name, step in steps.items()}
    longest = max(end - begin for begin, end in extents.values())
    rows = []
    for name, (begin, end) in extents.items():
        rows.append(f"{name}, {(end - begin) * 1e3:.0f} ms")
        rows += draw_lanes(steps[name], begin, begin + longest)
    return [*rows, *_scale(longest)]


def draw_lanes(step: Iterable[Span], begin: float, until: float) -> list[str]:
    """Two rows for every lane of a step, from `begin` to `until` (seconds of `time.monotonic`); a step that ran unsplit
    has one lane."""
    rows = []
    for lane, spans in sorted(by_lane(step).items()):
        own = list(_cut_at_waits(spans)) if lane == UNSPLIT else spans
        computing = [span for span in own if span.kind is SpanKind.COMPUTE]
        travelling = [span for span in own if span.kind is SpanKind.TRANSFER]
        name = "  computes" if lane == UNSPLIT else f"  lane {lane} computes"
        rows.append(f"{name:{_LABEL}}{_row(computing, begin, until)}".rstrip())
        rows.append(f"{'  on the link':{_LABEL}}{_row(travelling, begin, until)}".rstrip())
    return rows


def last_step(spans: Iterable[Span], *, in_lanes: bool) -> list[Span]:
    """Spans of the last step that ran in lanes, or of the last one that did not; empty if there is none."""
    steps = [step for _, step in sorted(by_step(spans).items()) if (by_lane(step).keys() != {UNSPLIT}) == in_lanes]
    return steps[-1] if steps else []


def _cut_at_waits(spans: Sequence[Span]) -> Iterable[Span]:
    """An unsplit step computes in one span, waits included; here in pieces, named as a lane's: by the launch that ends
    each."""
    waits = sorted((span for span in spans if span.kind is SpanKind.WAIT), key=lambda span: span.start)
    for span in spans:
        if span.kind is not SpanKind.COMPUTE:
            yield span
            continue
        begin = span.start
        for wait in waits:
            yield replace(span, name=f"{wait.name}.", start=begin, end=wait.start)
            begin = wait.end
        yield replace(span, start=begin)


def _row(spans: Sequence[Span], begin: float, until: float) -> str:
    """One character per column: the span that covers most of it, or a blank where none covers half of it."""
    columns = WIDTH - _LABEL
    column, cells = (until - begin) / columns, [" "] * columns
    for number in range(columns):
        left = begin + number * column
        covered: dict[str, float] = {}
        for span in spans:
            share = min(span.end, left + column) - max(span.start, left)
            if share > 0:
                covered[_letter(span)] = covered.get(_letter(span), 0.0) + share
        if sum(covered.values()) >= column / 2:
            cells[number] = max(covered, key=covered.__getitem__)
    return "".join(cells)


def _letter(span: Span) -> str:
    """A transfer's initial; compute that ends where a combine is launched is that of the experts."""
    if span.kind is SpanKind.TRANSFER:
        return span.name[0]
    return "E" if span.name.startswith("combine.") else "A"


def _scale(seconds: float) -> list[str]:
    """Ticks at round numbers of milliseconds, and the numbers."""
    ms, columns = seconds * 1e3, WIDTH - _LABEL
    rounds = (digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5))
    every = next(each for each in rounds if ms / each <= _MOST_TICKS)
    ticks, numbers = [" "] * columns, " " * columns
    for count in range(int(ms / every) + 1):
        at, text = int(count * every / ms * columns), f"{count * every:g}"
        if at + len(text) <= columns:
            ticks[at] = "|"
            numbers = f"{numbers[:at]}{text}{numbers[at + len(text) :]}"
    return [" " * _LABEL + "".join(ticks).rstrip(), f"{'  ms':{_LABEL}}{numbers}".rstrip()]
