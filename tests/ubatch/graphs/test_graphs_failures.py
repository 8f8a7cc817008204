"""Calls that cannot be captured fail with a named cause, and leave wrapper, lanes and memory unchanged."""

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import Net, graphed, memory
from torch import Tensor, nn

import ubatch
from ubatch import CaptureFailed, NestedUBatchError, capturing, dbo_current_ubatch_id, dbo_yield

pytestmark = pytest.mark.long

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GENERATOR_BYTES = 1024
"""What a graph that was given up keeps of the random generator: its seed and its offset, once per device."""
PREFILL = ubatch.ForwardMode.PREFILL


class Breaking(Net):
    """Does `at_fault` in the last lane, after its second layer's dispatch point, if it is `armed` and captured."""

    def __init__(self, at_fault: Callable[[Tensor], object], lane: int = 1) -> None:
        super().__init__()
        self.at_fault, self.lane, self.armed = at_fault, lane, True

    def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
        y = super().forward(x, residual, double)
        if capturing() and self.armed and dbo_current_ubatch_id() == self.lane:
            dbo_yield(ubatch.Point.OUTPUT)
            y = y + 1
            self.at_fault(y)
        return y


def read_on_the_host(y: Tensor) -> object:
    return y.sum().item()


@pytest.mark.parametrize("device", DEVICES)
def test_a_failure_in_a_lane_names_it_and_leaves_everything_usable(device: str) -> None:
    module = Breaking(read_on_the_host)
    with graphed(module, device=device, num_ubatches=2) as case:
        expected = case.eager(x := case.x(6))
        module.armed = False  # libraries keep workspaces of a stream, also those that were allocated in a capture
        case.wrapper.capture(x)
        case.wrapper.drop_graphs()
        module.armed = True
        before = memory(device)
        with pytest.raises(
            CaptureFailed, match=r"capturing a graph of 3\+3 tokens, prefill, mlp_shared_overlap"
        ) as caught:
            case.wrapper.capture(x)
        failure = caught.value
        assert failure.key == ubatch.GraphKey((3, 3), "mlp_shared_overlap", PREFILL)
        assert (failure.lane, failure.point) == (1, "output")
        assert "`return y.sum().item()` (test_graphs_failures.py:" in failure.op
        assert "in read_on_the_host" in failure.op
        assert isinstance(failure.__cause__, RuntimeError)
        assert "raised in lane 1 of 2, last point 'output', 7 points passed" in str(failure.__cause__.__notes__)
        assert str(pickle.loads(pickle.dumps(failure))) == str(failure)
        assert memory(device) <= before + GENERATOR_BYTES, "while the error still lives"
        if device == "cuda":
            torch.cuda.empty_cache()  # an error, where the allocator believes that a capture is under way

        assert torch.equal(case.wrapper(x), expected), "usable at once, eagerly"
        assert not case.wrapper.graphs
        module.armed = False
        case.wrapper.capture(x)
        assert torch.equal(case.wrapper(x), expected), "and captured, where nothing breaks"
        seen = case.wrapper.statistics()
        assert (seen.graph_replays, seen.lane_threads_started) == (1, 2)
        if case.fake is not None:
            assert (case.fake.captures, case.fake.aborted, case.fake.alive) == (3, 1, 1)


@pytest.mark.gpu
def test_after_failed_captures_random_numbers_are_drawn_and_no_more_memory_is_held() -> None:
    with graphed(Breaking(read_on_the_host), device="cuda", num_ubatches=2) as case:
        x, held = case.x(6), []
        for _ in range(3):
            with pytest.raises(CaptureFailed):
                case.wrapper.capture(x)
            torch.ones(4, device="cuda").multinomial(1).item()  # raised, as `randn` did
            held.append(memory("cuda"))
        assert held[1:] == held[:1] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_failure_of_an_unsplit_call_has_no_lane(device: str) -> None:
    with graphed(Breaking(read_on_the_host, lane=0), device=device, enable_dbo=False) as case:
        x = case.x(6)
        with pytest.raises(CaptureFailed, match="capturing a graph of 6 tokens, prefill, plain failed, at ") as caught:
            case.wrapper.capture(x)
        assert (caught.value.lane, caught.value.point) == (None, None)
        assert torch.equal(case.wrapper(x), case.eager(x))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("at_fault", "operation"),
    [
        (lambda y: y.tolist(), "Tensor.tolist"),
        (lambda y: y.cpu(), "Tensor.cpu"),
        (lambda y: y.sum() > 0 and None, "Tensor.__bool__"),
        (lambda y: y.nonzero(), "aten.nonzero"),
        (lambda y: y[y > 0], "aten.index"),
        (lambda y: torch.unique(y), "aten._unique2"),
        (lambda y: torch.where(y > 0), "aten.where"),
        (lambda y: torch.equal(y, y), "aten.equal"),
        (lambda y: torch.repeat_interleave(y, y.long()[:, 0].abs(), 0), "aten.repeat_interleave"),
        (lambda y: torch.tensor([1.0]), "torch.tensor"),
    ],
)
def test_the_fake_refuses_what_cuda_would_and_names_it(at_fault: Callable[[Tensor], object], operation: str) -> None:
    with (
        graphed(Breaking(at_fault), num_ubatches=2) as case,
        pytest.raises(CaptureFailed, match="operation not permitted when stream is capturing") as caught,
    ):
        case.wrapper.capture(case.x(4))
    assert operation in str(caught.value.__cause__)


