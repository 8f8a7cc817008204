"""The stand-in's twin: made for methods only, never a second object on the live module after its use; and tracers."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lanes import no_lane_threads_within
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.fx.experimental.proxy_tensor import make_fx
from wrapping import through_pickle, wrapped

from ubatch import ConfigError, UBatchConfig, UBatchWrapper, dbo_yield
from ubatch.wrapping.stand_in import StandIn

pytestmark = pytest.mark.long

X = torch.arange(12.0).reshape(4, 3)
ended: list[str] = []


class Base(nn.Module):
    def configure(self, scale: float) -> Any:
        self.scale = scale
        return self

    def described(self) -> str:
        return "base"


class Rich(Base):
    """A module with everything that a class can do with its `self`."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.scale = scale
        self.stored = self.twice
        self.seen: dict[Any, int] = {self: 1}

    def forward(self, x: Tensor) -> Tensor:
        dbo_yield()
        return self.linear(x) * self.scale + self.shift

    def twice(self, x: Tensor) -> Tensor:
        return self(x) + self.forward(x)

    def configure(self, scale: float) -> Any:
        return super().configure(scale)

    def described(self) -> str:
        return f"{super().described()}, rich"

    def exact(self) -> tuple[bool, bool, bool, str]:
        known = {Rich: "rich"}
        same = type(self) == Rich  # noqa: E721 - this is what is tested
        return isinstance(self, Rich), self.__class__ is Rich, same, known.get(type(self), "unknown")

    def another(self) -> Any:
        return type(self)(3.0)

    def clone(self) -> Any:
        return copy.copy(self)

    def refer(self) -> None:
        self.reference = weakref.ref(self)

    def referred(self) -> Any:
        return self.reference()

    def count(self) -> int:
        return self.seen[self]

    def rows(self, x: Tensor) -> Iterator[Tensor]:
        yield from self(x)

    @property
    def me(self) -> Any:
        return self

    @property
    def result(self) -> Tensor:
        return self(X)

    @functools.cached_property
    def doubled(self) -> Tensor:
        return self.twice(X)

    @staticmethod
    def plain() -> int:
        return 3

    @classmethod
    def kind(cls) -> type:
        return cls

    def __del__(self) -> None:
        ended.append("ended")


@pytest.fixture
def model() -> Rich:
    return Rich().eval()


@pytest.fixture
def wrapper(model: Rich) -> Iterator[UBatchWrapper]:
    with torch.no_grad(), wrapped(model) as made:
        yield made


def engaged(wrapper: UBatchWrapper) -> int:
    return wrapper.statistics().engaged


def has_twin(wrapper: UBatchWrapper) -> bool:
    return hasattr(wrapper, "_ubatch_twin")


def test_data_makes_no_twin(model: Rich, wrapper: UBatchWrapper) -> None:
    assert (wrapper.scale, wrapper.plain(), wrapper.kind()) == (2.0, 3, Rich)
    assert wrapper.linear is model.linear
    assert wrapper.linear.weight is model.linear.weight
    assert wrapper.shift is model.shift
    assert wrapper.training is False
    assert wrapper.seen is model.seen
    with pytest.raises(AttributeError, match="'Rich' object has no attribute 'absent'"):
        wrapper.absent  # noqa: B018
    assert not hasattr(wrapper, "absent")
    wrapper(X)
    assert not has_twin(wrapper)
    wrapper.twice(X)
    assert has_twin(wrapper)


def test_the_modules_finalizer_runs_once_at_its_own_end() -> None:
    gc.collect()  # what other tests left
    ended.clear()
    model = Rich().eval()
    del model.stored  # it refers to the module
    model.seen.clear()
    with wrapped(model) as wrapper, torch.no_grad():
        wrapper.twice(X)
        assert wrapper.me is wrapper
        gc.collect()
    del wrapper
    gc.collect()
    assert not ended
    del model
    gc.collect()
    assert ended == ["ended"]


def test_what_returns_itself_returns_the_wrapper(model: Rich, wrapper: UBatchWrapper) -> None:
    assert wrapper.configure(3.0) is wrapper
    assert model.scale == 3.0
    assert wrapper.configure(4.0).configure(5.0) is wrapper
    assert wrapper.me is wrapper
    assert wrapper.me.me.scale == model.scale == 5.0
    torch.testing.assert_close(wrapper.configure(2.0)(X), model(X))
    assert engaged(wrapper) == 1


