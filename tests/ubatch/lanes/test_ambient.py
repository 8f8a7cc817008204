"""Lanes start with the caller's per-thread state of torch and Python; changes in a lane stay in that lane."""

import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from lanes import lane_pool, run, walker
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from wrapper_cases import Model
from wrapping import wrapped

from ubatch import UBatchWrapper, dbo_current_ubatch_id, dbo_enabled, dbo_yield
from ubatch.lanes.workers import LanePool

LANES = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[LanePool]:
    with lane_pool(LANES) as made:
        yield made


def state() -> dict[str, Any]:
    """What this thread sees, and what follows from it."""
    weight = torch.ones(2, 2, device="cpu", requires_grad=True)
    product = torch.ones(2, 2, device="cpu") @ weight
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast_dtype": torch.get_autocast_dtype("cpu"),
        "autocast_cache": torch.is_autocast_cache_enabled(),
        "default_device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "made_on": torch.empty(1).device,
        "product": product.dtype,
        "requires_grad": product.requires_grad,
        "is_inference": product.is_inference(),
    }


def states(pool: LanePool) -> list[dict[str, Any]]:
    """What every lane sees, before and after a point."""

    def body() -> list[dict[str, Any]]:
        before = state()
        dbo_yield()
        return [before, state()]

    return [seen for lane in run(pool, *[body] * LANES) for seen in lane]


@contextmanager
def setting(value: Any, set_: Callable[[Any], object], get: Callable[[], Any]) -> Iterator[None]:
    """Not a context manager of torch, but a setting that somebody makes."""
    before = get()
    set_(value)
    try:
        yield
    finally:
        set_(before)


def threads(number: int) -> AbstractContextManager[None]:
    return setting(number, torch.set_num_threads, torch.get_num_threads)


def default_device(device: str) -> AbstractContextManager[None]:
    return setting(device, torch.set_default_device, lambda: None)


def autocast_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """A dtype for autocast regions to come."""
    return setting(dtype, partial(torch.set_autocast_dtype, "cpu"), partial(torch.get_autocast_dtype, "cpu"))


def autocast(dtype: torch.dtype = torch.bfloat16, **options: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=dtype, **options)


SURROUNDINGS: dict[str, list[Callable[[], AbstractContextManager[Any]]]] = {
    "nothing": [],
    "no_grad": [torch.no_grad],
    "no_grad, then enable_grad": [torch.no_grad, torch.enable_grad],
    "inference_mode": [torch.inference_mode],
    "inference_mode, then not": [torch.inference_mode, lambda: torch.inference_mode(False)],
    "inference_mode, then enable_grad": [torch.inference_mode, torch.enable_grad],
    "autocast": [autocast],
    "autocast to half": [lambda: autocast(torch.float16)],
    "autocast without cache": [lambda: autocast(cache_enabled=False)],
    "autocast, then not": [autocast, lambda: autocast(enabled=False)],
    "autocast, then to half": [autocast, lambda: autocast(torch.float16)],
    "a dtype for autocast to come": [lambda: autocast_dtype(torch.float16)],
    "autocast in inference_mode": [torch.inference_mode, autocast],
    "a device around": [lambda: torch.device("meta")],
    "a device around, then another": [lambda: torch.device("meta"), lambda: torch.device("cpu")],
    "a default device": [lambda: default_device("meta")],
    "a default device, then a device around": [lambda: default_device("meta"), lambda: torch.device("cpu")],
    "threads": [lambda: threads(2)],
    "everything": [torch.no_grad, autocast, lambda: torch.device("meta"), lambda: threads(2)],
}


CHANGE_NOTHING = {
    "nothing",
    "no_grad, then enable_grad",
    "inference_mode, then not",
    "autocast, then not",
    "a device around, then another",
    "a default device, then a device around",
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_lanes_see_what_the_caller_sees(pool: LanePool, name: str) -> None:
    outside = state()
    with ExitStack() as stack:
        for surrounding in SURROUNDINGS[name]:
            stack.enter_context(surrounding())
        inside = state()
        assert (inside == outside) == (name in CHANGE_NOTHING)
        assert states(pool) == [inside] * 2 * LANES
        assert state() == inside
    assert state() == outside
    assert states(pool) == [outside] * 2 * LANES, "the next step is not in the surroundings of this one"


def test_the_surroundings_are_left_when_a_lane_fails(pool: LanePool) -> None:
    def fails() -> None:
        dbo_yield()
        raise ValueError("original")

    with torch.inference_mode(), autocast(), torch.device("meta"), pytest.raises(ValueError, match="original"):
        run(pool, fails, walker("abc"), walker("abc"))
    assert states(pool) == [state()] * 2 * LANES


def test_what_a_lane_sets_stays_in_that_lane_and_step(pool: LanePool) -> None:
    caller = state()

    def sets() -> dict[str, Any]:
        """The settings that are no context managers, and nobody takes back."""
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_autocast_cache_enabled(False)
        torch.set_default_device("meta")
        dbo_yield()
        return state()

    def sees() -> dict[str, Any]:
        dbo_yield()
        return state()

    first, *others = run(pool, sets, sees, sees)
    assert (first["grad"], first["autocast"], first["default_device"]) == (False, True, torch.device("meta"))
    assert [*others, state()] == [caller] * 3
    assert states(pool) == [caller] * 2 * LANES


def test_a_block_inside_a_lane_lasts_over_its_points(pool: LanePool) -> None:
    def body() -> list[tuple[bool, bool]]:
        seen = []
        if dbo_current_ubatch_id() == 1:
            with torch.no_grad(), autocast():
                dbo_yield()
                seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        else:
            dbo_yield()
        dbo_yield()
        return [*seen, (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))]

    assert run(pool, *[body] * LANES) == [[(True, False)], [(False, True), (True, False)], [(True, False)]]


