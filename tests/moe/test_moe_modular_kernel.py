"""The layer's order of events, in every schedule, and its results against the plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_layers import Layer, Routed, make_layer
from torch import Tensor, nn

from moe import All2All, All2AllTraits, Dispatched, FusedMoEModularKernel, SoftmaxTopKRouter, make_all2all, make_experts
from ubatch import (
    ConfigError,
    Recv,
    Schedule,
    SharedExpert,
    Transfer,
    UBatchConfig,
    UBatchWrapper,
    dbo_current_ubatch_id,
    get_schedule,
)


class Events(list[str]):
    """What happened, with the lane in which it did."""

    def note(self, what: str) -> None:
        self.append(f"{dbo_current_ubatch_id()} {what}")


class WatchedAll2All(All2All[None]):
    """`local`, telling when something is launched and when it is waited for."""

    def __init__(self, num_experts: int, events: Events, traits: dict[str, int] | None = None) -> None:
        self.inner = make_all2all("local", group=None, num_experts=num_experts)
        self.num_experts, self.experts = self.inner.num_experts, self.inner.experts
        self.traits: All2AllTraits = replace(self.inner.traits, **(traits or {}))
        self.events = lambda: events  # a function is no state of the module, which would be found changed

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[None]]:
        self.events().note("dispatch")
        return self.inner.dispatch(x, topk_ids, topk_weights).map(self._arrived)

    def combine(self, y: Tensor, handle: None) -> Transfer[Tensor]:
        self.events().note("combine")
        return self.inner.combine(y, handle).map(self._returned)

    def _arrived(self, dispatched: Dispatched[None]) -> Dispatched[None]:
        self.events().note("dispatched")
        return dispatched

    def _returned(self, y: Tensor) -> Tensor:
        self.events().note("combined")
        return y


class Watched(nn.Module):
    """A module that tells when it runs."""

    def __init__(self, module: nn.Module, name: str, events: Events) -> None:
        super().__init__()
        self.module, self.name, self.events = module, name, lambda: events
        self.expert_range = getattr(module, "expert_range", range(0))

    def forward(self, *args: Tensor) -> Tensor:
        self.events().note(self.name)
        output: Tensor = self.module(*args)
        return output


class Stack(nn.Module):
    """Residual MoE layers with their own routers: something to wrap."""

    def __init__(self, kernels: list[FusedMoEModularKernel], hidden: int, top_k: int = 2) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(kernels)
        self.gates = nn.ModuleList(nn.Linear(hidden, kernels[0].all2all.num_experts) for _ in kernels)
        self.router = SoftmaxTopKRouter(top_k)

    def forward(self, x: Tensor) -> Tensor:
        for gate, kernel in zip(self.gates, self.kernels, strict=True):
            weights, ids = self.router(gate(x))
            x = x + kernel(x, weights, ids)
        return x


def overlapping(model: nn.Module, schedule: Schedule | str, lanes: int = 2) -> UBatchWrapper:
    config = UBatchConfig(
        verify="off",
        num_ubatches=lanes,
        dbo_prefill_token_threshold=lanes,
        schedule=schedule,
        require_overlap=True,
        timeout_s=10.0,
    )
    return UBatchWrapper(model, config)


@pytest.mark.parametrize("place", list(SharedExpert))
@torch.inference_mode()
def test_the_shared_expert_is_added_wherever_it_runs(place: SharedExpert) -> None:
    layer, events = make_layer(), Events()
    shared = nn.Linear(layer.hidden_size, layer.hidden_size)
    kernel = layer.kernel(
        make_all2all("local", group=None, num_experts=8), shared_experts=Watched(shared, "shared", events)
    )
    model = Stack([kernel], layer.hidden_size)
    x = torch.randn(6, layer.hidden_size)
    plain = model(x)
    weights, ids = model.router(model.gates[0](x))
    torch.testing.assert_close(plain, x + layer.expected(Routed(x, ids, weights)) + shared(x))
    schedule = replace(get_schedule("mlp_shared_overlap"), shared_expert=place)
    torch.testing.assert_close(overlapping(model, schedule)(x), plain)
    assert events == ["0 shared", "0 shared", "1 shared"]


DISPATCHES = ["0 dispatch", "1 dispatch"]
MIDDLE = ["dispatched", "experts", "combine"]
ORDERS = {
    SharedExpert.DISPATCH: [
        *("0 dispatch", "0 shared", "1 dispatch", "1 shared"),
        *(f"{lane} {what}" for lane in (0, 1) for what in MIDDLE),
        *("0 combined", "1 combined"),
    ],
    SharedExpert.COMBINE: [
        *DISPATCHES,
        *(f"{lane} {what}" for lane in (0, 1) for what in [*MIDDLE, "shared"]),
        *("0 combined", "1 combined"),
    ],
    SharedExpert.COMBINE_RETURN: [
        *DISPATCHES,
        *(f"{lane} {what}" for lane in (0, 1) for what in MIDDLE),
        *("0 shared", "0 combined", "1 shared", "1 combined"),
    ],
}


def watched_stack(layer: Layer, events: Events) -> Stack:
    held = make_experts("grouped", layer.w13, layer.w2)
    shared = nn.Linear(layer.hidden_size, layer.hidden_size)
    kernel = FusedMoEModularKernel(
        WatchedAll2All(layer.num_experts, events), Watched(held, "experts", events), Watched(shared, "shared", events)
    )
    return Stack([kernel], layer.hidden_size)


@pytest.mark.parametrize("place", list(SharedExpert))
@torch.inference_mode()
def test_order_of_events_in_lanes(place: SharedExpert) -> None:
    layer, events = make_layer(), Events()
    schedule = replace(get_schedule("mlp_shared_overlap"), shared_expert=place)
    overlapping(watched_stack(layer, events), schedule)(torch.randn(4, layer.hidden_size))
    assert events == ORDERS[place]


@torch.inference_mode()
def test_order_of_events_when_the_peer_receives() -> None:
    """vLLM's order: a lane's transfer is waited for by the next lane, before that one's own launch."""
    layer, events = make_layer(), Events()
    schedule = replace(get_schedule("mlp_shared_overlap"), recv=Recv.PEER)
    overlapping(watched_stack(layer, events), schedule)(torch.randn(4, layer.hidden_size))
    assert events == [
        "0 dispatch",
        *("1 dispatched", "1 dispatch"),  # lane 1 receives for lane 0
        *("0 experts", "0 dispatched", "0 combine", "0 shared"),  # and lane 0 for lane 1
        *("1 experts", "1 combined", "1 combine", "1 shared"),
        "1 combined",  # nobody launches any more: each receives its own
    ]


