"""What `/metrics` says: names that vLLM's dashboards ask for, and values that were put in.

A metric of an engine is declared where its field is, in `serving/requests.py`; one that nothing counts fails here.
"""

import ast
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_clients import ASKS, CHAT, MODEL, app_of, call, complete, post
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry, generate_latest, make_asgi_app
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from repository import ROOT

from model_runner import SamplingParams
from moe import ExpertPlacement
from serving.api.request_log import HttpMetrics, RequestLog
from serving.balance import LoadBook
from serving.engine.restarts import Pause, RestartReason
from serving.engine_metrics import show_balance, show_cache, show_restarts
from serving.logs import configure_logging, log_event
from serving.metrics import _DERIVED, RequestMetrics, Siblings, make_registry
from serving.requests import (
    STEP_TOKENS,
    DraftCounts,
    EngineStatistics,
    Metric,
    Observed,
    RequestInput,
    StartTimes,
    _counter,
)

pytestmark = pytest.mark.long

NAMES = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prefix_cache_queries
vllm:prefix_cache_hits vllm:prompt_tokens vllm:generation_tokens vllm:num_preemptions vllm:corrupted_requests
vllm:spec_decode_num_drafts vllm:spec_decode_num_draft_tokens vllm:spec_decode_num_accepted_tokens
vllm:spec_decode_num_accepted_tokens_per_pos vllm:request_success vllm:time_to_first_token_seconds
vllm:inter_token_latency_seconds vllm:e2e_request_latency_seconds vllm:request_prompt_tokens
vllm:request_generation_tokens vllm:iteration_tokens_total vllm:request_queue_time_seconds
vllm:request_prefill_time_seconds vllm:request_decode_time_seconds vllm:request_inference_time_seconds
vllm:request_time_per_output_token_seconds vllm:request_max_num_generation_tokens vllm:request_params_n
vllm:request_params_max_tokens vllm:request_prefill_kv_computed_tokens vllm:prompt_tokens_cached ubatch:steps
ubatch:graph_replays ubatch:traced_steps ubatch:communication_seconds
ubatch:communication_hidden_seconds ubatch:communication_exposed_seconds ubatch:handoff_wait_seconds
ubatch:request_mean_accepted_length
"""
"""What dashboards ask for; a new metric need not be here."""
CACHE = "vllm:cache_config_info"
RESTARTED = {"ubatch:engine_restarts", "ubatch:engines_paused", "ubatch:requests_resumed", "ubatch:requests_poisonous"}
BALANCE = {"ubatch:eplb_balancedness", "ubatch:eplb_rank_tokens", "ubatch:eplb_window_steps"}
MOVES = {f"ubatch:eplb_{name}" for name in ("rearrangements", "moves_failed", "layers_moved", "bytes_moved", "moving")}
DASHBOARDS = ROOT / "tests" / "support" / "vllm_dashboards.txt"


def declared(kind: type[EngineStatistics] = EngineStatistics) -> dict[str, Metric]:
    """Field -> its metric."""
    return {each.name: each.metadata[Metric] for each in fields(kind) if Metric in each.metadata}


def uncounted(kind: type[EngineStatistics]) -> set[str]:
    """Declared metrics that nothing in the product assigns, adds to, or passes on by name."""
    filled: set[str] = set()
    for file in (ROOT / "serving").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                filled.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                filled.add(node.arg)
    return declared(kind).keys() - filled


class Metrics:
    """A registry over statistics that the test sets, read as Prometheus reads it."""

    def __init__(self) -> None:
        self.statistics: dict[int, EngineStatistics] = {}
        self.registry, self.requests = make_registry("a model", lambda: self.statistics)

    def scrape(self) -> dict[str, Family]:
        text = generate_latest(self.registry).decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        samples = [sample for family in self.scrape().values() for sample in family.samples if sample.name == name]
        chosen = [sample for sample in samples if labels.items() <= sample.labels.items()]
        assert chosen, f"no {name} with {labels}"
        return sum(sample.value for sample in chosen)


def test_every_declared_metric_is_counted_somewhere() -> None:
    @dataclass
    class WithAnother(EngineStatistics):
        wishes_heard: int = _counter("ubatch:wishes_heard", "Nothing counts them yet.")

    assert uncounted(EngineStatistics) == set()
    assert uncounted(WithAnother) == {"wishes_heard"}


def test_names_and_types() -> None:
    """All names are there from the start, before any engine has told anything."""
    families = {name: family for name, family in Metrics().scrape().items() if not name.endswith("_created")}
    assert {*NAMES.split()} <= families.keys()
    assert all(name.startswith(("vllm:", "ubatch:")) for name in families)
    for metric in declared().values():
        assert (families[metric.name].type, families[metric.name].documentation) == (metric.kind, metric.text)
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`((?:vllm|ubatch):\w+)`", page.read_text(encoding="utf-8")):
            known = {*families, CACHE, *RESTARTED, *BALANCE, *MOVES}
            assert {name, name.removesuffix("_total")} & known, page


def test_engines_totals_are_read_at_the_scrape() -> None:
    metrics = Metrics()
    plain = [name for name, metric in declared().items() if not metric.labels and metric.kind != "histogram"]
    first: dict[str, Any] = {name: number + 0.5 for number, name in enumerate(plain, 1)}
    of_labels = {"accepted_per_position": (3, 1), "steps": {"decode/engaged": 5, "decode/declined": 2, "mixed/a/b": 1}}
    sizes = Observed(STEP_TOKENS)
    for size in (1, 1, 1, 1, 12, 20_000, 20_000):
        sizes.add(size)
    told = EngineStatistics(**first, **of_labels, step_tokens=sizes.told)  # type: ignore[arg-type]
    metrics.statistics = {0: told, 1: EngineStatistics(num_running=1)}
    for name in plain:
        metric = declared()[name]
        sample = metric.name + ("_total" if metric.kind == "counter" else "")
        assert metrics.value(sample, engine="0", model_name="a model") == first[name]
    for bound, count in (("1.0", 4), ("8.0", 4), ("16.0", 5), ("16384.0", 5), ("+Inf", 7)):
        assert metrics.value("vllm:iteration_tokens_total_bucket", engine="0", le=bound) == count
    assert metrics.value("vllm:iteration_tokens_total_sum", engine="0") == 40016.0
    assert metrics.value("vllm:iteration_tokens_total_count") == 7
    for place, value in enumerate((3, 1)):
        assert metrics.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place)) == value
    assert metrics.value("vllm:num_requests_running") == first["num_running"] + 1
    for labels, steps in (({}, 7), ({"outcome": "engaged"}, 5), ({"mode": "mixed", "outcome": "a/b"}, 1)):
        assert metrics.value("ubatch:steps_total", engine="0", **{"mode": "decode", **labels}) == steps
    metrics.statistics[1] = EngineStatistics(num_running=6)
    assert metrics.value("vllm:num_requests_running", engine="1") == 6


def request(name: str, prompt_tokens: int = 1, max_tokens: int = 16) -> RequestInput:
    return RequestInput(name, [1] * prompt_tokens, SamplingParams(max_tokens=max_tokens))


def test_times_of_requests() -> None:
    now = [100.0]
    metrics = Metrics()
    metrics.registry = CollectorRegistry()
    requests = RequestMetrics("timed", metrics.registry, clock=lambda: now[0])

    requests.started(request("a", 12, 40))
    now[0] += 0.5
    requests.tokens("a", 2)  # both belong to the first step: the second comes 0 s after the first
    requests.began("a", 8, StartTimes(0.3, 0.15))
    now[0] += 0.3
    requests.tokens("a", 3)  # evenly since: 0.1 s each
    requests.drafts("a", DraftCounts(1, 3, 2))
    requests.drafts("a", DraftCounts(1, 3, 1))
    now[0] += 0.05
    requests.finished("a", "length")

    def histogram(name: str) -> tuple[float, float]:
        labels = {"model_name": "timed"}
        return metrics.value(f"{name}_count", **labels), metrics.value(f"{name}_sum", **labels)

    for name, count, total in (
        ("vllm:time_to_first_token_seconds", 1, 0.5),
        ("vllm:inter_token_latency_seconds", 5 - 1, 0.3),
        ("vllm:e2e_request_latency_seconds", 1, 0.85),
        ("vllm:request_queue_time_seconds", 1, 0.3),
        ("vllm:request_prefill_time_seconds", 1, 0.15),
        ("vllm:request_decode_time_seconds", 1, 0.3),
        ("vllm:request_inference_time_seconds", 1, 0.15 + 0.3),
        ("vllm:request_time_per_output_token_seconds", 1, 0.3 / 4),
        ("vllm:request_prompt_tokens", 1, 12),
        ("vllm:request_prefill_kv_computed_tokens", 1, 12 - 8),
        ("vllm:request_generation_tokens", 1, 5),
        ("vllm:request_max_num_generation_tokens", 1, 5),
        ("vllm:request_params_max_tokens", 1, 40),
        ("vllm:request_params_n", 1, 1),
        ("ubatch:request_mean_accepted_length", 1, 2.5),
    ):
        assert histogram(name) == (count, pytest.approx(total)), name
    assert metrics.value("vllm:request_success_total", finished_reason="length") == 1
    first_tokens = metrics.scrape()["vllm:time_to_first_token_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in first_tokens if sample.name.endswith("_bucket")}
    assert (buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (0, 1, 1)


def test_cut_off_requests_are_counted_but_not_timed() -> None:
    metrics = Metrics()
    for name, reason in (("a", "abort"), ("b", "error"), ("c", "stop")):
        metrics.requests.started(request(name))
        metrics.requests.tokens(name, 1)
        metrics.requests.finished(name, reason)
        assert metrics.value("vllm:request_success_total", finished_reason=reason) == 1
    for name in ("e2e_request_latency_seconds", "request_params_n", "request_decode_time_seconds"):
        assert metrics.value(f"vllm:{name}_count") == 1
    assert metrics.value("vllm:request_time_per_output_token_seconds_count") == 0  # there is one token
    assert metrics.value("vllm:request_queue_time_seconds_count") == 0  # no engine has told it
    assert metrics.value("ubatch:request_mean_accepted_length_count") == 0  # nothing was guessed
    assert len(metrics.requests._alive) == 0


@pytest.mark.parametrize(
    ("reasons", "counted"), [(("stop", "length"), 1), (("stop", "abort"), 0), (("error", "stop"), 0)]
)
def test_a_prompts_outputs_count_once_with_the_longest(reasons: Sequence[str], counted: int) -> None:
    metrics, siblings = Metrics(), Siblings(2)
    for place, _ in enumerate(reasons):
        metrics.requests.started(request(str(place)), siblings)
        metrics.requests.tokens(str(place), 7 - place)
    for place, reason in enumerate(reasons):
        assert metrics.value("vllm:request_params_n_count") == 0
        metrics.requests.finished(str(place), reason)
    assert metrics.value("vllm:request_params_n_count") == counted
    assert metrics.value("vllm:request_params_n_sum") == 2 * counted
    assert metrics.value("vllm:request_max_num_generation_tokens_sum") == 7 * counted


# -- over HTTP ---------------------------------------------------------------------------------------------------


def http_app(engine: FakeEngine, metrics: Metrics) -> Any:
    """The application, with its metrics as a server has them."""
    settings = {
        "block_size": 16,
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": True,
        "gpu_memory_utilization": None,
    }
    show_cache(metrics.registry, settings, lambda: (512, 500))
    show_restarts(metrics.registry, "a model", engine)
    book = LoadBook(ExpertPlacement.default(2, 2, 2))
    book.add(0, 3, np.array([[[30, 10], [5, 5]], [[1, 1], [0, 2]]]))
    show_balance(metrics.registry, "a model", book.balance)
    around = partial(RequestLog, count=HttpMetrics(metrics.registry).count)
    return app_of(engine, observer=metrics.requests, around=around, metrics_app=make_asgi_app(metrics.registry))


@pytest.mark.wide
def test_vllms_dashboards_find_what_they_ask_for() -> None:
    metrics = Metrics()
    metrics.statistics = {0: EngineStatistics(accepted_per_position=(1,))}
    app = http_app(FakeEngine(tokens_per_step=2), metrics)
    complete(app, {"max_tokens": 4, "n": 2})
    post(app, "/v1/completions", {"model": MODEL, "prompt": "Hello", "structured_outputs": {"regex": "a("}})
    asked = [line for line in DASHBOARDS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(asked) > 40
    for line in asked:
        name, *label = re.split("[{}]", line)
        labels = dict(pair.split("=") for pair in label[:1])
        own = {} if name.startswith("http") else {"model_name": "a model"}
        metrics.value(name, **own, **{key: value.strip('"') for key, value in labels.items()})
    engines = {metric.name for metric in declared().values()} | {metric.name for metric, _ in _DERIVED}
    for name, family in metrics.scrape().items():
        assert name in engines | RESTARTED or any(sample.value for sample in family.samples), f"nothing counts {name}"
    first_engine = {"block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "True", "engine": "0"}
    assert metrics.value(CACHE, **first_engine, gpu_memory_utilization="None", num_gpu_blocks="512") == 1
    assert metrics.value(CACHE, engine="1", num_gpu_blocks="500") == 1
    assert metrics.value("vllm:request_params_n_sum") == 2
    assert 'vllm:request_params_n_sum{model_name="a model"} 2.0' in call(app, "GET", "/metrics").text.splitlines()


def test_what_follows_from_the_engines_totals() -> None:
    metrics = Metrics()
    metrics.statistics = {0: EngineStatistics(num_waiting=3, prompt_tokens=50, prompt_tokens_cached=16)}
    for name, labels, value in (
        ("num_requests_waiting_by_reason", {"reason": "capacity"}, 3),
        ("prompt_tokens_by_source_total", {"source": "local_compute"}, 34),
        ("prompt_tokens_by_source_total", {"source": "local_cache_hit"}, 16),
        ("engine_sleep_state", {"sleep_state": "awake"}, 1),
    ):
        assert metrics.value(f"vllm:{name}", engine="0", **labels) == value


def test_restarts_are_read_at_the_scrape() -> None:
    metrics, engine = Metrics(), FakeEngine()
    http_app(engine, metrics)

    def read() -> dict[str, float]:
        samples = [sample for name in RESTARTED for sample in metrics.scrape()[name].samples]
        return {sample.labels.get("reason", sample.name.removeprefix("ubatch:")): sample.value for sample in samples}

    nothing = {"engines_paused": 0, "requests_resumed_total": 0, "requests_poisonous_total": 0}
    assert read() == {**dict.fromkeys(RestartReason, 0), **nothing}
    engine.pause = Pause("rank 1 was killed by SIGKILL.", 0.0, 10.0)
    engine.restarts |= {RestartReason.KILLED: 2, RestartReason.HUNG: 1}
    engine.resumed, engine.poisonous = 64, 1
    some = {"engines_paused": 1, "requests_resumed_total": 64, "requests_poisonous_total": 1}
    assert read() == {**dict.fromkeys(RestartReason, 0), "killed": 2, "hung": 1, **some}
    assert metrics.value("ubatch:engine_restarts_total", model_name="a model", reason="killed") == 2


def test_the_balance_of_the_experts_is_read_at_the_scrape() -> None:
    metrics = Metrics()
    http_app(FakeEngine(), metrics)
    for kind, worst, mean, tokens in (
        ("all", 21 / 31, (21 / 31 + 6 / 7) / 2, (36, 18)),
        ("prefill", 20 / 30, (20 / 30 + 1) / 2, (35, 15)),
        ("decode", 0.5, 0.75, (1, 3)),
    ):
        for layer, value in (("worst", worst), ("mean", mean)):
            name = "ubatch:eplb_balancedness"
            assert metrics.value(name, kind=kind, layer=layer, model_name="a model") == pytest.approx(value)
        for rank, count in enumerate(tokens):
            assert metrics.value("ubatch:eplb_rank_tokens", kind=kind, rank=str(rank)) == count
    assert metrics.value("ubatch:eplb_window_steps", model_name="a model") == 3


@pytest.mark.parametrize(
    "book", [None, LoadBook(ExpertPlacement.default(2, 2, 1))], ids=["dense", "each rank has all experts"]
)
def test_ranks_that_share_no_experts_have_no_balance(book: LoadBook | None) -> None:
    metrics = Metrics()
    show_balance(metrics.registry, "a model", lambda: None if book is None else book.balance())
    assert not BALANCE & metrics.scrape().keys()


def test_the_page_about_metrics_has_all_of_them() -> None:
    metrics = Metrics()
    http_app(FakeEngine(), metrics)
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for name in metrics.scrape() if not name.endswith("_created")}
    told |= {name if name == "ubatch:eplb_moving" else f"{name}_total" for name in MOVES}  # tests/serving/balance
    assert set(re.findall(r"`([a-z0-9_:]+)`", "".join(rows))) == told


@pytest.mark.parametrize(
    ("method", "path", "body", "handler", "status"),
    [
        ("POST", "/v1/completions", {"prompt": "a"}, "/v1/completions", "2xx"),
        ("POST", "/v1/completions", {"prompt": "a", "top_p": 7}, "/v1/completions", "4xx"),
        ("POST", "/v1/completions", {"prompt": "a", "model": "x"}, "/v1/completions", "4xx"),
        ("GET", "/v1/models/tiny", None, "/v1/models/{model:path}", "2xx"),
        ("GET", "/v1/models/other", None, "/v1/models/{model:path}", "4xx"),
        ("GET", "/nowhere", None, "none", "4xx"),
        ("POST", CHAT, ASKS[CHAT], CHAT, "5xx"),
    ],
)
def test_http_requests_are_counted_by_route_and_status(
    method: str, path: str, body: Any, handler: str, status: str
) -> None:
    metrics = Metrics()
    engine = FakeEngine(fail_after=0, failure=RuntimeError()) if status == "5xx" else FakeEngine()
    app = http_app(engine, metrics)
    call(app, method, path, json=body)
    for unseen in ("/health", "/live", "/metrics", "/ping", "/version"):
        call(app, "GET", unseen)
    assert metrics.value("http_requests_total") == 1
    assert metrics.value("http_requests_total", handler=handler, method=method, status=status) == 1
    assert metrics.value("http_request_duration_seconds_count", handler=handler, method=method) == 1
    assert metrics.value("http_request_duration_highr_seconds_count") == 1


def test_a_clients_own_method_is_no_label() -> None:
    metrics = Metrics()
    call(http_app(FakeEngine(), metrics), "BREW", "/v1/models")
    assert metrics.value("http_requests_total", method="none", status="4xx") == 1


@pytest.mark.wide
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
        "from serving.requests import RequestInput, SamplingParams\n"
        "requests.started(RequestInput('a', [1], SamplingParams()))\n"
        "requests.tokens('a', 2); requests.finished('a', 'stop')\n"
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