@pytest.mark.parametrize("device", DEVICES)
def test_an_error_that_the_model_swallows_spoils_the_capture_all_the_same(device: str) -> None:
    def swallow(y: Tensor) -> None:
        with contextlib.suppress(RuntimeError):
            y.sum().item()

    with graphed(Breaking(swallow), device=device, num_ubatches=2) as case:
        x = case.x(4)
        with pytest.raises(CaptureFailed):
            case.wrapper.capture(x)
        assert torch.equal(case.wrapper(x), case.eager(x))


def test_a_failure_in_a_hook_that_runs_when_the_lane_ends() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dbo_yield("a")
            y = x + 1
            if capturing():
                ubatch.dbo_register_recv_hook(lambda: read_on_the_host(y))
            return y

    with graphed(Late(), num_ubatches=3) as case:
        with pytest.raises(CaptureFailed, match="in lane 0 after point 'a'"):
            case.wrapper.capture(case.x(6))
        x = case.x(6)
        assert torch.equal(case.wrapper(x), x + 1)


def test_ctrl_c_is_no_failure_but_ends_the_capture() -> None:
    def interrupt(y: Tensor) -> None:
        raise KeyboardInterrupt

    with graphed(Breaking(interrupt, lane=0), enable_dbo=False) as case:
        with pytest.raises(KeyboardInterrupt):
            case.wrapper.capture(case.x(4))
        assert (case.fake.captures, case.fake.aborted) == (1, 1)
        assert not capturing()
        assert not case.wrapper.graphs


def test_an_error_while_warming_up_is_the_modules_own() -> None:
    class Odd(Net):
        def forward(self, x: Tensor, residual: Tensor | None = None, double: bool = False) -> Tensor:
            raise ValueError("odd")

    with graphed(Odd()) as case:
        with pytest.raises(ValueError, match="odd"):
            case.wrapper.capture(case.x(4))
        assert case.fake.captures == 0
        assert not case.wrapper._ubatch_wrapped.table.buffers._flat


def test_a_failure_in_the_middle_keeps_what_was_captured_before() -> None:
    module = Breaking(read_on_the_host, lane=0)
    module.armed = False

    with graphed(module, enable_dbo=False, cudagraph_capture_sizes=(8, 4)) as case:
        with pytest.raises(CaptureFailed, match="capturing a graph of 4 tokens"):
            case.wrapper.capture_sizes(case.x(8), progress=lambda graph: setattr(module, "armed", True))
        x = case.x(3)
        torch.testing.assert_close(case.wrapper(x), case.eager(x))
        assert case.wrapper.statistics().graph_replays == 1


# ------------------------------------------------------------------------------------------------------------- refused


class Cache:
    """Something with a registered splitter."""


class CacheSplitter:
    def split(self, cache: Any, bounds: Any) -> list[Any]:
        return [cache] * len(bounds)

    def merge(self, parts: Any, whole: Any) -> Any:
        return whole


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, other: Any = None) -> Tensor:
        if other == "write":
            x.add_(1)
        return x * self.weight


@pytest.mark.slow
def test_what_no_graph_can_do_is_refused_before_it_is_captured() -> None:
    ubatch.register_splitter(Cache, CacheSplitter())
    with graphed(Taking()) as case:

        def refused(why: str, *args: Any) -> None:
            with pytest.raises(ubatch.ConfigError, match=why):
                case.wrapper.capture(*args)
            assert case.fake.captures == 0
            assert not case.wrapper.graphs

        x = case.x(4)
        refused("argument 'x' is on meta, but the graph runs on cpu", x.to("meta"))
        refused("argument 'other' is a Cache, which changes with every call", x, Cache())
        refused("the module writes to its argument 'x'. A graph would write to a copy", x, "write")
        refused("the call has no tokens that could be counted", case.x(0))
        refused(r"has no tokens that could be counted\. the call has no tensor argument to split", 3)
        with torch.inference_mode(False), torch.enable_grad():
            refused(r"a graph records no gradients\. Capture under torch\.no_grad\(\)", torch.randn(4, 8))
        case.wrapper.train()
        refused(r"the module is in training mode, and graphs are for inference\. Call eval\(\)", x)
        case.wrapper.eval()
        case.wrapper.to("meta")
        refused("'weight' is on meta, but graphs run on cpu. Move the module there", x)


def test_an_output_that_cannot_be_copied_fails_the_capture() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "set": {1, 2}}

    with graphed(Odd(), enable_dbo=False) as case:
        with pytest.raises(CaptureFailed, match=r"output\.set is a set, which cannot be copied out of a graph"):
            case.wrapper.capture(case.x(4))
        assert (case.fake.aborted, case.fake.alive) == (1, 0)


def test_capturing_is_told_in_lanes_and_unsplit_and_only_then() -> None:
    told: list[tuple[int, bool]] = []

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dbo_yield()
            told.append((dbo_current_ubatch_id(), capturing()))
            return x + 1

    with graphed(Asking(), num_ubatches=2, dbo_prefill_token_threshold=4) as case:
        case.wrapper.capture(case.x(4))
        assert told == [(0, False), (1, False)] * 2 + [(0, True), (1, True)]
        told.clear()
        case.wrapper.capture(case.x(3))
        assert told == [(0, False)] * 2 + [(0, True)]
        case.wrapper(case.x(4))
        assert len(told) == 3, "a replay runs no Python of the module"
        assert not capturing()


def test_a_wrapper_is_not_captured_from_inside_its_own_call() -> None:
    class Nesting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            case.wrapper.capture(x)
            return x

    with graphed(Nesting(), num_ubatches=2) as case:
        with pytest.raises(NestedUBatchError, match="called inside lane 0"):
            case.wrapper(case.x(4))
        with pytest.raises(NestedUBatchError, match="from inside its own call"):
            case.wrapper(case.x(1))