@torch.inference_mode()
def test_order_of_events_outside_lanes() -> None:
    """The shared expert still runs between combine's launch and its wait."""
    layer, events = make_layer(), Events()
    watched_stack(layer, events)(torch.randn(4, layer.hidden_size))
    assert [event[2:] for event in events] == ["dispatch", *MIDDLE, "shared", "combined"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"x": torch.zeros(1, 5, 12)}, r"\[1, 5, 12\]\. Flatten batch and sequence"),
        ({"weights": torch.zeros(5, 2, dtype=torch.float64)}, r"not torch\.float64 and torch\.int64"),
        ({"ids": torch.zeros(5, 2, dtype=torch.int32)}, r"not torch\.float32 and torch\.int32"),
        ({"weights": torch.zeros(4, 2), "ids": torch.zeros(4, 2, dtype=torch.int64)}, r"must both be \[5, k\]"),
        (
            {"weights": torch.zeros(5, 9), "ids": torch.zeros(5, 9, dtype=torch.int64)},
            "top_k = 9 must be between 1 and the 8 experts",
        ),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Tensor], complaint: str) -> None:
    kernel = make_layer().kernel(make_all2all("local", group=None, num_experts=8))
    given = {"x": torch.zeros(5, 12), "weights": torch.zeros(5, 2), "ids": torch.zeros(5, 2, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=complaint):
        kernel(*(given | changes).values())


def test_experts_that_the_transport_does_not_serve_are_refused() -> None:
    layer = make_layer()
    with pytest.raises(ConfigError, match=r"hold range\(0, 8\), but .* range\(0, 4\)"):
        FusedMoEModularKernel(
            make_all2all("local", group=None, num_experts=4), make_experts("grouped", layer.w13, layer.w2)
        )
    with pytest.raises(ConfigError, match=r"object is no subclass of moe\.All2All\. Inherit from it"):
        FusedMoEModularKernel(object(), make_experts("grouped", layer.w13, layer.w2))  # type: ignore[arg-type]


@torch.inference_mode()
def test_a_transport_that_serves_fewer_lanes_refuses_the_schedule() -> None:
    layer = make_layer()
    all2all = WatchedAll2All(layer.num_experts, Events(), {"max_lanes": 2})
    model = Stack([layer.kernel(all2all)], layer.hidden_size)
    x = torch.randn(6, layer.hidden_size)
    overlapping(model, "mlp_shared_overlap", 2)(x)
    with pytest.raises(ConfigError, match="has 3 lanes, but the all2all back end serves 2"):
        overlapping(model, "mlp_shared_overlap", 3)(x)
