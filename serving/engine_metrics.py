"""Metrics of the engines together, read at the scrape: their KV caches, how often they were started again, how evenly
they share the load of the experts, and how experts move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from moe.balance import LoadKind
from serving.balance import Balancer, ExpertBalance
from serving.metrics import Family

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


class Restarted(Protocol):
    """What `show_restarts` reads of an `EngineClient`."""

    @property
    def pause(self) -> object | None: ...
    @property
    def restarts(self) -> Mapping[str, int]: ...
    @property
    def resumed(self) -> int: ...
    @property
    def poisonous(self) -> int: ...


def show_restarts(registry: CollectorRegistry, model_name: str, engines: Restarted) -> None:
    """Put the metrics of engines that are started again into a registry.

    Args:
        model_name: the label that every metric has.
    """

    def read() -> Iterator[Family]:
        restarts = CounterMetricFamily(
            "ubatch:engine_restarts",
            "Times that failed engines were started again, by how one of them had failed.",
            labels=["model_name", "reason"],
        )
        for reason, count in engines.restarts.items():
            restarts.add_metric([model_name, reason], count)
        paused = GaugeMetricFamily(
            "ubatch:engines_paused", "1 while the engines are started again.", labels=["model_name"]
        )
        paused.add_metric([model_name], engines.pause is not None)
        resumed = CounterMetricFamily(
            "ubatch:requests_resumed", "Times that a request went on after a restart.", labels=["model_name"]
        )
        resumed.add_metric([model_name], engines.resumed)
        poisonous = CounterMetricFamily(
            "ubatch:requests_poisonous",
            "Requests that were ended because they had killed an engine while they ran alone.",
            labels=["model_name"],
        )
        poisonous.add_metric([model_name], engines.poisonous)
        yield from (restarts, paused, resumed, poisonous)

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
        steps = GaugeMetricFamily("ubatch:eplb_window_steps", "Steps in that window so far.", labels=["model_name"])
        found = balance()
        if found is None or found.placement.num_ranks == 1:
            return
        for kind in LoadKind:
            of_layers = found.balancedness(kind)
            evenness.add_metric([model_name, kind, "worst"], of_layers.min())
            evenness.add_metric([model_name, kind, "mean"], of_layers.mean())
            for rank, count in enumerate(found.rank_tokens(kind).sum(axis=0)):
                tokens.add_metric([model_name, kind, str(rank)], count)
        steps.add_metric([model_name], found.window.steps)
        yield from (evenness, tokens, steps)

    registry.register(_Read(read))


def show_moves(registry: CollectorRegistry, model_name: str, balancer: Balancer) -> None:
    """Put the metrics of experts that move between ranks into a registry.

    Args:
        model_name: the label that every metric has.
    """

    def read() -> Iterator[Family]:
        begun = CounterMetricFamily(
            "ubatch:eplb_rearrangements", "Times that experts began to move, by why.", labels=["model_name", "reason"]
        )
        failed = CounterMetricFamily(
            "ubatch:eplb_moves_failed",
            "Times that moves were given up, or could not be planned, by why; the experts stay where they are.",
            labels=["model_name", "reason"],
        )
        for family, counts in ((begun, balancer.rearrangements), (failed, balancer.failed)):
            for reason, count in counts.items():
                family.add_metric([model_name, reason], count)
        layers = CounterMetricFamily(
            "ubatch:eplb_layers_moved", "MoE layers that were switched, each time counted.", labels=["model_name"]
        )
        layers.add_metric([model_name], balancer.layers_moved)
        moved = CounterMetricFamily(
            "ubatch:eplb_bytes_moved", "Bytes of weights that ranks have sent each other.", labels=["model_name"]
        )
        moved.add_metric([model_name], balancer.bytes_moved)
        moving = GaugeMetricFamily("ubatch:eplb_moving", "1 while experts move.", labels=["model_name"])
        moving.add_metric([model_name], balancer.moving)
        yield from (begun, failed, layers, moved, moving)

    registry.register(_Read(read))


class _Read(Collector):
    """Metrics that are read at the scrape."""

    def __init__(self, read: Callable[[], Iterator[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        return self._read()
