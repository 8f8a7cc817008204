"""Report the chosen settings: as tables, and as a YAML file for `--config` of `ubatch serve` and `ubatch generate`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from serving.workbench.arms.cells import Arm, Cell
from serving.workbench.arms.cost_table import SERIAL_ARM, CostTable, Setting, choose
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
