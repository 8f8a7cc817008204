"""The engines' metrics as `LLM.get_metrics` returns them: vLLM's classes and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from serving import requests
from serving.requests import EngineStatistics


@dataclass(frozen=True)
class Metric:
    """A metric of one data-parallel rank.

    Attributes:
        name: as in `/metrics`, a counter's without `_total`.
        labels: `engine`, the rank, and the metric's own.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A total since the start."""

    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    """A state after the last step."""

    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Totals by place."""

    values: list[int]


def read_metrics(statistics: Mapping[int, EngineStatistics]) -> list[Metric]:
    """The metrics of all ranks. Histograms are of requests, and only a server keeps them; see `RequestOutput`."""
    return [metric for rank, each in statistics.items() for metric in _of_rank(each, {"engine": str(rank)})]


def _of_rank(statistics: EngineStatistics, labels: dict[str, str]) -> Iterator[Metric]:
    for each in fields(statistics):
        about = each.metadata.get(requests.Metric)
        if about is not None:
            yield from _read(about, getattr(statistics, each.name), labels)


def _read(about: requests.Metric, value: Any, labels: dict[str, str]) -> Iterator[Metric]:
    kind = Gauge if about.kind == "gauge" else Counter
    if isinstance(value, Mapping):
        for key, number in value.items():
            yield kind(about.name, labels | dict(zip(about.labels, key.split("/"), strict=False)), number)
    elif isinstance(value, Sequence):
        yield Vector(about.name, labels, list(value))
    else:
        yield kind(about.name, labels, value)
