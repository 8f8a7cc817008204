"""Layers with windows that differ, such as every other layer of gpt-oss: a back end for each window, over one KV cache.

    window 128    back end 0, plan 0    layers 0, 2, 4, ...
    None          back end 1, plan 1    layers 1, 3, 5, ...

So a step makes as many plans as there are windows, and every back end with windows serves such models. All layers keep
all keys and values, also those that their window has left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attention.interface import AttentionBackend, AttentionPlan, GraphLimits
from attention.metadata import CommonAttentionMetadata

__all__ = ["WindowsBackend", "WindowsPlan"]


class WindowsPlan:
    """The plans of all windows; an `AttentionPlan`, and `ubatch.kernels.recording.Rebinds` if they all are.

    Args:
        plans: by window.
        windows: the window of every layer.
    """

    def __init__(self, plans: Mapping[int | None, Any], windows: Sequence[int | None]) -> None:
        self.plans = plans
        self._of_layer: list[AttentionPlan] = [plans[window] for window in windows]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`."""
        return self._of_layer[layer].forward(q, k, v, layer, sinks)

    @property
    def repeats(self) -> int | None:
        """See `Rebinds`."""
        rows = {getattr(plan, "repeats", None) for plan in self.plans.values()}
        return rows.pop() if len(rows) == 1 else None

    def rebound(self, layer: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `Rebinds`."""
        plan: Any = self._of_layer[layer]
        rebound: tuple[Any, ...] = plan.rebound(layer, arguments)
        return rebound


class WindowsBackend:
    """An `AttentionBackend` of several, one per window.

    Args:
        windows: the window of every layer.
        by_window: the back ends, all of one class; not empty.
    """

    def __init__(self, windows: Sequence[int | None], by_window: Mapping[int | None, AttentionBackend]) -> None:
        first = next(iter(by_window.values()))
        self.name, self.traits = first.name, first.traits
        self._windows, self._by_window = tuple(windows), dict(by_window)

    @property
    def nbytes(self) -> int:
        """See `AttentionBackend`."""
        return sum(backend.nbytes for backend in self._by_window.values())

    def plan(self, metadata: CommonAttentionMetadata) -> WindowsPlan:
        """See `AttentionBackend`."""
        return self._plan({window: backend.plan(metadata) for window, backend in self._by_window.items()})

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """See `AttentionBackend`."""
        for backend in self._by_window.values():
            backend.init_graph_buffers(limits)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> WindowsPlan:
        """See `AttentionBackend`."""
        return self._plan({window: backend.plan_for_graph(metadata) for window, backend in self._by_window.items()})

    def replan(self, plan: WindowsPlan, metadata: CommonAttentionMetadata) -> None:
        """See `AttentionBackend`."""
        for window, backend in self._by_window.items():
            backend.replan(plan.plans[window], metadata)

    def _plan(self, plans: Mapping[int | None, Any]) -> WindowsPlan:
        return WindowsPlan(plans, self._windows)
