"""Report the chosen settings: as tables, and as a YAML file for `--config` of `ubatch serve` and `ubatch generate`.

Charts of the measured speed-ups are an HTML page that needs no other files, and a PNG if matplotlib is installed.
"""

import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from serving.workbench.arms.cells import SERIAL_ARM, Arm, Cell, CostTable, Setting, choose
from serving.workbench.bench.statistics import columns, paired
from serving.workbench.tuning.measure import State
from ubatch import SCHEDULES, UBatchConfig

_FLAT = 1.02
"""A smaller step may take this much longer than a larger one: steps that are bound by memory take about the same."""


@dataclass(frozen=True)
class ModeResult:
    """Result for one mode.

    Attributes:
        table: the seconds of a step by tokens and arm.
        choice: the best setting.
        arms: all arms by name.
        doubts: what in the measured times does not support the chosen threshold, a sentence each.
    """

    mode: str
    table: CostTable
    choice: Setting
    arms: Mapping[str, Arm]
    doubts: Sequence[str] = ()

    @property
    def arm(self) -> Arm:
        return self.arms[self.choice.arm]

    def sentence(self) -> str:
        setting, regret = self.choice, self.table.regret(self.choice)
        if setting.threshold is None:
            return f"{self.mode}: serial; no arm is faster by enough at any size (regret {regret:.1%})"
        sizes = [size for size in self.table.sizes if size >= setting.threshold]
        gains = {size: self.table.seconds[size][SERIAL_ARM] / self.table.time(setting, size) for size in sizes}
        size = max(gains, key=lambda tokens: gains[tokens])
        return (
            f"{self.mode}: {setting.arm} from {setting.threshold} tokens on, up to {gains[size]:.2f}x at {size} "
            f"(regret {regret:.1%})"
        )

    def text(self) -> str:
        """The table as text, milliseconds; the fastest arm of a size has a star."""
        arms = [SERIAL_ARM, *self.table.arms]
        rows = [[self.mode, *arms]]
        for tokens in self.table.sizes:
            times, best = self.table.seconds[tokens], self.table.best(tokens)
            stars = ["*" if times.get(name) == best else " " for name in arms]
            cells = (
                f"{times[name] * 1e3:.2f}{s}" if name in times else "- " for name, s in zip(arms, stars, strict=True)
            )
            rows.append([str(tokens), *cells])
        return columns(rows)


@dataclass(frozen=True)
class Result:
    """Results of all modes, in the order that was asked for, and facts about the machine and the run."""

    modes: Sequence[ModeResult]
    facts: Mapping[str, Any]

    def settings(self) -> dict[str, Any]:
        chosen = [each.arm for each in self.modes if not each.arm.is_serial]
        own = {arm.schedule.name: arm.schedule for arm in chosen if arm.schedule.name not in SCHEDULES}
        settings: dict[str, Any] = {"enable-dbo": bool(chosen)}
        if own:
            settings["schedules"] = {name: schedule.to_mapping() for name, schedule in own.items()}
        for each in self.modes:
            settings[each.mode] = _mode_settings(each)
        return settings

    def yaml(self) -> str:
        """The file's text: the measurements as comments, then the settings. It is parsed once as a check.

        Raises:
            ConfigError: the settings cannot be read back.
        """
        settings = self.settings()
        UBatchConfig.from_mapping(settings)
        head = ["Written by `ubatch tune`; read by `ubatch serve MODEL --config FILE` and `ubatch generate`.", ""]
        head += [f"{name}: {value}" for name, value in self.facts.items()]
        head += ["", "Milliseconds of a step by tokens of a rank, * the fastest:"]
        for each in self.modes:
            head += ["", *each.text().splitlines()]
        head += ["", *self.sentences()]
        comments = "\n".join(f"# {line}".rstrip() for line in head)
        return f"{comments}\n\n{yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)}"

    def print(self) -> None:
        for each in self.modes:
            print(f"\n{each.text()}")
        print()
        for sentence in self.sentences():
            print(sentence)

    def sentences(self) -> list[str]:
        """What was chosen for every mode, with warnings; and what to do, if there are any."""
        told = [line for each in self.modes for line in (each.sentence(), *map("warning: {}".format, each.doubts))]
        if any(each.doubts for each in self.modes):
            told.append(
                "These thresholds are from noise: measure again with nothing else running, and more --max-seconds."
            )
        return told

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.yaml(), encoding="utf-8")