def test_methods_know_their_class(model: Rich, wrapper: UBatchWrapper) -> None:
    assert wrapper.exact() == model.exact() == (True, True, True, "rich")
    assert wrapper.described() == "base, rich"
    other = wrapper.another()
    assert (type(other), other.scale, model.scale) == (Rich, 3.0, 2.0)
    clone = wrapper.clone()
    assert type(clone) is Rich
    clone.scale = 7.0
    assert (model.scale, clone.linear) == (2.0, model.linear), "a shallow copy, as the module's own"
    assert (wrapper.count(), wrapper.me.count()) == (1, 1)


def test_methods_go_through_the_wrapper_however_they_are_kept(model: Rich, wrapper: UBatchWrapper) -> None:
    expected = model(X)
    kept = [wrapper.twice, functools.partial(wrapper.twice), wrapper.stored]
    for number, method in enumerate(kept, start=1):
        torch.testing.assert_close(method(X), 2 * expected)
        assert engaged(wrapper) == 2 * number
    torch.testing.assert_close(wrapper.result, expected)
    torch.testing.assert_close(wrapper.doubled, 2 * expected)
    torch.testing.assert_close(wrapper.doubled, model.doubled)
    torch.testing.assert_close(torch.stack(list(wrapper.rows(X))), expected)
    assert engaged(wrapper) == 10


def test_methods_are_equal_as_the_modules(wrapper: UBatchWrapper) -> None:
    assert wrapper.twice == wrapper.twice
    assert len({wrapper.twice, wrapper.twice}) == 1
    assert wrapper.twice != wrapper.described
    assert wrapper.twice.__name__ == "twice"
    assert wrapper.twice.__self__ == wrapper.module
    assert hash(wrapper.twice.__self__) == hash(wrapper.module)


def test_weak_references_live_as_long_as_the_wrapper(wrapper: UBatchWrapper) -> None:
    wrapper.refer()
    gc.collect()
    assert wrapper.referred() is wrapper


def test_a_dropped_wrapper_is_gone_at_once(model: Rich) -> None:
    wrapper = UBatchWrapper(model, UBatchConfig(dbo_prefill_token_threshold=2, verify="off"))
    with torch.no_grad():
        wrapper.configure(2.0).twice(X)
    assert engaged(wrapper) == 2
    gone = weakref.ref(wrapper)
    gc.disable()
    try:
        del wrapper
        assert gone() is None
        assert no_lane_threads_within(5)
    finally:
        gc.enable()


