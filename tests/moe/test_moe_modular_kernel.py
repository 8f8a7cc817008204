"""The layer's order of events, in every schedule, and its results against the plain loop."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from moe_layers import Stack, lanes_of, make_layer
from torch import Tensor

from moe import Dispatched, FusedMoEModularKernel, make_all2all, make_experts
from moe.all2all.local import LocalAll2All
from ubatch import ConfigError, Recv, SharedExpert, Transfer, dbo_current_ubatch_id, get_schedule


class Events(list[str]):
    """What happened, with the lane in which it did."""

    def note(self, what: str) -> None:
        self.append(f"{dbo_current_ubatch_id()} {what}")


class WatchedAll2All(LocalAll2All):
    """`local`, telling when something is launched and when it is waited for."""

    def __init__(self, events: Events, **traits: int) -> None:
        super().__init__(num_experts=8)
        self.traits = replace(self.traits, **traits)
        self.events = lambda: events  # a function is no state of the module, which would be found changed

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Transfer[Dispatched[None]]:
        self.events().note("dispatch")
        return super().dispatch(x, topk_ids, topk_weights).map(partial(self._arrived, "dispatched"))

    def combine(self, y: Tensor, handle: None) -> Transfer[Tensor]:
        self.events().note("combine")
        return super().combine(y, handle).map(partial(self._arrived, "combined"))

    def _arrived(self, what: str, arrived: Any) -> Any:
        self.events().note(what)
        return arrived


def watched_stack(events: Events, **traits: int) -> Stack:
    """A layer that tells of everything that happens."""
    model = Stack([make_layer()], WatchedAll2All(events, **traits), shared=True)
    for module, name in ((model.kernels[0].experts, "experts"), (model.shared, "shared")):
        module.register_forward_pre_hook(lambda *_, name=name: events.note(name))
    return model


def run_in_lanes(model: Stack, x: Tensor, lanes: int = 2, **schedule: Any) -> Tensor:
    """The model under `mlp_shared_overlap`, with changes."""
    changed = replace(get_schedule("mlp_shared_overlap"), **schedule)
    with closing(lanes_of(model, None, changed, lanes)) as wrapper:
        output: Tensor = wrapper(x)
        assert wrapper.statistics().engaged == 1
    return output


@pytest.mark.parametrize("place", list(SharedExpert))
@torch.inference_mode()
def test_the_shared_expert_is_added_wherever_it_runs(place: SharedExpert) -> None:
    events, x = Events(), torch.randn(6, 12)
    model = watched_stack(events)
    plain = model(x)
    torch.testing.assert_close(plain, model.expected(x))
    events.clear()
    torch.testing.assert_close(run_in_lanes(model, x, shared_expert=place), plain)
    assert [event for event in events if "shared" in event] == ["0 shared", "1 shared"]


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


@pytest.mark.parametrize("place", list(SharedExpert))
@torch.inference_mode()
def test_order_of_events_in_lanes(place: SharedExpert) -> None:
    events = Events()
    run_in_lanes(watched_stack(events), torch.randn(4, 12), shared_expert=place)
    assert events == ORDERS[place]


@torch.inference_mode()
def test_order_of_events_when_the_peer_receives() -> None:
    """vLLM's order: a lane's transfer is waited for by the next lane, before that one's own launch."""
    events = Events()
    run_in_lanes(watched_stack(events), torch.randn(4, 12), recv=Recv.PEER)
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
    events = Events()
    watched_stack(events)(torch.randn(4, 12))
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
    model, x = watched_stack(Events(), max_lanes=2), torch.randn(6, 12)
    run_in_lanes(model, x, lanes=2)
    with pytest.raises(ConfigError, match="has 3 lanes, but the all2all back end serves 2"):
        run_in_lanes(model, x, lanes=3)