def make_result(
    cells: Sequence[Cell], arms: Mapping[str, Sequence[Arm]], state: State, facts: Mapping[str, Any]
) -> Result:
    """Choose the best setting of every mode, from the measured times. `arms` are those that were measured, by mode."""
    results = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        by_tokens = {cell.tokens: state.samples[str(cell)] for cell in cells if cell.mode == mode}
        seconds = {tokens: _times(samples) for tokens, samples in sorted(by_tokens.items())}
        table = CostTable(seconds)
        known = {arm.name: arm for arm in arms[mode]}
        order = sorted(table.arms, key=lambda name: known[name].complexity)
        choice = choose(table, order)
        results.append(ModeResult(mode, table, choice, known, tuple(_doubts(mode, table, choice, by_tokens))))
    return Result(results, facts)


def _doubts(
    mode: str, table: CostTable, setting: Setting, samples: Mapping[int, Mapping[str, list[float] | None]]
) -> Iterator[str]:
    """What speaks against the threshold: a gain that the rounds do not agree on there; at or above it, or right below,
    a step that took longer than one with more tokens."""
    threshold = setting.threshold
    if threshold is None:
        return
    pairs = list(zip(samples[threshold][setting.arm] or (), samples[threshold][SERIAL_ARM] or (), strict=False))
    gain = paired([serial for _, serial in pairs], [own for own, _ in pairs])
    if len(pairs) < 2:
        yield f"{mode}: {threshold} tokens were measured once, so nobody knows whether {gain.median:.2f}x is noise."
    elif gain.low <= 1:
        yield f"{mode}: at {threshold} tokens the gain is not beyond noise, {gain:.2f}x."
    for arm in (SERIAL_ARM, setting.arm):
        for fewer, more in itertools.pairwise(size for size in table.sizes if arm in table.seconds[size]):
            times = [table.seconds[size][arm] for size in (fewer, more)]
            if more >= threshold and times[0] > _FLAT * times[1]:
                ms = " against ".join(f"{seconds * 1e3:.2f} ms" for seconds in times)
                yield f"{mode}: {fewer} tokens took longer than {more} ({arm}, {ms})."


def _times(samples: Mapping[str, list[float] | None]) -> dict[str, float]:
    """Seconds by arm: the serial median, times the median ratio to serial over the rounds, which cancels drift."""
    serial = samples[SERIAL_ARM] or []
    base = median(serial)
    times = {SERIAL_ARM: base}
    for name, own in samples.items():
        if own and name != SERIAL_ARM:
            times[name] = base * median(arm / other for arm, other in zip(own, serial, strict=False))
    return times


def _mode_settings(result: ModeResult) -> dict[str, Any]:
    if result.arm.is_serial:
        return {"schedule": SERIAL_ARM}
    schedule = result.arm.schedule
    settings: dict[str, Any] = {"schedule": schedule.name}
    if schedule.lanes > 1:
        settings["num_ubatches"] = schedule.lanes
    return settings | {"token_threshold": max(result.choice.threshold or 0, schedule.lanes)}


# -- charts ------------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 14, 40
_COLOURS = ("#3566c4", "#8a4fc0", "#1f8ba3", "#8b6a2f", "#d9480f", "#12956a", "#b03a6b", "#56616f")
_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --text: #16191d; --muted: #626b76; --line: #dfe3e8; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0f1216; --text: #e8ebef; --muted: #98a2ae; --line: #2b313a; }
}
body { margin: 28px auto; max-width: 820px; padding: 0 20px; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 22px; } h2 { font-size: 16px; margin: 30px 0 6px; } p, li, dt { color: var(--muted); }
svg { width: 100%; height: auto; } svg text { fill: var(--muted); font-size: 12px; }
pre { overflow-x: auto; }
.legend span { display: inline-block; margin-right: 16px; } .legend i { display: inline-block; width: 14px;
  height: 3px; margin-right: 6px; vertical-align: middle; }
