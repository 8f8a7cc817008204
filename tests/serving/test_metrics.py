"""What `/metrics` says: names that vLLM's dashboards ask for, and values that were put in."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serving.api import RequestObserver
from serving.logs import configure_logging, log_event
from serving.metrics import RequestMetrics, make_registry
from serving.requests import DraftCounts, EngineStatistics

GAUGES = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
COUNTERS = {
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:corrupted_requests",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "vllm:request_success",
    "ubatch:steps",
    "ubatch:graph_replays",
    "ubatch:traced_steps",
    "ubatch:communication_seconds",
    "ubatch:communication_hidden_seconds",
    "ubatch:communication_exposed_seconds",
    "ubatch:handoff_wait_seconds",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "ubatch:request_mean_accepted_length",
}


class Metrics:
    """A registry over statistics that the test sets, read as Prometheus reads it."""

    def __init__(self) -> None:
        self.statistics: dict[int, EngineStatistics] = {}
        self.registry, self.requests = make_registry("a model", lambda: self.statistics)

    def scrape(self) -> dict[str, Metric]:
        text = generate_latest(self.registry).decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        samples = [sample for family in self.scrape().values() for sample in family.samples if sample.name == name]
        chosen = [sample for sample in samples if labels.items() <= sample.labels.items()]
        assert chosen, f"no {name} with {labels}"
        return sum(sample.value for sample in chosen)


def test_names_and_types() -> None:
    metrics = Metrics()
    metrics.statistics[0] = EngineStatistics(steps={"decode/engaged": 1})
    families = {name: family.type for name, family in metrics.scrape().items() if not name.endswith("_created")}
    assert {name for name, kind in families.items() if kind == "gauge"} == GAUGES
    assert {name for name, kind in families.items() if kind == "counter"} == COUNTERS
    assert {name for name, kind in families.items() if kind == "histogram"} == HISTOGRAMS
    for family in metrics.scrape().values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "a model"


def test_engines_totals_are_read_at_the_scrape() -> None:
    metrics = Metrics()
    metrics.statistics = {
        0: EngineStatistics(
            num_running=3,
            num_waiting=2,
            kv_usage=0.25,
            prefix_queries=40,
            prefix_hits=16,
            prompt_tokens=24,
            generation_tokens=7,
            preemptions=1,
            num_drafts=3,
            drafted_tokens=9,
            accepted_tokens=4,
            accepted_per_position=(3, 1),
            steps={"decode/engaged": 5, "decode/below_decode_threshold": 2, "mixed/peer_declined": 1},
            traced_steps=2,
            communication_s=0.5,
            hidden_s=0.375,
            exposed_s=0.125,
            handoff_wait_s=0.0625,
        ),
        1: EngineStatistics(num_running=1),
    }
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 40,
        "vllm:prefix_cache_hits_total": 16,
        "vllm:prompt_tokens_total": 24,
        "vllm:generation_tokens_total": 7,
        "vllm:num_preemptions_total": 1,
        "vllm:spec_decode_num_drafts_total": 3,
        "vllm:spec_decode_num_draft_tokens_total": 9,
        "vllm:spec_decode_num_accepted_tokens_total": 4,
        "ubatch:traced_steps_total": 2,
        "ubatch:communication_seconds_total": 0.5,
        "ubatch:communication_hidden_seconds_total": 0.375,
        "ubatch:communication_exposed_seconds_total": 0.125,
        "ubatch:handoff_wait_seconds_total": 0.0625,
    }
    for name, value in expected.items():
        assert metrics.value(name, engine="0") == value
    for place, value in enumerate((3, 1)):
        assert metrics.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) == value
    assert metrics.value("vllm:num_requests_running") == 4
    assert metrics.value("ubatch:steps_total", engine="0", mode="decode") == 7
    assert metrics.value("ubatch:steps_total", mode="decode", outcome="engaged") == 5
    assert metrics.value("ubatch:steps_total", mode="mixed", outcome="peer_declined") == 1
    metrics.statistics[1] = EngineStatistics(num_running=6)
    assert metrics.value("vllm:num_requests_running", engine="1") == 6


def test_times_of_requests() -> None:
    now = [100.0]
    metrics = Metrics()
    metrics.registry = CollectorRegistry()
    requests: RequestObserver = RequestMetrics("timed", metrics.registry, clock=lambda: now[0])

    requests.started("a", 12)
    now[0] += 0.5
    requests.tokens("a", 2)  # both belong to the first step: the second comes 0 s after the first
    now[0] += 0.3
    requests.tokens("a", 3)  # evenly since: 0.1 s each
    requests.drafts("a", DraftCounts(1, 3, 2))
    requests.drafts("a", DraftCounts(1, 3, 1))
    now[0] += 0.05
    requests.finished("a", "length")

    def histogram(name: str) -> tuple[float, float]:
        labels = {"model_name": "timed"}
        return metrics.value(f"{name}_count", **labels), metrics.value(f"{name}_sum", **labels)

    assert histogram("vllm:time_to_first_token_seconds") == (1, pytest.approx(0.5))
    assert histogram("vllm:inter_token_latency_seconds") == (5 - 1, pytest.approx(0.3))
    assert histogram("vllm:e2e_request_latency_seconds") == (1, pytest.approx(0.85))
    assert histogram("vllm:request_prompt_tokens") == (1, 12)
    assert histogram("vllm:request_generation_tokens") == (1, 5)
    assert histogram("ubatch:request_mean_accepted_length") == (1, 2.5)
    assert metrics.value("vllm:request_success_total", finished_reason="length") == 1
    first_tokens = metrics.scrape()["vllm:time_to_first_token_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in first_tokens if sample.name.endswith("_bucket")}
    assert (buckets["0.2"], buckets["0.5"], buckets["+Inf"]) == (0, 1, 1)


def test_cut_off_requests_are_counted_but_not_timed() -> None:
    metrics = Metrics()
    for name, reason in (("a", "abort"), ("b", "error"), ("c", "stop")):
        metrics.requests.started(name, 1)
        metrics.requests.tokens(name, 1)
        metrics.requests.finished(name, reason)
        assert metrics.value("vllm:request_success_total", finished_reason=reason) == 1
    assert metrics.value("vllm:e2e_request_latency_seconds_count") == 1
    assert metrics.value("ubatch:request_mean_accepted_length_count") == 0  # nothing was guessed
    assert len(metrics.requests._alive) == 0


def test_a_server_without_statistics_yet_has_all_names() -> None:
    names = Metrics().scrape()
    assert {*GAUGES, *COUNTERS, *HISTOGRAMS} <= {*names}


@pytest.mark.parametrize("variable", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
@pytest.mark.parametrize("exists", [True, False])
def test_files_for_several_processes_are_not_needed(variable: str, exists: bool, tmp_path: Path) -> None:
    """prometheus_client reads the variable when it is imported."""
    folder = tmp_path / "metrics"
    if exists:
        folder.mkdir()
    code = (
        "from prometheus_client import generate_latest; from serving.metrics import make_registry\n"
        "registry, requests = make_registry('m', dict)\n"
        "requests.started('a', 1); requests.tokens('a', 2); requests.finished('a', 'stop')\n"
        "text = generate_latest(registry).decode()\n"
        "assert 'vllm:request_generation_tokens_sum{model_name=\"m\"} 2.0' in text, text\n"
        'assert \'vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0\' in text, text\n'
    )
    environment = {**os.environ, variable: str(folder)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not exists or not list(folder.iterdir())


# -- logs --------------------------------------------------------------------------------------------------------


def test_log_lines() -> None:
    stream = io.StringIO()
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        configure_logging("info", "rank 1", stream)
        configure_logging("info", "rank 1", stream)  # once more is not twice
        logger = logging.getLogger("serving.something")
        log_event(logger, "engine ready", blocks=8, memory="256 MiB", share=1 / 3, none=None, quote='a"b', empty="")
        log_event(logger, "unheard", level=logging.DEBUG)
        logging.getLogger("uvicorn.error").info("unheard")
        logging.getLogger("uvicorn.error").warning("heard")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
        for name in ("ubatch", "moe", "attention", "model_runner", "serving"):
            logging.getLogger(name).setLevel(logging.NOTSET)
    first, second = stream.getvalue().splitlines()
    assert first[24:] == ('INFO    rank 1 engine ready blocks=8 memory="256 MiB" share=0.333333 quote="a\\"b" empty=""')
    assert first[:10].count("-") == 2
    assert second.endswith("WARNING rank 1 heard")
