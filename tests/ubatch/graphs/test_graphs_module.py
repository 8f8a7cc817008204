"""Changes of a captured module: new values are used by its graphs; new addresses or code drop the graphs."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable

import pytest
import torch
from fake_graphs import FakeGraphs
from graph_cases import WIDTH, Net, graphed

from ubatch import CUDAGraphMode, UBatchConfig, UBatchWrapper

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "change",
    [
        lambda wrapper: wrapper.load_state_dict({name: t * 2 for name, t in wrapper.state_dict().items()}),
        lambda wrapper: wrapper.layers[0].weight.mul_(2),
        lambda wrapper: wrapper.requires_grad_(False),
        lambda wrapper: wrapper.eval(),
        lambda wrapper: wrapper.to("cpu"),
        lambda wrapper: wrapper.apply(lambda module: None),
        lambda wrapper: list(wrapper.named_parameters()),
        lambda wrapper: wrapper.factor,
    ],
)
def test_new_values_in_the_same_memory_are_seen(change: Callable[[UBatchWrapper], object]) -> None:
    with graphed(num_ubatches=2) as case:
        case.wrapper.capture(case.x(4))
        change(case.wrapper)
        x = case.x(4)
        assert torch.equal(case.wrapper(x), case.eager(x))
        assert case.wrapper.statistics().graph_replays == 1


def set_factor(wrapper: UBatchWrapper) -> None:
    wrapper.factor = 0.25


def delete_attribute(wrapper: UBatchWrapper) -> None:
    wrapper.extra = 1
    del wrapper.extra


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda wrapper: wrapper.double(), "double"),
        (lambda wrapper: wrapper.to(torch.float64), "to"),
        (
            lambda wrapper: wrapper.load_state_dict(
                {name: t.clone() for name, t in wrapper.state_dict().items()}, assign=True
            ),
            "load_state_dict",
        ),
        (set_factor, "attribute 'factor' was set"),
        (delete_attribute, "attribute 'extra' was set"),
        (lambda wrapper: wrapper.register_buffer("more", torch.zeros(1)), "register_buffer"),
        (
            lambda wrapper: wrapper.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
            "register_forward_pre_hook",
        ),
    ],
)
def test_new_addresses_and_new_code_drop_the_graphs(
    change: Callable[[UBatchWrapper], object], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    with graphed(num_ubatches=2) as case:
        for rows in (4, 2):
            case.wrapper.capture(case.x(rows))
        with caplog.at_level(logging.WARNING):
            change(case.wrapper)
        assert caplog.messages == [f"{how}: 2 captured graphs are dropped. Capture again."]
        assert not case.wrapper.graphs
        assert case.fake.alive == 0
        x = case.x(4).to(next(case.wrapper.parameters()).dtype)
        expected = case.eager(x)
        assert torch.equal(case.wrapper(x), expected)
        case.wrapper.capture(x)
        assert torch.equal(case.wrapper(x), expected)


def test_a_change_behind_the_wrappers_back_is_for_drop_graphs() -> None:
    with graphed(num_ubatches=2) as case:
        case.wrapper.capture(case.x(4))
        case.wrapper.module.factor = 3.0
        x = case.x(4)
        assert not torch.equal(case.wrapper(x), case.eager(x))
        case.wrapper.drop_graphs()
        assert torch.equal(case.wrapper(x), case.eager(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda wrapper: pickle.loads(pickle.dumps(wrapper))])
def test_a_copy_has_the_mode_and_a_pool_of_its_own_but_no_graphs(
    duplicate: Callable[[UBatchWrapper], UBatchWrapper],
) -> None:
    with graphed(num_ubatches=2, cudagraph_capture_sizes=(4,)) as case:
        case.wrapper.capture_sizes(case.x(4))
        clone = duplicate(case.wrapper)
        try:
            assert not clone.graphs
            clone.capture_sizes(case.x(4))
            assert clone._ubatch_wrapped.table.backend is not case.fake
            x = case.x(4)
            assert torch.equal(clone(x), case.wrapper(x))
            assert clone.statistics().graph_replays == case.wrapper.statistics().graph_replays == 1
        finally:
            clone.close()


def test_a_wrapper_that_is_dropped_lets_go_of_its_graphs() -> None:
    fake = FakeGraphs()
    wrapper = UBatchWrapper(Net().eval(), UBatchConfig(enable_dbo=False), CUDAGraphMode.FULL, graphs=fake)
    with torch.inference_mode():
        graph = wrapper.capture(torch.randn(4, WIDTH))
    assert graph.nbytes > 0
    wrapper.drop_graphs()
    assert fake.alive == 0
