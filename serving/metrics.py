"""Prometheus metrics. They have vLLM's names where vLLM has the metric, so that its dashboards work; else `ubatch:...`.

Each engine counts its own work and sends its totals with every step's outputs; a scrape reads the last totals. The API
process records request latencies, because it alone sees when requests arrive and tokens are sent.

All metrics are in that one process's memory: prometheus_client's files for several (`PROMETHEUS_MULTIPROC_DIR`, which
may be set for another program) are neither needed nor written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.requests import DraftCounts, EngineStatistics, Metric

Statistics = Callable[[], Mapping[int, EngineStatistics]]
Family = CounterMetricFamily | GaugeMetricFamily


def _one_two_five(smallest: float, largest: float) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... times `smallest`, up to `largest`."""
    bounds, decade = [], smallest
    while decade <= largest:
        bounds += [decade * step for step in (1, 2, 5)]
        decade *= 10
    return tuple(round(bound, 6) for bound in bounds if bound <= largest)


_SECONDS = _one_two_five(0.001, 2000)
_TOKENS = _one_two_five(1, 1_000_000)
_ACCEPTED = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)

_FAMILIES: Mapping[str, type[Family]] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


def make_registry(model_name: str, statistics: Statistics) -> tuple[CollectorRegistry, RequestMetrics]:
    """A server's metrics; nothing is shared with other registries of the process.

    Args:
        model_name: the label that every metric has.
        statistics: returns the engines' last totals, by rank.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Engines(model_name, statistics))
    return registry, RequestMetrics(model_name, registry)


@contextmanager
def _in_memory() -> Iterator[None]:
    """Metrics that are made meanwhile keep their values in memory. prometheus_client decides at its import, for all."""
    before = values.ValueClass
    values.ValueClass = values.MutexValue
    try:
        yield
    finally:
        values.ValueClass = before


class _Engines(Collector):
    def __init__(self, model_name: str, statistics: Statistics) -> None:
        self._model_name = model_name
        self._statistics = statistics

    def collect(self) -> Iterator[Family]:
        ranks = sorted(self._statistics().items())
        for each in fields(EngineStatistics):
            told: Metric | None = each.metadata.get(Metric)
            if told is None:
                continue
            family = _FAMILIES[told.kind](told.name, told.text, labels=["model_name", "engine", *told.labels])
            for rank, totals in ranks:
                for labels, value in _samples(told, getattr(totals, each.name)):
                    family.add_metric([self._model_name, str(rank), *labels], value)
            yield family


def _samples(metric: Metric, value: Any) -> Iterator[tuple[Sequence[str], float]]:
    """The values of a metric's own labels, and the sample that they have."""
    if not metric.labels:
        yield (), value
        return
    for key, count in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield str(key).split("/", len(metric.labels) - 1), count


@dataclass
class _Life:
    """A request that has not ended.

    Attributes:
        prompt_tokens: number of prompt tokens.
        start: time of arrival, in seconds of `time.monotonic`.
        last: time of its last token, or of its arrival if it has none yet; same clock.
        tokens: number of tokens generated so far.
        drafts: counts of its tokens that were guessed ahead.
    """

    prompt_tokens: int
    start: float
    last: float
    tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


class RequestMetrics:
    """Latencies and sizes of requests, as clients see them. The API reports arrivals, tokens and ends of requests.

    Args:
        model_name: the label that every metric has.
        registry: where the metrics are registered.
        clock: returns seconds; tests replace it.
    """

    def __init__(
        self, model_name: str, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._alive: dict[str, _Life] = {}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets).labels(model_name)

        with _in_memory():
            self._first_token = histogram(
                "vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS
            )
            self._between = histogram("vllm:inter_token_latency_seconds", "From one token to the next.", _SECONDS)
            self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
            self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a finished request's prompt.", _TOKENS)
            self._generated = histogram(
                "vllm:request_generation_tokens", "Tokens a finished request generated.", _TOKENS
            )
            self._accepted = histogram(
                "ubatch:request_mean_accepted_length",
                "Tokens of a finished request per step that verified guesses of it; 1 where none was ever right.",
                _ACCEPTED,
            )
            labels = ["model_name", "finished_reason"]
            ended = Counter("vllm:request_success", "Requests that ended, by why.", labels, registry=registry)
            self._ended = {reason: ended.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}

            grammars = Counter(
                "ubatch:grammars",
                "Bodies that asked for a form of the output, by whether it can be enforced.",
                ["model_name", "outcome"],
                registry=registry,
            )
            self._grammars = {outcome: grammars.labels(model_name, outcome) for outcome in ("taken", "refused")}

    def started(self, request_id: str, num_prompt_tokens: int) -> None:
        """A request arrived."""
        now = self._clock()
        self._alive[request_id] = _Life(num_prompt_tokens, now, now)

    def tokens(self, request_id: str, count: int) -> None:
        """A request got `count` tokens, at least one. Several at once share the time since the last token evenly; those
        that come with the first token come no time after it."""
        life, now = self._alive[request_id], self._clock()
        if life.tokens == 0:
            self._first_token.observe(now - life.start)
            gaps = [0.0] * (count - 1)
        else:
            gaps = [(now - life.last) / count] * count
        for gap in gaps:
            self._between.observe(gap)
        life.tokens += count
        life.last = now

    def drafts(self, request_id: str, counts: DraftCounts) -> None:
        """A step verified drafts of a request; add their counts."""
        self._alive[request_id].drafts += counts

    def grammar(self, outcome: str) -> None:
        """A body asked for a form of the output: `taken` or `refused`."""
        self._grammars[outcome].inc()

    def finished(self, request_id: str, reason: str) -> None:
        """A request ended: `stop`, `length`, `abort` or `error`. The histograms count `stop` and `length` only."""
        life = self._alive.pop(request_id)
        self._ended[reason].inc()
        if reason in ("stop", "length"):
            self._whole.observe(self._clock() - life.start)
            self._prompt.observe(life.prompt_tokens)
            self._generated.observe(life.tokens)
            if (length := life.drafts.mean_accepted_length) is not None:
                self._accepted.observe(length)