# --------------------------------------------------------------------------------------------------------------- flags


def flushing() -> bool:
    return (torch.tensor([1e-40]) * 1.0).item() == 0.0


FLAGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "backward's threads": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: torch._C._is_multithreading_enabled(),
    ),
    "denormals": (lambda: setting(True, torch.set_flush_denormal, flushing), flushing),
    "replay of views": (
        lambda: torch.autograd.grad_mode._force_original_view_tracking(True),
        lambda: torch._C._is_view_replay_enabled(),
    ),
    "implicit replication": (implicit_replication, lambda: DTensor._op_dispatcher._allow_implicit_replication),
    "forbidden hooks": (
        lambda: disable_saved_tensors_hooks("not here"),
        lambda: torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_lanes_see_the_flags_of_the_caller(pool: LanePool, name: str) -> None:
    surrounding, look = FLAGS[name]
    outside = look()
    assert run(pool, *[look] * LANES) == [outside] * LANES, "their threads have started before"
    with surrounding():
        inside = look()
        assert inside != outside
        assert run(pool, *[look] * LANES) == [inside] * LANES
    assert run(pool, *[look] * LANES) == [outside] * LANES


# --------------------------------------------------------------------------------------------------------- contextvars

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nowhere")


def test_lanes_see_the_callers_contextvars_and_keep_their_changes(pool: LanePool) -> None:
    def body() -> list[str]:
        lane, seen = dbo_current_ubatch_id(), [variable.get()]
        for layer in range(3):
            variable.set(f"lane {lane} layer {layer}")
            dbo_yield()
            seen.append(variable.get())
        return seen

    for where in ("here", "there"):
        token = variable.set(where)
        results = run(pool, *[body] * LANES)
        assert results == [[where, *[f"lane {lane} layer {layer}" for layer in range(3)]] for lane in range(LANES)]
        assert variable.get() == where
        variable.reset(token)
    assert run(pool, *[variable.get] * LANES) == ["nowhere"] * LANES


def test_a_context_that_is_no_threads_own_works_too(pool: LanePool) -> None:
    """As in an event loop's task."""
    context = contextvars.copy_context()
    context.run(variable.set, "task")
    assert context.run(run, pool, *[variable.get] * LANES) == ["task"] * LANES
    assert context.run(dbo_enabled) is False


# --------------------------------------------------------------------------------------------------------- the wrapper


@pytest.fixture
def wrapper() -> Iterator[UBatchWrapper]:
    with wrapped(Model(6).double(), num_ubatches=LANES, require_overlap=True) as made:
        yield made


def gradients(module: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the parameters and the input."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    (module(x) ** 2).sum().backward()
    return [each.grad.clone() for each in (x, *model.parameters())]


@pytest.mark.parametrize("rows", [3, 8])
def test_gradients_through_the_wrapper_equal_the_modules_own(wrapper: UBatchWrapper, rows: int) -> None:
    model = wrapper.module
    x = torch.randn(rows, 6, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(gradients(wrapper, model, x), gradients(model, model, x), rtol=1e-12, atol=1e-12)
    assert wrapper.statistics().engaged == 2


def test_a_frozen_parameter_gets_no_gradient(wrapper: UBatchWrapper) -> None:
    wrapper.layers[0].requires_grad_(False)
    wrapper(torch.randn(6, 6, dtype=torch.float64)).sum().backward()
    assert wrapper.module.layers[0].weight.grad is None
    assert wrapper.module.layers[1].weight.grad is not None


def test_the_output_is_what_the_module_would_give(wrapper: UBatchWrapper) -> None:
    x, model = torch.randn(6, 6, dtype=torch.float64), wrapper.module
    for surrounding in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with surrounding():
            overlapped, plain = wrapper(x), model(x)
        assert overlapped.requires_grad == plain.requires_grad
        assert overlapped.is_inference() == plain.is_inference()
        torch.testing.assert_close(overlapped, plain, rtol=1e-12, atol=1e-12)


def test_autocast_and_its_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with wrapped(model, require_overlap=True) as wrapper:
        x = torch.randn(4, 8)
        with autocast():
            overlapped, plain = wrapper(x), model(x)
        assert overlapped.dtype == plain.dtype == torch.bfloat16
        torch.testing.assert_close(overlapped, plain)
        for output in (overlapped, plain):
            model.zero_grad()
            output.float().sum().backward()
            assert [parameter.grad is not None for parameter in model.parameters()] == [True] * 4
