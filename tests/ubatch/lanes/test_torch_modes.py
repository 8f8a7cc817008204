"""torch's transforms, modes and hooks around a call: lanes copy them, or the call runs unsplit with a reason."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from wrapper_cases import LAYERS, Model
from wrapping import FIRST, Plain, wrapped

from ubatch import DeclineReason, UBatchWrapper
from ubatch.lanes.ambient import why_not_in_lanes

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
"""Torch's forward-mode gradients use it themselves."""

Surrounding = Callable[[], AbstractContextManager[Any]]
TRANSFORM, MODE = DeclineReason.FUNCTION_TRANSFORM, DeclineReason.TORCH_MODE


class Functions(TorchFunctionMode):
    """Sees functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Sees operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------ what is recognised


FREE: dict[str, Surrounding] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "not inference_mode": lambda: torch.inference_mode(False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "a device": lambda: torch.device("meta"),
    "save_on_cpu": save_on_cpu,
    "no hooks": lambda: disable_saved_tensors_hooks("not here"),
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "one thread for the backward": lambda: torch.autograd.set_multithreading_enabled(False),
}


REFUSED = [{"save_on_cpu", "no hooks"}, {"a profiler"}, {"mutation of what was saved", "no hooks"}]
"""Torch itself refuses these together."""


@pytest.mark.parametrize(("outer", "inner"), [(a, b) for a in FREE for b in FREE if {a, b} not in REFUSED])
def test_what_lanes_take_over_is_no_reason_to_decline(outer: str, inner: str) -> None:
    with FREE[outer](), FREE[inner]():
        assert why_not_in_lanes() is None
    assert why_not_in_lanes() is None


BOUND: dict[str, tuple[Surrounding, DeclineReason, str]] = {
    "flops": (lambda: FlopCounterMode(display=False), MODE, "torch dispatch mode _FlopCounterMode"),
    "fake tensors": (FakeTensorMode, MODE, "torch dispatch mode FakeTensorMode"),
    "a dispatch mode": (Operations, MODE, "torch dispatch mode Operations"),
    "a function mode": (Functions, MODE, "torch function mode Functions"),
    "mutation of what was saved": (allow_mutation_on_saved_tensors, MODE, "torch dispatch mode"),
    "no functions": (torch._C.DisableTorchFunction, MODE, "switches torch functions off"),
    "no functions of subclasses": (torch._C.DisableTorchFunctionSubclass, MODE, "switches torch functions off"),
    "below autograd": (torch._C._AutoDispatchBelowAutograd, MODE, "changes the keys of torch's dispatcher"),
    "no dispatch to Python": (torch._C._DisableTorchDispatch, MODE, "changes the keys of torch's dispatcher"),
    "forward mode": (forward_ad.dual_level, TRANSFORM, "forward-mode gradients"),
}


SAME = [{"below autograd", "inference_mode"}]
"""The inner one changes nothing there."""


@pytest.mark.parametrize(
    ("around", "name"), [(a, b) for a in FREE for b in BOUND if {a, b} not in REFUSED and {a, b} not in SAME]
)
def test_what_they_cannot_take_over_is_named(around: str, name: str) -> None:
    surrounding, reason, what = BOUND[name]
    with FREE[around](), surrounding():
        no = why_not_in_lanes()
    assert no[0] is reason
    assert what in no[1]
    assert why_not_in_lanes() is None


TRANSFORMS: dict[str, tuple[Callable[[Any], Any], DeclineReason, str]] = {
    "grad": (lambda f: torch.func.grad(f)(torch.ones(3)), TRANSFORM, "Grad"),
    "vjp": (lambda f: torch.func.vjp(f, torch.ones(3)), TRANSFORM, "Grad"),
    "jvp": (lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),)), TRANSFORM, "Jvp"),
    "vmap": (lambda f: torch.func.vmap(f)(torch.ones(2, 3)), TRANSFORM, "Vmap"),
    "vmap of grad": (lambda f: torch.func.vmap(torch.func.grad(f))(torch.ones(2, 3)), TRANSFORM, "Grad"),
    "hessian": (lambda f: torch.func.hessian(f)(torch.ones(3)), TRANSFORM, "Grad"),
    "functionalize": (lambda f: torch.func.functionalize(f)(torch.ones(3)), TRANSFORM, "Functionalize"),
    "jit.trace": (lambda f: torch.jit.trace(f, torch.ones(3), check_trace=False), MODE, "torch.jit.trace"),
    "make_fx": (lambda f: make_fx(f)(torch.ones(3)), MODE, "mode"),
    "checkpoint": (
        lambda f: checkpoint(f, torch.ones(3, requires_grad=True), use_reentrant=False).backward(),
        MODE,
        "a checkpoint",
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_function_that_is_transformed_or_recorded_stays_in_its_thread(name: str) -> None:
    transform, reason, what = TRANSFORMS[name]
    found = []

    def looks(x: Tensor) -> Tensor:
        found.append(why_not_in_lanes())
        return (x * x.sin()).sum()

    transform(looks)
    assert found
    assert all(no[0] is reason and what in no[1] for no in found), found
    assert why_not_in_lanes() is None


def test_another_threads_modes_are_nobody_elses() -> None:
    with FlopCounterMode(display=False), ThreadPoolExecutor(1) as other:
        assert other.submit(why_not_in_lanes).result() is None


# ------------------------------------------------------------------------------------------- what lanes take over


def rows(n: int = 6) -> Tensor:
    return torch.randn(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


@pytest.fixture
def wrapper() -> Iterator[UBatchWrapper]:
    with wrapped(Model(6).double(), **FIRST) as made:
        for gradients in (torch.enable_grad, torch.no_grad):  # calls like these overlap from now on
            with gradients():
                made(rows())
                made(rows().requires_grad_())
        yield made


def engaged(wrapper: UBatchWrapper, call: Callable[[], Any]) -> tuple[int, Counter[DeclineReason]]:
    """How often calls overlapped, and why they did not, while `call` ran."""
    before = wrapper.statistics()
    call()
    after = wrapper.statistics()
    return after.engaged - before.engaged, Counter(after.declined) - Counter(before.declined)


def test_hooks_of_the_caller_see_what_lanes_save(wrapper: UBatchWrapper) -> None:
    packed: list[Tensor] = []
    unpacked: list[int] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach())
        return len(packed) - 1

    def unpack(place: int) -> Tensor:
        unpacked.append(place)
        return packed[place]

    x, model = rows(), wrapper.module
    with saved_tensors_hooks(pack, unpack):
        expected = torch.cat([model(half) for half in x.chunk(2)])
        halves = len(packed)
        output = wrapper(x)
        assert wrapper.statistics().declined == {}
    assert len(packed) == 2 * halves, "as many as two halves save, one after the other"
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    assert sorted(unpacked) == list(range(halves, 2 * halves))
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), list(model.parameters())))


def test_the_innermost_hooks_count(wrapper: UBatchWrapper) -> None:
    outer: list[int] = []
    inner: list[int] = []

    def noting(where: list[int]) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda x: (where.append(1), x.detach())[1], lambda x: x)

    with noting(outer):
        with noting(inner):
            wrapper(rows())
        assert inner
        assert not outer
        wrapper(rows())
    assert len(outer) == len(inner)


def test_hooks_of_the_caller_end_with_its_block(wrapper: UBatchWrapper) -> None:
    packed: list[int] = []
    with saved_tensors_hooks(lambda x: (packed.append(1), x.detach())[1], lambda x: x):
        wrapper(rows())
    before = len(packed)
    wrapper(rows())
    assert len(packed) == before > 0


def test_save_on_cpu_gives_the_same_gradients(wrapper: UBatchWrapper) -> None:
    x, model = rows(), wrapper.module
    with save_on_cpu():
        assert engaged(wrapper, lambda: wrapper(x)) == (1, {})
        output = wrapper(x)
    found = torch.autograd.grad(output.square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def test_hooks_that_are_forbidden_are_so_in_lanes() -> None:
    def saving(x: Tensor) -> Tensor:
        with save_on_cpu():
            return x * 2

    with (
        wrapped(Plain(saving), **FIRST) as wrapper,
        disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        wrapper(rows())


# ------------------------------------------------------------------------------------------ calls that stay whole


Module = Callable[..., Tensor]


def of_parameters(module: Any) -> list[Tensor]:
    given = {name: parameter.detach() for name, parameter in module.named_parameters()}
    found = torch.func.grad(lambda given: torch.func.functional_call(module, given, rows()).square().sum())(given)
    return [found[name] for name in sorted(found)]


def duals(module: Module) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(rows(), rows().cos()))).tangent.clone()


def flops(module: Module) -> list[Any]:
    with FlopCounterMode(display=False) as counter:
        module(rows()).sum().backward()
    return [counter.get_total_flops(), counter.get_flop_counts()["Global"]]


def operations(module: Module) -> dict[str, int]:
    with Operations() as mode:
        module(rows())
    return dict(mode.seen)


def under_a_function_mode(module: Module) -> Tensor:
    with Functions():
        return module(rows())


def checkpointed(module: Module, early_stop: bool) -> Tensor:
    """The forward may be the first call like it and its recomputation the second: both run whole."""
    x = rows().requires_grad_()
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        output = checkpoint(module, x, use_reentrant=False)
    return torch.autograd.grad(output.square().sum(), x)[0]


WHOLE: dict[str, tuple[Callable[[Any], Any], dict[DeclineReason, int]]] = {
    "gradients by torch.func": (lambda m: torch.func.grad(lambda x: m(x).square().sum())(rows()), {TRANSFORM: 1}),
    "gradients of parameters by functional_call": (of_parameters, {TRANSFORM: 1}),
    "directional derivatives": (lambda m: torch.func.jvp(m, (rows(),), (rows().cos(),)), {TRANSFORM: 1}),
    "dual numbers": (duals, {TRANSFORM: 1}),
    "vmap": (lambda m: torch.func.vmap(m)(rows(24).reshape(4, 6, 6)), {TRANSFORM: 1}),
    "flops": (flops, {MODE: 1}),
    "a mode that sees every operation": (operations, {MODE: 1}),
    "a mode that sees every function": (under_a_function_mode, {MODE: 1}),
    "a checkpoint": (lambda m: checkpointed(m, True), {MODE: 2}),
    "a checkpoint without early stop": (lambda m: checkpointed(m, False), {MODE: 2}),
}


@pytest.mark.parametrize("what", WHOLE)
def test_calls_that_stay_whole(wrapper: UBatchWrapper, what: str) -> None:
    act, declined = WHOLE[what]
    found: list[Any] = []
    assert engaged(wrapper, lambda: found.append(act(wrapper))) == (0, declined)
    torch.testing.assert_close(found[0], act(wrapper.module))
    leaves = tree_leaves(found[0])
    assert all(abs(leaf).max() > 0.1 if isinstance(leaf, Tensor) else leaf > 0 for leaf in leaves)
    assert engaged(wrapper, lambda: wrapper(rows())) == (1, {}), "calls overlap again afterwards"


# ---------------------------------------------------------------------------------------------- the profiler's switch


@pytest.mark.parametrize("switched", [False, True])
def test_the_profiler_shows_the_operations_of_all_lanes_if_told_to(wrapper: UBatchWrapper, switched: bool) -> None:
    config = torch.profiler._ExperimentalConfig(profile_all_threads=switched)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as seen:
        wrapper(rows())
    products = [event for event in seen.events() if event.name == "aten::addmm"]
    assert len(products) == (2 * LAYERS if switched else 0), "every layer in two lanes"
    assert len({event.thread for event in products}) == (2 if switched else 0)
