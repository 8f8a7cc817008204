"""Layers whose shapes differ (windows, sinks, key/value heads): a back end for each shape.

    window 128, 8 key/value heads, sinks    back end 0, plan 0    layers 1, 2, 3, ...
    no window, 4 key/value heads            back end 1, plan 1    layers 0, 5, 11, ...

So a step makes as many plans as there are shapes, and every back end that serves each shape serves such models. Layers
with equal key/value heads share a cache (`LayersKVCache`), in which a back end finds them by their place. All layers
keep all keys and values, also those that their window has left behind.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attention.interface import AttentionBackend, AttentionPlan, GraphLimits
from attention.metadata import CommonAttentionMetadata
from ubatch.kernels import this_thread


class LayersPlan:
    """The plans of all shapes; an `AttentionPlan`, and `ubatch.kernels.recording.Rebinds` if they all are.

    Args:
        plans: one for each shape.
        layers: for every layer: the number of its plan, and the layer's place in the cache of that plan's back end.
    """

    def __init__(self, plans: Sequence[Any], layers: Sequence[tuple[int, int]]) -> None:
        self.plans = plans
        self._of_layer: list[tuple[AttentionPlan, int]] = [(plans[shape], place) for shape, place in layers]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None) -> Tensor:
        """See `AttentionPlan.forward`."""
        plan, place = self._of_layer[layer]
        out = plan.forward(q, k, v, place, sinks)
        if place != layer and this_thread.recording is not None:  # the plan noted its own number of the layer
            this_thread.recording.mark_rebound(layer)
        return out

    @property
    def repeats(self) -> int | None:
        """See `Rebinds`."""
        rows = {getattr(plan, "repeats", None) for plan in self.plans}
        return rows.pop() if len(rows) == 1 else None

    def rebound(self, layer: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """See `Rebinds`."""
        plan: Any
        plan, place = self._of_layer[layer]
        rebound: tuple[Any, ...] = plan.rebound(place, arguments)
        return rebound


class LayersBackend:
    """An `AttentionBackend` of several, one per shape.

    Args:
        backends: one for each shape, all of one class; not empty.
        layers: see `LayersPlan`.
    """

    def __init__(self, backends: Sequence[AttentionBackend], layers: Sequence[tuple[int, int]]) -> None:
        self.name, self.traits = backends[0].name, backends[0].traits
        self._backends, self._layers = tuple(backends), tuple(layers)

    @property
    def nbytes(self) -> int:
        """See `AttentionBackend`."""
        return sum(backend.nbytes for backend in self._backends)

    def plan(self, metadata: CommonAttentionMetadata) -> LayersPlan:
        """See `AttentionBackend`."""
        return LayersPlan([backend.plan(metadata) for backend in self._backends], self._layers)

    def init_graph_buffers(self, limits: GraphLimits) -> None:
        """See `AttentionBackend`."""
        for backend in self._backends:
            backend.init_graph_buffers(limits)

    def plan_for_graph(self, metadata: CommonAttentionMetadata) -> LayersPlan:
        """See `AttentionBackend`."""
        return LayersPlan([backend.plan_for_graph(metadata) for backend in self._backends], self._layers)

    def replan(self, plan: LayersPlan, metadata: CommonAttentionMetadata) -> None:
        """See `AttentionBackend`."""
        for backend, own in zip(self._backends, plan.plans, strict=True):
            backend.replan(own, metadata)
