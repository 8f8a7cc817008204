"""Draw some layers of a recorded step as text.

    make demo && .venv/bin/python docs/timeline.py demo/trace.json

Each lane has two rows: what it computes, and what it has on the link. One column is the same time in every row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from serving.workbench.tracing.text import KEY, draw_lanes, last_step
from ubatch import Span
from ubatch.trace.file import read_chrome


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
    step = last_step(spans, in_lanes=True)
    layers = [span.end for span in step if span.lane == 0 and span.name == "layer"]
    if not 0 <= first < end <= len(layers):
        raise ValueError(f"--layers {first} {end}: the last step in lanes has {len(layers)} layers.")
    begin, until = [min(span.start for span in step), *layers][first], layers[end - 1]
    return [f"{(until - begin) * 1e3:.0f} ms", *draw_lanes(step, begin, until)]


if __name__ == "__main__":
    sys.exit(main())
