"""Metrics of the engines together, read at the scrape: their KV caches, how often they were started again, how evenly
they share the load of the experts, and how experts move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moe.balance import LoadKind
from serving.balance import Balancer, ExpertBalance
from serving.engine.client import EngineClient
from serving.metrics import FAMILIES, Family

CACHE_SETTINGS = {
    "block_size": "block_size",
    "kv_cache_dtype": "cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching",
    "gpu_memory_utilization": "gpu_memory_utilization",
}
"""A setting of the KV cache -> its label."""


def show_cache(
    registry: CollectorRegistry, settings: Mapping[str, Any], num_blocks: Callable[[], Sequence[int]]
) -> None:
    """Put `vllm:cache_config_info` into a registry: 1 for each engine, labelled with its KV cache's settings.

    Args:
        settings: has those of `CACHE_SETTINGS`.
        num_blocks: returns the blocks of each engine's KV cache. Engines that were started again may have others.
    """
    labels = [*CACHE_SETTINGS.values(), "num_gpu_blocks", "engine"]
    chosen = [str(settings[name]) for name in CACHE_SETTINGS]

    def info() -> Iterator[Family]:
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of an engine's KV cache.", labels=labels)
        for engine, blocks in enumerate(num_blocks()):
            family.add_metric([*chosen, str(blocks), str(engine)], 1)
        yield family

    registry.register(_Read(info))


def show_restarts(registry: CollectorRegistry, model_name: str, engines: EngineClient) -> None:
    """Put the metrics of engines that are started again into a registry.

    Args:
        model_name: the label that every metric has.
    """

    def read() -> Iterator[Family]:
        text = "Times that failed engines were started again, by how one of them had failed."
        yield _by_reason("ubatch:engine_restarts", text, model_name, engines.restarts)
        text = "1 while the engines are started again."
        yield _one("gauge", "ubatch:engines_paused", text, model_name, engines.pause is not None)
        text = "Times that a request went on after a restart."
        yield _one("counter", "ubatch:requests_resumed", text, model_name, engines.resumed)
        text = "Requests that were ended because they had killed an engine while they ran alone."
        yield _one("counter", "ubatch:requests_poisonous", text, model_name, engines.poisonous)

    registry.register(_Read(read))


def show_balance(registry: CollectorRegistry, model_name: str, balance: Callable[[], ExpertBalance | None]) -> None:
    """Put the metrics of the experts' load over the last window of steps into a registry.

    Args:
        model_name: the label that every metric has.
        balance: returns the load; None if there is none. Nothing is shown of ranks that share no experts.
    """

    def read() -> Iterator[Family]:
        evenness = GaugeMetricFamily(
            "ubatch:eplb_balancedness",
            "Mean over maximum of the tokens that the ranks' experts computed in the last window of steps, by the kind "
            "of step, in the worst MoE layer and as the mean over layers; 1 is perfect.",
            labels=["model_name", "kind", "layer"],
        )
        tokens = GaugeMetricFamily(
            "ubatch:eplb_rank_tokens",
            "Tokens that a rank's experts computed in the last window of steps, all MoE layers together.",
            labels=["model_name", "kind", "rank"],
        )
        found = balance()
        if found is None or found.placement.num_ranks == 1:
            return
        for kind in LoadKind:
            of_layers = found.balancedness(kind)
            evenness.add_metric([model_name, kind, "worst"], of_layers.min())
            evenness.add_metric([model_name, kind, "mean"], of_layers.mean())
            for rank, count in enumerate(found.rank_tokens(kind).sum(axis=0)):
                tokens.add_metric([model_name, kind, str(rank)], count)
        yield from (evenness, tokens)
        text = "Steps in that window so far."
        yield _one("gauge", "ubatch:eplb_window_steps", text, model_name, found.window.steps)

    registry.register(_Read(read))


def show_moves(registry: CollectorRegistry, model_name: str, balancer: Balancer) -> None:
    """Put the metrics of experts that move between ranks into a registry.

    Args:
        model_name: the label that every metric has.
    """

    def read() -> Iterator[Family]:
        text = "Times that experts began to move, by why."
        yield _by_reason("ubatch:eplb_rearrangements", text, model_name, balancer.rearrangements)
        text = "Times that moves were given up, or could not be planned, by why; the experts stay where they are."
        yield _by_reason("ubatch:eplb_moves_failed", text, model_name, balancer.failed)
        text = "MoE layers that were switched, each time counted."
        yield _one("counter", "ubatch:eplb_layers_moved", text, model_name, balancer.layers_moved)
        text = "Bytes of weights that ranks have sent each other."
        yield _one("counter", "ubatch:eplb_bytes_moved", text, model_name, balancer.bytes_moved)
        yield _one("gauge", "ubatch:eplb_moving", "1 while experts move.", model_name, balancer.moving)

    registry.register(_Read(read))


def _one(kind: str, name: str, text: str, model_name: str, value: float) -> Family:
    """A metric that has the model's name as its only label."""
    family = FAMILIES[kind](name, text, labels=["model_name"])
    family.add_metric([model_name], value)
    return family


def _by_reason(name: str, text: str, model_name: str, counts: Mapping[str, int]) -> Family:
    """A counter that has a reason as its label, too."""
    family = CounterMetricFamily(name, text, labels=["model_name", "reason"])
    for reason, count in counts.items():
        family.add_metric([model_name, reason], count)
    return family


class _Read(Collector):
    """Metrics that are read at the scrape."""

    def __init__(self, read: Callable[[], Iterator[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        return self._read()
