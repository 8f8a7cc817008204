"""The experts' load in a trace's page: that of the recorded time, or of a file (`ubatch trace --expert-loads`).

Its picture, as SVG, shows who has how many tokens in every MoE layer, and how evenly ranks share them:

    columns of the map    slots, rank by rank; without replicas a slot is an expert
    ranks                 tokens of each rank, against the layer's busiest one
    balancedness          mean / max over ranks

It is drawn here, without a script, so that a page can have it and a document, too. Colours are the page's, or its own.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moe import ExpertPlacement
from moe.balance import Floats, Ints, LoadKind, read_loads
from serving.engine.rank.tracing import EXPERT_LOADS
from ubatch import ConfigError
from ubatch.trace import RankTrace

_WIDTH, _LEFT, _MAP, _RANKS, _GAP, _EVEN, _HEAD, _FOOT = 1440, 60, 940, 210, 22, 120, 46, 40
_RANKS_X = _LEFT + _MAP + _GAP
_EVEN_X = _RANKS_X + _RANKS + _GAP
_LEVELS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Bounds of the map's shades, in multiples of a slot's mean load."""
_SHADES = (0.03, 0.08, 0.14, 0.21, 0.29, 0.38, 0.48, 0.62, 0.8, 1.0)
_MOST_NAMES = 32
"""Most ranks that have their names above the map."""
_STYLE = """\
.expert-map { display: block; width: 100%; height: auto; font: 12px system-ui, "DejaVu Sans", sans-serif; }
.expert-map text { fill: var(--muted, #626b76); } .expert-map .word { fill: var(--text, #16191d); font-weight: 600; }
.expert-map .hot { fill: var(--exposed, #d9480f); } .expert-map .cell { stroke: var(--exposed, #d9480f); }
.expert-map .rank { fill: var(--lane0, #3566c4); }
.expert-map .even { fill: var(--hidden, #12956a); } .expert-map .track { fill: var(--track, #f3f5f7); }
.expert-map .edge { stroke: var(--muted, #626b76); } .expert-map .row { fill: transparent; }
.expert-map .row:hover { fill: var(--band, rgba(20, 30, 45, .09)); }
.expert-map polyline { fill: none; stroke-width: 2; } .expert-map .worst { stroke: var(--exposed, #d9480f); }
.expert-map .mean { stroke: var(--hidden, #12956a); }"""


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """The load of the experts in some time.

    Attributes:
        steps: `[steps, L, E]`; one step if it is not known what came when.
        placement: where the experts were.
        kinds: kind of steps, in words -> its part of the load, `[L, E]`; empty if it is not known.
    """

    steps: Floats
    placement: ExpertPlacement
    kinds: Mapping[str, Floats] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Floats:
        """`[L, E]`: the load of all steps."""
        return np.asarray(self.steps.sum(axis=0))

    @property
    def figures(self) -> Mapping[str, Mapping[str, float]]:
        """Kind of steps, or all -> its balancedness: `worst` of the layers, and `mean` over them."""
        views = {"all steps": self.whole, **self.kinds}
        found = {name: self.placement.balancedness(loads) for name, loads in views.items()}
        return {name: {"worst": float(each.min()), "mean": float(each.mean())} for name, each in found.items()}

    @property
    def sentence(self) -> str:
        """`4 layers of 8 experts on 2 ranks; balancedness (mean / max over ranks) 0.76 in layer 2, the worst, ...`."""
        of_layers = self.placement.balancedness(self.whole)
        where = self.placement
        held = f"{where.num_layers} layers of {where.num_experts} experts on {where.num_ranks} ranks"
        even = f"balancedness (mean / max over ranks) {of_layers.min():.2f} in layer {of_layers.argmin()}, the worst"
        return f"{held}; {even}, {of_layers.mean():.2f} on average"

    def section(self) -> str:
        """HTML for `ubatch.write_html`."""
        parts = [f'<div class="bar"><b>Load of the experts</b><span>{html.escape(self.sentence)}.</span></div>']
        parts.append(draw_balance(self.whole, self.placement))
        if len(self.steps) > 1:
            course = self.placement.balancedness(self.steps)
            parts.append(draw_course({"worst": course.min(axis=1), "mean": course.mean(axis=1)}))
        for name, loads in self.kinds.items():
            parts.append(
                f"<details><summary>{html.escape(name)}</summary>{draw_balance(loads, self.placement)}</details>"
            )
        return "".join(parts)


