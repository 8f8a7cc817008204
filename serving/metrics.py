"""Prometheus metrics. They have vLLM's names where vLLM has the metric, so that its dashboards work; else `ubatch:...`.

Each engine counts its own work and sends its totals with every step's outputs; a scrape reads the last totals. The API
process records request latencies, because it alone sees when requests arrive and tokens are sent.

All metrics are in that one process's memory: prometheus_client's files for several (`PROMETHEUS_MULTIPROC_DIR`, which
may be set for another program) are neither needed nor written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from serving.requests import DraftCounts, EngineStatistics

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

_GAUGES: Mapping[str, tuple[str, str]] = {
    "vllm:num_requests_running": ("num_running", "Requests that have KV blocks."),
    "vllm:num_requests_waiting": (
        "num_waiting",
        "Requests that wait for their first step, or for their next after a preemption.",
    ),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of the KV blocks that requests hold, 0 to 1."),
}
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "vllm:prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_hits", "Prompt tokens found there."),
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that began to answer, cached ones included."),
    "vllm:generation_tokens": ("generation_tokens", "Tokens generated."),
    "vllm:num_preemptions": ("preemptions", "Times that a request lost its KV blocks to others."),
    "vllm:corrupted_requests": ("corrupted_requests", "Requests whose logits were not finite."),
    "vllm:spec_decode_num_drafts": ("num_drafts", "Times that tokens guessed for a request were verified."),
    "vllm:spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens guessed ahead."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted_tokens", "Guessed tokens that were right."),
    "ubatch:graph_replays": ("graph_replays", "Steps replayed as CUDA graphs; the others ran eagerly."),
    "ubatch:traced_steps": ("traced_steps", "Overlapped steps that were traced for the following times."),
    "ubatch:communication_seconds": ("communication_s", "Communication in traced steps."),
    "ubatch:communication_hidden_seconds": ("hidden_s", "Communication in traced steps while a lane computed."),
    "ubatch:communication_exposed_seconds": ("exposed_s", "Communication in traced steps that a lane waited for."),
    "ubatch:handoff_wait_seconds": ("handoff_wait_s", "Time in traced steps from a hand-off until the next lane ran."),
}
"""Metric -> the field of `EngineStatistics`, and its help; prometheus_client adds `_total` to counters."""


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
        ranks = [([self._model_name, str(rank)], totals) for rank, totals in sorted(self._statistics().items())]
        labels = ["model_name", "engine"]
        kinds: dict[type[Family], Mapping[str, tuple[str, str]]]
        kinds = {GaugeMetricFamily: _GAUGES, CounterMetricFamily: _COUNTERS}
        for kind, metrics in kinds.items():
            for name, (statistic, text) in metrics.items():
                family = kind(name, text, labels=labels)
                for rank, totals in ranks:
                    family.add_metric(rank, getattr(totals, statistic))
                yield family
        text = "Steps by what they ran, and whether they overlapped (engaged, engaged_single) or why not."
        steps = CounterMetricFamily("ubatch:steps", text, labels=[*labels, "mode", "outcome"])
        text = "Guessed tokens that were right, by their place among those of a step; the first is 0."
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        places = CounterMetricFamily(name, text, labels=[*labels, "position"])
        for rank, totals in ranks:
            for step, count in totals.steps.items():
                mode, _, outcome = step.partition("/")
                steps.add_metric([*rank, mode, outcome], count)
            for place, count in enumerate(totals.accepted_per_position):
                places.add_metric([*rank, str(place)], count)
        yield from (steps, places)


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
        with _in_memory():
            self._make(model_name, registry)

    def _make(self, model_name: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets).labels(model_name)

        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram("vllm:inter_token_latency_seconds", "From one token to the next.", _SECONDS)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a finished request's prompt.", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens a finished request generated.", _TOKENS)
        self._accepted = histogram(
            "ubatch:request_mean_accepted_length",
            "Tokens of a finished request per step that verified guesses of it; 1 where none was ever right.",
            _ACCEPTED,
        )
        ended = Counter(
            "vllm:request_success", "Requests that ended, by why.", ["model_name", "finished_reason"], registry=registry
        )
        self._ended = {reason: ended.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}

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