def test_a_kept_method_outlives_its_wrapper(model: Rich) -> None:
    with torch.no_grad():
        expected = model.twice(X)
        with wrapped(model) as wrapper:
            method = wrapper.twice
        del wrapper
        gc.collect()
        torch.testing.assert_close(method(X), expected)
        del method
        gc.collect()
    assert no_lane_threads_within(5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_copies_run_on_copies(model: Rich, wrapper: UBatchWrapper, duplicate: Callable[[Any], Any]) -> None:
    model.seen.clear()
    del model.stored
    expected = model(X)
    method, itself, described = duplicate(wrapper.twice), duplicate(wrapper.me), duplicate(wrapper.described)
    twin = duplicate(wrapper.twice.__self__)
    assert type(itself) is type(twin) is UBatchWrapper
    before = engaged(wrapper)
    for each in (model.linear.weight, model.linear.bias):
        each.data.zero_()
    model.scale = 0.0
    torch.testing.assert_close(method(X), 2 * expected)
    torch.testing.assert_close(itself(X), expected)
    torch.testing.assert_close(twin.twice(X), 2 * expected)
    assert described() == "base, rich"
    assert engaged(wrapper) == before, "the copies have wrappers of their own"
    assert engaged(itself) == 1
    itself.scale = 5.0
    assert model.scale == 0.0
    for each in (itself, twin):
        each.close()
    del method
    gc.collect()


def test_a_module_with_lookups_of_its_own(model: Rich) -> None:
    class Delegating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.own = 1

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    class Watched(Rich):
        def __getattribute__(self, name: str) -> Any:
            return 42 if name == "answer" else super().__getattribute__(name)

    with wrapped(Delegating()) as wrapper:
        assert (wrapper.own, wrapper.scale, wrapper.inner) == (1, 2.0, model)
        assert wrapper.described() == "base, rich"
    with torch.no_grad(), wrapped(Watched().eval()) as wrapper:
        assert (wrapper.answer, wrapper.scale) == (42, 2.0)
        assert wrapper.configure(3.0) is wrapper
        torch.testing.assert_close(wrapper.twice(X), wrapper.module.twice(X))


class Stepper(nn.Module):
    """A module whose own helpers have names that anybody might choose."""

    def __init__(self) -> None:
        super().__init__()
        self._step = "the module's"
        self._settings = self._capture = self._method = self._twin = self._keep = self._step

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_private_names_are_the_modules() -> None:
    with wrapped(Stepper()) as stepper:
        for name in ("_step", "_settings", "_capture", "_method", "_twin", "_keep"):
            assert getattr(stepper, name) == "the module's", name
    own = {name for kind in (UBatchWrapper, StandIn) for name in vars(kind)}
    private = {
        name for name in own if name.startswith("_") and not name.startswith("__") and not hasattr(nn.Module, name)
    }
    assert {name for name in private if not name.startswith("_ubatch_")} <= {"_abc_impl"}


# -------------------------------------------------------------------------------------------------------------- tracers


SIX = torch.arange(24.0).reshape(6, 4)
EIGHT = torch.arange(32.0).reshape(8, 4).flip(0)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        dbo_yield()
        return torch.relu(self.linear(x))

    def through_forward(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def __matmul__(self, x: Tensor) -> Tensor:
        return self(x)

    def __len__(self) -> int:
        return 3


@pytest.fixture
def traced() -> Iterator[UBatchWrapper]:
    with wrapped(Small().eval()) as made:
        yield made


WAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "script": ("torch.jit.script", torch.jit.script),
    "script a parent": ("torch.jit.script", lambda wrapper: torch.jit.script(nn.Sequential(wrapper))),
    "trace": ("torch.jit.trace", lambda wrapper: torch.jit.trace(wrapper, SIX)),
    "trace a parent": ("torch.jit.trace", lambda wrapper: torch.jit.trace(nn.Sequential(wrapper), SIX)),
    "trace the method": ("torch.jit.trace", lambda wrapper: torch.jit.trace(wrapper.forward, SIX)),
    "export": ("torch.export", lambda wrapper: torch.export.export(wrapper, (SIX,))),
    "fx": ("torch.fx", torch.fx.symbolic_trace),
    "make_fx": ("torch.fx", lambda wrapper: make_fx(wrapper)(SIX)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gradients", [True, False])
def test_recorders_are_refused(traced: UBatchWrapper, way: str, gradients: bool) -> None:
    name, record = WAYS[way]
    with torch.set_grad_enabled(gradients):
        with pytest.raises(ConfigError, match=f"{name} cannot see into a UBatchWrapper.*the module itself"):
            record(traced)
        torch.testing.assert_close(traced(SIX), traced.module(SIX))
    assert traced.statistics().engaged == 1


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("parent", [False, True])
def test_compiled_it_is_right(traced: UBatchWrapper, parent: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(nn.Sequential(traced) if parent else traced, backend="eager")
    with torch.no_grad():
        for x in (SIX, EIGHT, SIX[:1], EIGHT, SIX):
            torch.testing.assert_close(compiled(x), traced.module(x))
    assert traced.statistics().engaged == 4
    torch.compiler.reset()


@pytest.mark.wide
@pytest.mark.sample(2)
def test_compiled_code_calls_through_the_traced(traced: UBatchWrapper) -> None:
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda x: traced(x) * len(traced),
        lambda x: traced @ x,
        lambda x: traced.through_forward(x),
    ]
    for use in uses:
        torch.compiler.reset()
        before = traced.statistics().engaged
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(use, backend="eager")(SIX), use(SIX))
        assert traced.statistics().engaged == before + 2
    torch.compiler.reset()


def test_no_single_graph_has_it(traced: UBatchWrapper) -> None:
    torch.compiler.reset()
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match="disable"):
        compiled(SIX)
    torch.compiler.reset()
