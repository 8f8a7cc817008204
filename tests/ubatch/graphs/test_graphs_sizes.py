"""Graphs of several sizes: captured largest first, calls padded to the next one, larger ones run eagerly.

And changes of a captured module: new values are used by its graphs; new addresses or code drop the graphs.
"""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs
from graph_cases import WIDTH, Net, Planned, graphed, planned_context
from torch import Tensor, nn

import ubatch
from ubatch import ConfigError, CUDAGraphMode, ForwardMode, GraphMiss, UBatchConfig, UBatchWrapper

pytestmark = pytest.mark.long

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = (4, 16, 8)


class Recording(Net):
    """Notes how many rows it ran on, and what it found behind the call's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(20, WIDTH))

    def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
        self.rows[: len(x)].copy_(x)
        return super().forward(x, residual, double)


class Embedding(nn.Module):
    """Token ids `[B, S]` to `[B, S, hidden]`, or whatever `function` makes of that."""

    def __init__(self, function: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.function = function

    def forward(self, input_ids: Tensor) -> Any:
        ubatch.dbo_yield()
        hidden = self.table(input_ids)
        return hidden if self.function is None else self.function(hidden)


@pytest.mark.parametrize("device", DEVICES)
def test_sizes_are_captured_largest_first_overlapped_and_plain(device: str) -> None:
    seen: list[ubatch.CapturedGraph] = []
    with graphed(device=device, cudagraph_capture_sizes=SIZES, dbo_prefill_token_threshold=8) as case:
        captured = case.wrapper.capture_sizes(case.x(20), progress=seen.append)
        assert seen == captured == list(case.wrapper.graphs.values())
        assert [(graph.key.tokens, graph.key.schedule) for graph in captured] == [
            ((8, 8), "mlp_shared_overlap"),
            ((16,), "plain"),
            ((4, 4), "mlp_shared_overlap"),
            ((8,), "plain"),
            ((4,), "plain"),
        ]
        assert {graph.key.mode for graph in captured} == {ForwardMode.PREFILL}


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_is_padded_to_the_next_size(device: str) -> None:
    with graphed(device=device, cudagraph_capture_sizes=SIZES, dbo_prefill_token_threshold=6) as case:
        case.wrapper.capture_sizes(case.x(16))
        for rows in (16, 1, 9, 3, 4, 5, 6, 12, 8, 7):
            x = case.x(rows)
            result = case.wrapper(x)
            assert result.shape == x.shape
            torch.testing.assert_close(result, case.eager(x))
        seen = case.wrapper.statistics()
        assert (seen.graph_replays, seen.graph_misses) == (10, 0)
        assert seen.engaged == case.eager.statistics().engaged == 6, "the call's own rows decide, not the padded ones"


def test_the_padding_is_zero_whatever_ran_before() -> None:
    with graphed(Recording(), enable_dbo=False, cudagraph_capture_sizes=(8,)) as case:
        case.wrapper.capture_sizes(case.x(8))
        case.wrapper(case.x(8))
        x = case.x(3)
        case.wrapper(x)
        assert torch.equal(case.wrapper.rows[:3], x)
        assert not case.wrapper.rows[3:].any()
        assert case.wrapper.statistics().graph_replays == 2


@pytest.mark.parametrize("device", DEVICES)
def test_more_than_the_largest_runs_eagerly_and_says_so_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    with graphed(device=device, cudagraph_capture_sizes=SIZES) as case:
        case.wrapper.capture_sizes(case.x(16))
        for rows in (17, 30, 17):
            x = case.x(rows)
            assert torch.equal(case.wrapper(x), case.eager(x))
        seen = case.wrapper.statistics()
        assert (seen.graph_replays, dict(seen.graph_misses_by_reason)) == (0, {GraphMiss.LARGER_THAN_LARGEST: 3})
        (said,) = caplog.messages
        assert "17 tokens, the largest captured size is 16" in said


def test_token_ids_are_padded_by_rows_and_decode_is_a_mode_of_its_own() -> None:
    def ids(rows: int, length: int) -> Tensor:
        return torch.randint(16, (rows, length))

    with graphed(Embedding(), cudagraph_capture_sizes=(12, 6)) as case:
        case.wrapper.capture_sizes(ids(4, 3))
        case.wrapper.capture_sizes(ids(12, 1))
        assert {key.mode for key in case.wrapper.graphs} == {ForwardMode.PREFILL, ForwardMode.DECODE}
        for rows, length in ((4, 3), (3, 3), (1, 3), (12, 1), (5, 1), (1, 1)):
            x = ids(rows, length)
            assert torch.equal(case.wrapper(x), case.eager(x))
        assert case.wrapper.statistics().graph_replays == 6
        case.wrapper(ids(3, 4))
        assert "argument 'input_ids' is torch.int64 [3, 4]" in str(case.wrapper.statistics().last_graph_miss)


def test_outputs_are_cut_where_their_rows_are() -> None:
    def function(hidden: Tensor) -> dict[str, Tensor]:
        return {"hidden": hidden, "flat": hidden.flatten(0, 1), "first": hidden.movedim(0, 1), "table": hidden[0, :1]}

    dims = {"first": 1, "table": None}
    with graphed(Embedding(function), cudagraph_capture_sizes=(16,), output_dims=dims, enable_dbo=False) as case:
        ids = torch.randint(16, (8, 2))
        case.wrapper.capture_sizes(ids)
        for rows in (8, 3):
            result, expected = case.wrapper(ids[:rows]), case.eager(ids[:rows])
            assert all(torch.equal(result[name], expected[name]) for name in expected)
        assert case.wrapper.statistics().graph_replays == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("function", "why", "dims"),
    [
        (lambda hidden: hidden.sum(), r"output has shape \[\] for 4 rows and \[\] for 3, so it cannot be cut", {}),
        (lambda hidden: hidden.mean((0, 1)), r"output has shape \[8\] for 4 rows and \[8\] for 3", {}),
        (lambda hidden: (hidden, {"all": hidden.sum(0)}), r"output.1.all has shape \[2, 8\]", {}),
        (lambda hidden: hidden.sum(1) @ hidden.sum(1).t(), r"output has shape \[4, 4\] for 4 rows and \[3, 3\]", {}),
        (lambda hidden: hidden.movedim(0, 1)[:, :, :2], r"output has shape \[2, 4, 2\]", {"output": 2}),
        (lambda hidden: object(), "output is a object, which cannot be copied out of a graph", {}),
    ],
)
def test_what_cannot_be_cut_to_fewer_rows_is_refused(
    function: Callable[[Tensor], Any], why: str, dims: dict[str, int | None]
) -> None:
    with graphed(Embedding(function), cudagraph_capture_sizes=(8,), enable_dbo=False, output_dims=dims) as case:
        with pytest.raises(ConfigError, match=why):
            case.wrapper.capture_sizes(torch.randint(16, (4, 2)))
        assert not case.wrapper.graphs
        assert case.fake.alive == 0


def test_what_cannot_be_merged_is_captured_unsplit_only() -> None:
    settings: dict[str, Any] = {"cudagraph_capture_sizes": (8, 4), "verify": "first"}
    with graphed(Embedding(lambda hidden: (hidden, 3)), **settings) as case:
        captured = case.wrapper.capture_sizes(torch.randint(16, (8, 1)))
        assert [graph.key.tokens for graph in captured] == [(4, 4), (8,), (2, 2), (4,)], "proved first"
        assert case.wrapper.statistics().proved == 1
    mean = Embedding(lambda hidden: (hidden, hidden.mean()))
    with graphed(mean, output_dims={"1": None}, **settings) as case:
        captured = case.wrapper.capture_sizes(torch.randint(16, (8, 1)))
        assert [graph.key.tokens for graph in captured] == [(8,), (4,)]
        assert case.wrapper.capture(torch.randint(16, (6, 1))).key.tokens == (6,)
        ids = torch.randint(16, (4, 1))
        for result, expected in zip(case.wrapper(ids), case.eager(ids), strict=True):
            assert torch.equal(result, expected)
        assert case.wrapper.statistics().graph_replays == 1
    with (
        graphed(Embedding(lambda hidden: (hidden, len(hidden))), **settings) as case,
        pytest.raises(ConfigError, match=r"output\.1 is 8 for 8 rows and 7 for 7, which a graph cannot give back"),
    ):
        case.wrapper.capture_sizes(torch.randint(16, (8, 1)))


def test_sizes_that_cannot_be_captured_are_refused_before_anything_runs() -> None:
    def refused(why: str, *args: Any, module: nn.Module | None = None, **settings: Any) -> None:
        with graphed(module, **settings) as case:
            with pytest.raises(ConfigError, match=why):
                case.wrapper.capture_sizes(*args)
            assert case.fake.warm_ups == 0

    x = torch.randn(8, WIDTH)
    refused(r"no sizes to capture: set UBatchConfig\.cudagraph_capture_sizes", x)
    refused(r"has 8 tokens, fewer than the largest of cudagraph_capture_sizes \(16\)", x, cudagraph_capture_sizes=(16,))
    odd = r"cudagraph_capture_sizes \[5, 3\] are no whole rows of 2 tokens"
    ids = torch.randint(16, (4, 2))
    refused(odd, ids, module=Embedding(), cudagraph_capture_sizes=(5, 4, 3))
    refused(r"the call cannot be cut to .*: argument 'y'", x, x, module=TwoTensors(), cudagraph_capture_sizes=(8,))
    with (
        graphed(cudagraph_capture_sizes=(8,)) as case,
        ubatch.set_forward_context(planned_context(Planned(8), rows=8)),
        pytest.raises(ConfigError, match=r"has a plan for one batch, but capture_sizes\(\) captures many"),
    ):
        case.wrapper.capture_sizes(x)


class TwoTensors(nn.Module):
    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        return y + z


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((8, 0), r"cudagraph_capture_sizes \[8, 0\]: a size must be at least 1 token"),
        ((8, 4, 8), r"cudagraph_capture_sizes \[8, 4, 8\] has a size twice"),
        ((8, 4.0), r"an entry of cudagraph_capture_sizes must be int, not 4\.0"),
        ((True,), "an entry of cudagraph_capture_sizes must be int, not True"),
        (8, "cudagraph_capture_sizes must be list or tuple, not 8"),
    ],
)
def test_sizes_that_are_none_are_refused(sizes: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        UBatchConfig(cudagraph_capture_sizes=sizes)
    with pytest.raises(ConfigError, match=why):
        UBatchConfig.from_mapping({"cudagraph_capture_sizes": list(sizes) if isinstance(sizes, tuple) else sizes})


def test_sizes_may_come_as_a_list() -> None:
    assert UBatchConfig.from_mapping({"cudagraph_capture_sizes": [8, 4]}).cudagraph_capture_sizes == (8, 4)


def test_a_captured_size_replaces_the_older_one_and_a_call_of_exactly_that_size_needs_no_padding() -> None:
    with graphed(cudagraph_capture_sizes=(8,), enable_dbo=False) as case:
        case.wrapper.capture_sizes(case.x(8))
        case.wrapper.capture(case.x(8))  # by hand: rows may depend on each other
        x = case.x(8)
        assert torch.equal(case.wrapper(x), case.eager(x))
        case.wrapper(x[:4])
        seen = case.wrapper.statistics()
        assert (seen.graph_replays, dict(seen.graph_misses_by_reason)) == (1, {GraphMiss.NO_GRAPH: 1})
        assert list(case.wrapper.graphs) == [ubatch.GraphKey((8,), "plain", ForwardMode.PREFILL)]


# ----------------------------------------------------------------------------------------- changes of a captured module


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


def delete_attribute(wrapper: UBatchWrapper) -> None:
    wrapper.extra = 1
    del wrapper.extra


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda wrapper: wrapper.double(), "double"),
        (lambda wrapper: wrapper.to(torch.float64), "to"),
        (lambda wrapper: wrapper.load_state_dict(copy.deepcopy(wrapper.state_dict()), assign=True), "load_state_dict"),
        (lambda wrapper: setattr(wrapper, "factor", 0.25), "attribute 'factor' was set"),
        (delete_attribute, "attribute 'extra' was set"),
        (lambda wrapper: wrapper.register_buffer("more", torch.zeros(1)), "register_buffer"),
        (lambda wrapper: wrapper.register_forward_pre_hook(lambda m, x: (x[0] * 2,)), "register_forward_pre_hook"),
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