"""


def write_html(result: Result, path: Path) -> None:
    """Write a page with a chart and a table (milliseconds, * the fastest) per mode, and the choices in words."""
    facts = "".join(f"<li>{html.escape(f'{name}: {value}')}</li>" for name, value in result.facts.items())
    modes = "".join(map(_section, result.modes))
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ubatch tune</title><style>{_STYLE}</style></head><body><h1>ubatch tune</h1><ul>{facts}</ul>{modes}"
        "</body></html>\n",
        encoding="utf-8",
    )


def can_draw_png() -> bool:
    return find_spec("matplotlib") is not None


def write_png(result: Result, path: Path) -> None:
    """Write the charts side by side as a PNG. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(result.modes), 3.6), layout="constrained")
    for place, each in enumerate(result.modes, 1):
        axes = figure.add_subplot(1, len(result.modes), place)
        axes.axhline(1.0, color="#8a929c", linewidth=1, label=SERIAL_ARM)
        for arm, colour in _coloured(each):
            points = _points(each, arm)
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", ms=3, color=colour, label=arm)
        if each.choice.threshold is not None:
            axes.axvline(each.choice.threshold, color="#8a929c", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(each.table.sizes, [str(tokens) for tokens in each.table.sizes])
        axes.set_title(each.mode)
        axes.set_xlabel("tokens of a rank")
        axes.set_ylabel("speed-up over serial")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def _section(each: ModeResult) -> str:
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{html.escape(arm)}</span>' for arm, colour in _coloured(each)
    )
    told = "".join(f"<p>{html.escape(line)}</p>" for line in (each.sentence(), *map("warning: {}".format, each.doubts)))
    return (
        f"<h2>{html.escape(each.mode)}</h2>{told}{_chart(each)}"
        f'<div class="legend">{legend}</div><pre>{html.escape(each.text())}</pre>'
    )


def _chart(each: ModeResult) -> str:
    """An SVG chart of speed-up over serial by tokens; a dashed line marks the threshold."""
    speedups = [y for arm in each.table.arms for _, y in _points(each, arm)]
    low, high = min([0.9, *speedups]), max([1.1, *speedups])
    sizes = each.table.sizes

    def x(tokens: float) -> float:
        span = math.log2(sizes[-1] / sizes[0]) or 1.0
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log2(tokens / sizes[0]) / span

    def y(speedup: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - speedup) / (high - low)

    parts = []
    for level in _levels(low, high):
        line = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(level):.1f}" y2="{y(level):.1f}"'
        width = 2 if level == 1.0 else 1
        parts.append(f'<line {line} stroke="var(--line)" stroke-width="{width}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level:g}x</text>')
    for tokens in sizes:
        parts.append(f'<text x="{x(tokens):.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{tokens}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">tokens of a rank</text>')
    threshold = each.choice.threshold
    if threshold is not None:
        line = f'x1="{x(threshold):.1f}" x2="{x(threshold):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
        parts.append(f'<line {line} stroke="var(--muted)" stroke-dasharray="5 4"/>')
    for arm, colour in _coloured(each):
        points = _points(each, arm)
        path = " ".join(f"{x(tokens):.1f},{y(speedup):.1f}" for tokens, speedup in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for tokens, speedup in points:
            parts.append(
                f'<circle cx="{x(tokens):.1f}" cy="{y(speedup):.1f}" r="3.5" fill="{colour}">'
                f"<title>{html.escape(arm)}, {tokens} tokens: {speedup:.2f}x</title></circle>"
            )
    label = f"{each.mode}: speed-up over serial by tokens"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _coloured(each: ModeResult) -> list[tuple[str, str]]:
    return [(arm, _COLOURS[place % len(_COLOURS)]) for place, arm in enumerate(each.table.arms)]


def _points(each: ModeResult, arm: str) -> list[tuple[int, float]]:
    rows = each.table.seconds
    return [
        (tokens, rows[tokens][SERIAL_ARM] / rows[tokens][arm]) for tokens in each.table.sizes if arm in rows[tokens]
    ]


def _levels(low: float, high: float) -> Sequence[float]:
    step = next(size for size in (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 1e3) if (high - low) / size <= 8)
    first = math.ceil(low / step)
    levels = [round(number * step, 2) for number in range(first, math.floor(high / step) + 1)]
    return sorted({*levels, 1.0})
