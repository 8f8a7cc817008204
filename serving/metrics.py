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
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from serving.requests import DraftCounts, EngineStatistics, Metric, RequestInput, StartTimes

Statistics = Callable[[], Mapping[int, EngineStatistics]]
Family = CounterMetricFamily | GaugeMetricFamily


def _one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`."""
    bounds = (10**decade * step for decade in range(len(str(largest))) for step in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= largest)


# Buckets are vLLM's.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_OUTPUTS = (1, 2, 5, 10, 20)
_TOKENS = _one_two_five(1_000_000)
_ACCEPTED = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)

FAMILIES: Mapping[str, type[Family]] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


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
def in_memory() -> Iterator[None]:
    """Metrics that are made meanwhile keep their values in memory. prometheus_client decides at its import, for all."""
    before = values.ValueClass
    values.ValueClass = values.MutexValue
    try:
        yield
    finally:
        values.ValueClass = before


_DERIVED: Sequence[tuple[Metric, Callable[[EngineStatistics], Mapping[str, float]]]] = (
    (
        Metric(
            "gauge", "vllm:num_requests_waiting_by_reason", "Requests that wait, by why; all lack room.", ("reason",)
        ),
        lambda totals: {"capacity": totals.num_waiting, "deferred": 0},
    ),
    (
        Metric(
            "counter",
            "vllm:prompt_tokens_by_source",
            "Prompt tokens of requests that began to answer, by whether they were cached.",
            ("source",),
        ),
        lambda totals: {
            "local_compute": totals.prompt_tokens - totals.prompt_tokens_cached,
            "local_cache_hit": totals.prompt_tokens_cached,
        },
    ),
    (
        Metric("gauge", "vllm:engine_sleep_state", "An engine is always awake.", ("sleep_state",)),
        lambda totals: {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
    ),
)
"""Metrics that say again what others say, in the form that vLLM's dashboards ask for; and how they follow."""


class _Engines(Collector):
    def __init__(self, model_name: str, statistics: Statistics) -> None:
        self._model_name = model_name
        self._statistics = statistics

    def collect(self) -> Iterator[Family | HistogramMetricFamily]:
        ranks = sorted(self._statistics().items())
        for each in fields(EngineStatistics):
            told: Metric | None = each.metadata.get(Metric)
            if told is None:
                continue
            values = {rank: getattr(totals, each.name) for rank, totals in ranks}
            yield self._histogram(told, values) if told.kind == "histogram" else self._family(told, values)
        for metric, derive in _DERIVED:
            yield self._family(metric, {rank: derive(totals) for rank, totals in ranks})

    def _family(self, metric: Metric, told: Mapping[int, Any]) -> Family:
        family = FAMILIES[metric.kind](metric.name, metric.text, labels=["model_name", "engine", *metric.labels])
        for rank, value in told.items():
            for own, sample in _samples(metric, value):
                family.add_metric([self._model_name, str(rank), *own], sample)
        return family

    def _histogram(self, metric: Metric, told: Mapping[int, Sequence[float]]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.name, metric.text, labels=["model_name", "engine"])
        bounds = [*map(float, metric.buckets), float("inf")]
        for rank, (total, *counts) in told.items():
            buckets = [(floatToGoString(bound), count) for bound, count in zip(bounds, accumulate(counts), strict=True)]
            family.add_metric([self._model_name, str(rank)], buckets, total)
        return family


def _samples(metric: Metric, value: Any) -> Iterator[tuple[Sequence[str], float]]:
    """The values of a metric's own labels, and the sample that they have."""
    if not metric.labels:
        yield (), value
        return
    for key, count in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield str(key).split("/", len(metric.labels) - 1), count


@dataclass
class Siblings:
    """The outputs of one prompt of a request.

    Attributes:
        n: how many.
        ended: those that have ended.
        longest: tokens of the longest of them.
        whole: none was cut off.
    """

    n: int = 1
    ended: int = 0
    longest: int = 0
    whole: bool = True


@dataclass
class _Life:
    """A request that has not ended.

    Attributes:
        prompt_tokens: number of prompt tokens.
        max_tokens: most tokens that it may generate.
        siblings: the outputs of its prompt, itself included.
        start: time of arrival, in seconds of `time.monotonic`.
        first: time of its first token, or of its arrival if it has none yet; same clock.
        last: time of its last token, or of its arrival if it has none yet; same clock.
        tokens: number of tokens generated so far.
        cached_tokens: prompt tokens that were in the prefix cache.
        times: how long it took to its first token, by its engine's clock.
        drafts: counts of its tokens that were guessed ahead.
    """

    prompt_tokens: int
    max_tokens: int
    siblings: Siblings
    start: float
    first: float
    last: float
    tokens: int = 0
    cached_tokens: int = 0
    times: StartTimes | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)


class RequestMetrics:
    """Latencies and sizes of requests, as clients see them. The API reports arrivals, tokens and ends of requests.

    Times of queueing and prefill are the engine's; the decode begins when the first token has arrived here.

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

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=registry, buckets=buckets).labels(model_name)

        with in_memory():
            self._first_token = histogram(
                "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
            )
            self._between = histogram("vllm:inter_token_latency_seconds", "From one token to the next.", _TOKEN)
            self._mean_between = histogram(
                "vllm:request_time_per_output_token_seconds",
                "From the first token of a finished request to its last, per token after the first.",
                _TOKEN,
            )
            self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST)
            self._queued = histogram(
                "vllm:request_queue_time_seconds", "From a finished request's arrival to its first step.", _REQUEST
            )
            self._prefilled = histogram(
                "vllm:request_prefill_time_seconds",
                "From a finished request's first step to its first token.",
                _REQUEST,
            )
            self._decoded = histogram(
                "vllm:request_decode_time_seconds", "From a finished request's first token to its last.", _REQUEST
            )
            self._inferred = histogram(
                "vllm:request_inference_time_seconds",
                "From a finished request's first step to its last token.",
                _REQUEST,
            )
            self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a finished request's prompt.", _TOKENS)
            self._computed = histogram(
                "vllm:request_prefill_kv_computed_tokens", "Those of them that were not in the prefix cache.", _TOKENS
            )
            self._generated = histogram(
                "vllm:request_generation_tokens", "Tokens a finished request generated.", _TOKENS
            )
            self._longest = histogram(
                "vllm:request_max_num_generation_tokens", "The same, of the longest of a prompt's n outputs.", _TOKENS
            )
            self._asked = histogram(
                "vllm:request_params_max_tokens", "Most tokens that a finished request might generate.", _TOKENS
            )
            self._n = histogram("vllm:request_params_n", "Outputs of a finished prompt.", _OUTPUTS)
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

    def started(self, request: RequestInput, siblings: Siblings | None = None) -> None:
        """A request arrived, one of these outputs; None if it is the only one."""
        now, asked = self._clock(), request.params.max_tokens
        life = _Life(len(request.token_ids), asked, siblings or Siblings(), now, now, now)
        self._alive[request.request_id] = life

    def began(self, request_id: str, cached_tokens: int, times: StartTimes) -> None:
        """A request got its first token; called after `tokens`."""
        life = self._alive[request_id]
        life.cached_tokens, life.times = cached_tokens, times

    def tokens(self, request_id: str, count: int) -> None:
        """A request got `count` tokens, at least one. Several at once share the time since the last token evenly; those
        that come with the first token come no time after it."""
        life, now = self._alive[request_id], self._clock()
        if life.tokens == 0:
            self._first_token.observe(now - life.start)
            life.first = now
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
        whole = reason in ("stop", "length")
        if whole:
            self._finished(life)
        family = life.siblings
        family.ended += 1
        family.longest = max(family.longest, life.tokens)
        family.whole &= whole
        if family.whole and family.ended == family.n:
            self._n.observe(family.n)
            self._longest.observe(family.longest)

    def _finished(self, life: _Life) -> None:
        self._whole.observe(self._clock() - life.start)
        self._prompt.observe(life.prompt_tokens)
        self._computed.observe(life.prompt_tokens - life.cached_tokens)
        self._generated.observe(life.tokens)
        self._asked.observe(life.max_tokens)
        decoded = life.last - life.first
        self._decoded.observe(decoded)
        if life.tokens > 1:
            self._mean_between.observe(decoded / (life.tokens - 1))
        if life.times is not None:
            self._queued.observe(life.times.queued_s)
            self._prefilled.observe(life.times.prefilled_s)
            self._inferred.observe(life.times.prefilled_s + decoded)
        if (length := life.drafts.mean_accepted_length) is not None:
            self._accepted.observe(length)