def loads_of_traces(ranks: Sequence[RankTrace]) -> RecordedLoads | None:
    """The load that ranks have recorded, summed over them; None if there is none, or the ranks share no experts.

    Raises:
        ConfigError: the files are not of one recording.
    """
    told: list[Any] = [rank.extra[EXPERT_LOADS] for rank in ranks if EXPERT_LOADS in rank.extra]
    if not told or told[0]["num_ranks"] == 1:
        return None
    try:
        counts = np.array([each["counts"] for each in told], dtype=np.int64).sum(axis=0)
        placement = ExpertPlacement(np.array(told[0]["slots"]), counts.shape[-1], told[0]["num_ranks"])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the ranks have not recorded the load of the same experts: {error}") from error
    whole = counts.sum(axis=0)
    if not whole.any():
        return None
    kinds = {f"{LoadKind.PREFILL} steps": counts[0], f"{LoadKind.DECODE} steps": counts[1]}
    return RecordedLoads(whole[None], placement, {name: loads for name, loads in kinds.items() if loads.any()})


def loads_of_file(path: Path, num_ranks: int | None, placed: Path | None) -> RecordedLoads:
    """The load in a file.

    Args:
        num_ranks: ranks that share the experts; None with `placed`.
        placed: file of a placement; None for the experts in the order of their ids.

    Raises:
        ConfigError: a file cannot be read, or they do not fit each other.
    """
    steps = read_loads(path)
    _, layers, experts = steps.shape
    if placed is None:
        placement = ExpertPlacement.default(layers, experts, num_ranks or 1)
    else:
        placement = ExpertPlacement.load(placed)
    if (placement.num_layers, placement.num_experts) != (layers, experts):
        raise ConfigError(
            f"{path} has the load of {experts} experts in {layers} MoE layers, but {placed} places "
            f"{placement.num_experts} experts in {placement.num_layers}."
        )
    if num_ranks not in (None, placement.num_ranks):
        raise ConfigError(f"{placed} has {placement.num_ranks} ranks, not {num_ranks}. Remove --ranks.")
    return RecordedLoads(steps, placement)


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_balance(loads: Floats | Ints, placement: ExpertPlacement) -> str:
    """A heat map of slots and layers, with the ranks' tokens and the balancedness of each layer.

    Args:
        loads: `[L, E]`: tokens of each expert of each MoE layer.
        placement: where the experts are.
    """
    layers, slots, num_ranks = placement.num_layers, placement.num_slots, placement.num_ranks
    of_slots = placement.slot_loads(loads)
    held = placement.experts >= 0
    means = of_slots.sum(axis=1) / held.sum(axis=1)
    relative = np.divide(of_slots, means[:, None], out=np.zeros_like(of_slots), where=means[:, None] > 0)
    ranks, even = placement.rank_loads(loads), placement.balancedness(loads)
    row, cell = min(22.0, max(9.0, 640 / layers)), _MAP / slots
    bottom = _HEAD + layers * row
    parts = [
        _text(_LEFT, 14, f"{slots} slots" if slots != placement.num_experts else f"{slots} experts", "word"),
        _text(_RANKS_X, 14, "tokens of each rank", "word"),
        _text(_EVEN_X, 14, "balancedness", "word"),
        _text(0, _HEAD - 8, "layer"),
        *_rank_names(num_ranks),
        *_cells(relative, held, row, cell),
    ]
    every = max(1, -(-13 // int(row)))
    for layer in range(layers):
        top = _HEAD + layer * row
        if layer % every == 0:
            parts.append(_text(_LEFT - 8, top + row / 2 + 4, str(layer), end=True))
        parts += _rank_bars(ranks[layer], top, row)
        parts.append(_rect(_EVEN_X, top + 1, _EVEN, row - 2, "track"))
        parts.append(_rect(_EVEN_X, top + 1, _EVEN * even[layer], row - 2, "even"))
        if layer % every == 0:
            parts.append(_text(_EVEN_X + _EVEN + 8, top + row / 2 + 4, f"{even[layer]:.2f}"))
    for rank in range(1, num_ranks):
        at = _LEFT + _MAP * rank / num_ranks
        parts.append(f'<path class="edge" d="M{at:.1f} {_HEAD - 4}V{bottom:.1f}"/>')
    for layer in range(layers):
        told = html.escape(_told(layer, np.asarray(loads)[layer], ranks[layer], float(even[layer])))
        box = _box(0, _HEAD + layer * row, _WIDTH, row)
        parts.append(f'<rect class="row" {box}><title>{told}</title></rect>')
    parts += _legend(bottom + 14)
    return _svg(bottom + _FOOT, parts, "Load of experts by MoE layer, with each rank's tokens and the balancedness.")


def draw_course(lines: Mapping[str, Floats]) -> str:
    """Balancedness over time, a line for each name (`worst` and `mean` have colours).

    Args:
        lines: name to `[steps]`, 0 to 1.
    """
    height, wide = 120.0, _WIDTH - _LEFT - 100.0
    parts = [_text(_LEFT, 14, "balancedness over time", "word")]
    for value in (0.0, 0.5, 1.0):
        at = _HEAD + height * (1 - value)
        parts.append(_rect(_LEFT, at - 0.5, wide, 1, "track"))
        parts.append(_text(_LEFT - 8, at + 4, f"{value:g}", end=True))
    below = 0.0
    for name, values in sorted(lines.items(), key=lambda line: -float(line[1][-1])):
        across = _LEFT + wide * np.arange(len(values)) / max(1, len(values) - 1)
        points = " ".join(f"{x:.1f},{_HEAD + height * (1 - y):.1f}" for x, y in zip(across, values, strict=True))
        parts.append(f'<polyline class="{html.escape(name)}" points="{points}"/>')
        below = max(below + 14, _HEAD + height * (1 - float(values[-1])) + 4)
        parts.append(_text(_LEFT + wide + 10, below, name))
    return _svg(_HEAD + height + 20, parts, "Balancedness over time.")


def as_document(svg: str) -> str:
    """A drawing as a file of its own. It looks the same in light and dark surroundings."""
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" style="background: #ffffff" ', 1)


def _rank_names(num_ranks: int) -> Iterator[str]:
    for rank in range(num_ranks) if num_ranks <= _MOST_NAMES else ():
        middle = (rank + 0.5) / num_ranks
        yield _text(_LEFT + _MAP * middle, _HEAD - 8, f"rank {rank}" if num_ranks <= 16 else str(rank), middle=True)


def _cells(relative: Floats, held: np.ndarray, row: float, cell: float) -> Iterator[str]:
    """One path for each shade; neighbours of a shade are one thick line."""
    shades = np.where(held, np.digitize(relative, _LEVELS), -1)
    paths: dict[int, list[str]] = {}
    for layer, of_layer in enumerate(shades):
        start = 0
        for shade, run in groupby(of_layer.tolist()):
            length = len(list(run))
            x, y = _LEFT + start * cell, _HEAD + layer * row + row / 2
            paths.setdefault(shade, []).append(f"M{x:.1f} {y:.1f}h{length * cell:.1f}")
            start += length
    for shade, drawn in sorted(paths.items()):
        if shade >= 0:  # an idle slot is left blank
            width = f"{row - 1:.1f}"
            yield f'<path class="cell" stroke-width="{width}" stroke-opacity="{_SHADES[shade]}" d="{"".join(drawn)}"/>'


def _rank_bars(tokens: Floats, top: float, row: float) -> Iterator[str]:
    most, wide = float(tokens.max()), _RANKS / len(tokens)
    yield _rect(_RANKS_X, top + 1, _RANKS, row - 2, "track")
    for rank, count in enumerate(tokens.tolist() if most else ()):
        high = (row - 2) * count / most
        space = min(2.0, wide / 5)
        kind = "hot" if count == most and count > tokens.mean() else "rank"
        yield _rect(_RANKS_X + rank * wide + space / 2, top + row - 1 - high, wide - space, high, kind)


def _told(layer: int, tokens: np.ndarray, ranks: Floats, even: float) -> str:
    """What a layer's row says when pointed at."""
    total = float(tokens.sum())
    if not total:
        return f"layer {layer}: no tokens"
    expert, rank = int(tokens.argmax()), int(ranks.argmax())
    return (
        f"layer {layer}: balancedness {even:.3f}; rank {rank} has {ranks[rank] / ranks.mean():.2f} times the mean, "
        f"{ranks[rank]:,.0f} tokens; expert {expert} has {tokens[expert]:,.0f}, {tokens[expert] / total:.1%} of all"
    )


def _legend(top: float) -> Iterator[str]:
    x = float(_LEFT)
    yield _text(x, top + 10, "tokens of a slot, in multiples of the layer's mean:")
    x += 310
    for shade, opacity in enumerate(_SHADES):
        yield f'<rect class="hot" fill-opacity="{opacity}" {_box(x, top, 36, 12)}/>'
        if shade < len(_LEVELS):
            yield _text(x + 36, top + 25, f"{_LEVELS[shade]:g}", middle=True)
        x += 36


def _svg(height: float, parts: list[str], label: str) -> str:
    return (
        f'<svg class="expert-map" viewBox="-14 -6 {_WIDTH + 28} {height + 12:.0f}" '
        f'role="img" aria-label="{html.escape(label)}"><style>{_STYLE}</style>{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, kind: str = "", *, end: bool = False, middle: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ' text-anchor="middle"' if middle else ""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{named}>{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" {_box(x, y, width, height)}/>'


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
