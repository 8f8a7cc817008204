"""Draw a recorded step as text: the picture in README.md.

    make demo && python docs/timeline.py demo/trace.json

Each lane has two rows: what it computes, and what it has on the link. One column is the same time in every row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from ubatch import Span, SpanKind
from ubatch.trace.file import read_chrome

WIDTH = 84
KEY = "A attention, norms, router    E experts    d dispatch    c combine"


def main() -> int:
    """Read a trace and print some layers of one overlapped step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, help="trace.json of `make demo` or `ubatch trace`")
    parser.add_argument("--rank", type=int, default=0, help="whose lanes (default 0)")
    parser.add_argument("--layers", type=int, nargs=2, default=(1, 3), help="from and to, 0 first (default 1 3)")
    options = parser.parse_args()
    spans = {trace.rank: trace.spans for trace in read_chrome(options.trace)}
    if options.rank not in spans:
        parser.error(f"{options.trace} has no rank {options.rank}, only {sorted(spans)}.")
    try:
        picture = draw(spans[options.rank], *options.layers)
    except ValueError as error:
        parser.error(str(error))
    print(f"{picture[0]} of a step    {KEY}", *picture[1:], sep="\n")
    return 0


def draw(spans: Iterable[Span], first: int, end: int) -> list[str]:
    """Layers `first` to `end - 1` of lane 0 in the last step that ran in lanes, and what the others did meanwhile.

    Raises:
        ValueError: no step ran in lanes, or it has fewer layers.
    """
    lanes = [span for span in spans if span.lane >= 0]
    step = [span for span in lanes if span.step == max(span.step for span in lanes)]
    layers = [span.end for span in step if span.lane == 0 and span.name == "layer"]
    if not 0 <= first < end <= len(layers):
        raise ValueError(f"--layers {first} {end}: the last step in lanes has {len(layers)} layers.")
    begin, until = [min(span.start for span in step), *layers][first], layers[end - 1]
    rows = [f"{(until - begin) * 1e3:.0f} ms"]
    for lane in sorted({span.lane for span in step}):
        own = [span for span in step if span.lane == lane]
        computing = [span for span in own if span.kind is SpanKind.COMPUTE]
        travelling = [span for span in own if span.kind is SpanKind.TRANSFER]
        rows.append(f"lane {lane} computes  {row(computing, begin, until)}".rstrip())
        rows.append(f"       on the link {row(travelling, begin, until)}".rstrip())
    return rows


def row(spans: Iterable[Span], begin: float, until: float) -> str:
    """One character per column: the span that covers most of it, or a blank where none covers half of it."""
    column, cells = (until - begin) / WIDTH, [" "] * WIDTH
    for number in range(WIDTH):
        left = begin + number * column
        covered: dict[str, float] = {}
        for span in spans:
            share = min(span.end, left + column) - max(span.start, left)
            if share > 0:
                covered[letter(span)] = covered.get(letter(span), 0.0) + share
        if sum(covered.values()) >= column / 2:
            cells[number] = max(covered, key=covered.__getitem__)
    return "".join(cells)


def letter(span: Span) -> str:
    """What a span is: of a transfer its initial; compute that ends where a combine is launched are the experts."""
    if span.kind is SpanKind.TRANSFER:
        return span.name[0]
    return "E" if span.name.startswith("combine.") else "A"


if __name__ == "__main__":
    sys.exit(main())
