"""The engines' metrics as `LLM.get_metrics` returns them: vLLM's classes and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
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


@dataclass(frozen=True)
class Histogram(Metric):
    """Values counted by size.

    Attributes:
        buckets: upper bound as text -> how many values are not above it; the last one is `+Inf`.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(statistics: Mapping[int, EngineStatistics]) -> list[Metric]:
    """The metrics of all ranks. Histograms of requests are a server's alone; see `RequestOutput.metrics`."""
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
    elif about.kind == "histogram":
        total, *counts = value
        bounds = [*map(str, getattr(about, "buckets", ())), "+Inf"]
        yield Histogram(about.name, labels, sum(counts), total, dict(zip(bounds, accumulate(counts), strict=True)))
    elif isinstance(value, Sequence):
        yield Vector(about.name, labels, list(value))
    else:
        yield kind(about.name, labels, value)
