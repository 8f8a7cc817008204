"""Results of a section: figures with their goals, as text, JSON and markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from serving.workbench.bench.statistics import Interval
from ubatch import ConfigError

Arms = dict[str, list[float]]
"""Arm -> its block means, milliseconds."""


Goal = tuple[Literal[">=", "<="], float]
"""At least or at most a number."""


@dataclass(frozen=True)
class Figure:
    """One row of a table; without a value if it was not measured, without a unit for a ratio."""

    what: str
    value: Interval | float | None
    unit: str = ""
    goal: Goal | None = None
    note: str = ""

    @property
    def number(self) -> float | None:
        return self.value.median if isinstance(self.value, Interval) else self.value

    @property
    def shown(self) -> str:
        if self.value is None:
            return "not measured"
        digits = f"{self.value:.3g}" if isinstance(self.value, Interval) else f"{self.value:.4g}"
        return f"{digits} {self.unit}".rstrip()

    @property
    def verdict(self) -> str:
        """`met` or `missed`, by the median; empty without a goal or a value."""
        if self.goal is None or self.number is None:
            return ""
        sign, value = self.goal
        return "met" if (self.number <= value if sign == "<=" else self.number >= value) else "missed"


@dataclass
class Section:
    """Results of one section.

    Attributes:
        shape: the sizes that were run, as plain values.
        figures: the rows of its table.
        arms_ms: raw block means by group of arms.
        error: why it ended early: class and message; None if it ran to its end.
        environment: hardware and versions of the process that ran it.
    """

    name: str
    title: str
    shape: dict[str, Any] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    arms_ms: dict[str, Arms] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)

    def add(
        self,
        what: str,
        value: Interval | float | None,
        unit: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
    ) -> None:
        goal: Goal | None = None if at_least is None else (">=", at_least)
        if at_most is not None:
            goal = ("<=", at_most)
        self.figures.append(Figure(what, value, unit, goal, note))

    @property
    def complete(self) -> bool:
        """Whether nothing failed, and every figure with a goal was measured."""
        return self.error is None and all(each.value is not None for each in self.figures if each.goal is not None)

    def as_json(self) -> dict[str, Any]:
        """The section as plain values."""
        figures = [{**asdict(each), "verdict": each.verdict} for each in self.figures]
        return {**asdict(self), "figures": figures, "seconds": round(self.seconds, 1)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Section:
        """The inverse of `as_json`.

        Raises:
            ConfigError: an earlier version of this module wrote it.
        """
        try:
            return cls(**{**values, "figures": [_figure(each) for each in values["figures"]]})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a section of an earlier version ({in_a_line(error)})") from error


def _figure(values: Mapping[str, Any]) -> Figure:
    value, goal = values["value"], values["goal"]
    if goal is not None and (len(goal) != len(get_args(Goal)) or goal[0] not in get_args(get_args(Goal)[0])):
        raise ValueError(f"a goal is a sign and a number, not {goal}")
    return Figure(
        values["what"],
        Interval(**value) if isinstance(value, dict) else value,
        values["unit"],
        None if goal is None else tuple(goal),
        values["note"],
    )


def in_a_line(error: Exception) -> str:
    """Class and first line of an error, for a note."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"[:160]


_HEAD = ("what", "measured", "goal", "")


def as_text(section: Section, *, judge: bool) -> str:
    """The section as a table; with verdicts only if `judge`: a smoke test has none."""
    rows = [_HEAD, *_rows(section, judge)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = [f"{section.title}  ({section.seconds:.0f} s)"]
    lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if section.error is not None:
        lines.append(f"  FAILED: {section.error}")
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(sections: Iterable[Section], *, judge: bool) -> str:
    parts = ["# On a GPU\n\nWritten by `make bench-gpu`; medians with their 95 % bootstrap interval."]
    for section in sections:
        where = section.environment
        parts.append(
            f"## {section.title}\n\n{where.get('device')}, driver {where.get('driver')}, torch {where.get('torch')}, "
            f"Triton {where.get('triton')}, commit {where.get('commit')}."
        )
        rows = [_HEAD, ("---",) * len(_HEAD), *_rows(section, judge)]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
        if section.error is not None:
            parts.append(f"Failed: {section.error}")
    return "\n\n".join(parts) + "\n"


def _rows(section: Section, judge: bool) -> list[Sequence[str]]:
    return [
        (
            each.what,
            each.shown + (f" ({each.note})" if each.note else ""),
            "" if each.goal is None else f"{each.goal[0]} {each.goal[1]:g}",
            each.verdict if judge else "",
        )
        for each in section.figures
    ]
