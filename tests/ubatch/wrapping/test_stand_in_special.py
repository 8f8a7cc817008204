"""Special methods, the class of a stand-in, and what it tells of methods that may have changed the module."""

import asyncio
import copy
import gc
import inspect
import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from special_methods import Special, Telling, X
from torch import Tensor, nn
from torch.nn.utils import parametrize
from wrapping import through_pickle, wrapped

from ubatch import UBatchConfig, UBatchWrapper
from ubatch.wrapping.stand_in import StandIn

pytestmark = pytest.mark.long


class Equal(nn.Module):
    """A module with an equality of its own, and therefore without a hash."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value

    def __eq__(self, other: object) -> bool:
        return self.value == other.value if isinstance(other, type(self)) else NotImplemented


class Hashed(Equal):
    def __hash__(self) -> int:
        return hash(self.value)


@pytest.fixture
def model() -> Special:
    return Special(2).eval()


@pytest.fixture
def wrapper(model: Special) -> Iterator[UBatchWrapper]:
    with torch.no_grad(), wrapped(model) as made:
        yield made


# ----------------------------------------------------------------------------------------------------- special methods


def test_a_sequence_of_modules() -> None:
    first, second, third = nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)
    model = nn.Sequential(first, second)
    with wrapped(model) as wrapper:
        assert (len(wrapper), list(wrapper)) == (2, [first, second])
        assert (wrapper[0], wrapper[-1]) == (first, second)
        assert type(wrapper[0:1]) is nn.Sequential
        assert second in wrapper
        assert third not in wrapper
        assert list(reversed(wrapper)) == [second, first]
        assert wrapper.append(third) is wrapper
        wrapper[1] = nn.Identity()
        assert [type(each) for each in model] == [nn.Linear, nn.Identity, nn.Linear]
        same = wrapper
        wrapper += nn.Sequential(nn.ReLU())
        assert wrapper is same
        del wrapper[1]
        assert [type(each) for each in model] == [nn.Linear, nn.Linear, nn.ReLU]
        both = wrapper + nn.Sequential(second)
        assert (type(both), len(both)) == (nn.Sequential, 4)
        assert (len(wrapper + wrapper), len(2 * wrapper)) == (6, 6)
        wrapper *= 2
        assert (wrapper, len(model)) == (same, 6)
        with pytest.raises(IndexError, match="out of range"):
            wrapper[9]
        with torch.no_grad():
            torch.testing.assert_close(wrapper(X), model(X))
        assert wrapper.statistics().engaged == 1
    with wrapped(nn.Sequential()) as wrapper:
        assert not wrapper


def test_other_containers() -> None:
    layers = Telling(nn.ModuleList([nn.ReLU()]))
    same = layers
    layers += [nn.Identity()]
    assert (layers, len(layers)) == (same, 2)
    with wrapped(nn.ModuleDict({"a": nn.ReLU()})) as wrapper:
        assert "a" in wrapper
        assert list(wrapper) == ["a"]
        wrapper["b"] = nn.Identity()
        assert list(wrapper.module) == ["a", "b"]


def test_operators(model: Special, wrapper: UBatchWrapper) -> None:
    other = Special(3)
    assert bool(wrapper) is True
    assert (int(wrapper), wrapper < other, other < wrapper, wrapper > other) == (2, True, False, False)
    assert (f"{wrapper:size }", wrapper[1], wrapper["key"], list(wrapper)) == ("size 2", 3, "key?", [0, 1])
    assert wrapper >> 1 is wrapper
    same = wrapper
    wrapper += 2
    assert wrapper is same
    assert model.size == 5
    assert ((wrapper + other).size, (other + wrapper).size, (wrapper + wrapper).size) == (8, 8, 10)
    assert type(wrapper + other) is Special
    for wrong in (operator.sub, operator.lt, operator.add, operator.mul):
        with pytest.raises(TypeError, match=r"unsupported|not supported"):
            wrong(wrapper, 1)
    model.size = 0
    assert not wrapper


def test_operators_call_through_the_wrapper(model: Special, wrapper: UBatchWrapper) -> None:
    torch.testing.assert_close(wrapper @ X, model.linear(X))
    torch.testing.assert_close(X.tolist() @ wrapper, model.linear(X))
    assert wrapper.statistics().engaged == 2


def test_contexts(model: Special, wrapper: UBatchWrapper) -> None:
    with wrapper as entered:
        assert entered is wrapper
    with wrapper:
        raise KeyError
    with pytest.raises(ValueError, match="mine"), wrapper:
        raise ValueError("mine")
    assert model.log == ["enter", "exit", "enter", "KeyError", "enter", "ValueError"]


def test_asynchronous_methods(model: Special, wrapper: UBatchWrapper) -> None:
    async def use() -> None:
        async with wrapper as entered:
            assert entered is wrapper
        assert (await wrapper, [number async for number in wrapper]) == (2, [0, 1])
        assert await wrapper.loaded() is wrapper
        assert [number async for number in wrapper.stream()] == [3]

    asyncio.run(use())
    assert model.log == ["left"]


def test_functions_that_run_later_are_still_known_as_such(wrapper: UBatchWrapper) -> None:
    assert inspect.isgeneratorfunction(wrapper.rows)
    assert inspect.iscoroutinefunction(wrapper.loaded)
    assert asyncio.iscoroutinefunction(wrapper.loaded)
    assert inspect.isasyncgenfunction(wrapper.stream)
    assert not inspect.isgeneratorfunction(wrapper.grow)
    assert list(inspect.signature(wrapper.rows).parameters) == ["x"]
    assert wrapper.rows == wrapper.rows
    assert wrapper.rows.__name__ == "rows"


def test_equality_and_hash() -> None:
    one, same, two = (Telling(Equal(value)) for value in (1, 1, 2))  # torch's `modules` needs a hash, these have none
    assert one == same
    assert one != two
    assert one == Equal(1)
    assert Equal(1) == one
    assert one != 1
    assert not isinstance(one, Hashable)
    with pytest.raises(TypeError, match="unhashable type: 'Telling'"):
        hash(one)
    with wrapped(Hashed(1)) as hashed:
        assert hash(hashed) == hash(1)
        assert {Hashed(1): "found"}[hashed] == "found"
    with wrapped(nn.ReLU()) as plain, wrapped(plain.module) as another:
        assert plain == plain
        assert plain != another
        assert len({plain, another}) == 2


def test_methods_are_looked_up_on_the_type(model: Special) -> None:
    model.__dict__["__int__"] = lambda: 9
    with wrapped(model) as wrapper:
        assert int(wrapper) == int(model) == 2


# ----------------------------------------------------------------------------------------------------------- the class


def test_the_class_is_the_modules(model: Special, wrapper: UBatchWrapper) -> None:
    assert isinstance(wrapper, Special)
    assert wrapper.__class__ is Special
    assert isinstance(wrapper, UBatchWrapper)
    assert not isinstance(wrapper, Equal)
    assert issubclass(type(wrapper), UBatchWrapper)
    assert (type(wrapper).__name__, type(wrapper).__qualname__) == ("UBatchWrapper", "UBatchWrapper")
    assert (type(wrapper).__module__, type(wrapper).__doc__) == (UBatchWrapper.__module__, UBatchWrapper.__doc__)
    assert repr(wrapper) == f"UBatchWrapper({model!r})"
    assert nn.Sequential(wrapper)[0] is wrapper
    assert {"statistics", "linear", "grow", "__matmul__"} <= set(dir(wrapper))


def test_a_class_per_set_of_special_methods(wrapper: UBatchWrapper) -> None:
    with wrapped(nn.Linear(3, 3)) as plain:
        assert type(plain) is UBatchWrapper
        assert isinstance(plain, nn.Linear)
    with wrapped(Special()) as other:
        assert type(other) is type(wrapper)
    again = type(wrapper)(nn.Linear(3, 3))
    assert type(again) is UBatchWrapper
    assert not hasattr(again, "__int__")


def test_a_class_that_torch_gives_the_module() -> None:
    with torch.no_grad(), wrapped(nn.Sequential(nn.Linear(3, 3))) as wrapper:
        assert wrapper[0:0] is not wrapper
        model = wrapper.module
        model.register_buffer("scale", torch.ones(3))
        parametrize.register_parametrization(wrapper, "scale", nn.Softplus(), unsafe=True)
        assert wrapper.__class__ is type(model)
        assert type(model).__name__ == "ParametrizedSequential"
        torch.testing.assert_close(wrapper.scale, nn.functional.softplus(torch.ones(3)))
        assert len(wrapper) == len(model)
        assert wrapper.append(nn.ReLU()) is wrapper
        parametrize.remove_parametrizations(wrapper, "scale")
        assert type(model) is wrapper.__class__ is nn.Sequential


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, through_pickle])
def test_copies(model: Special, wrapper: UBatchWrapper, duplicate: Callable[[Any], Any]) -> None:
    del model.kept  # a copy of a method brings its module along
    settings = wrapper.ubatch_config
    twin = duplicate(wrapper)
    assert type(twin) is type(wrapper)
    assert twin.ubatch_config == settings
    assert (int(twin), twin.module is model) == (2, duplicate is copy.copy)
    twin.grow()
    assert model.size == (3 if duplicate is copy.copy else 2)
    assert type(duplicate(twin)) is type(wrapper)
    torch.testing.assert_close(twin @ X, model.linear(X))
    twin.close()


# -------------------------------------------------------------------------------------------------------- what it tells


@pytest.fixture
def telling(model: Special) -> Telling:
    return Telling(model)


def test_own_methods_are_watched(model: Special, telling: Telling) -> None:
    assert telling.grow() is telling
    assert telling.told() == ["grow begins", "grow ends"]
    telling.twice(X)
    assert telling.told() == ["twice begins", "call", "call", "twice ends"], "the methods inside are the module's"
    telling.kept()
    assert (telling.told(), model.size) == (["kept begins", "kept ends"], 5)


def test_special_methods_are_watched(telling: Telling) -> None:
    int(telling)
    telling += 1
    assert telling.told() == ["__int__ begins", "__int__ ends", "__iadd__ begins", "__iadd__ ends"]
    with telling:
        assert telling.told() == ["__enter__ begins", "__enter__ ends"]
    assert telling.told() == ["__exit__ begins", "__exit__ ends"]


def test_torchs_methods_and_attributes_are_told(telling: Telling) -> None:
    telling.eval().requires_grad_(False)
    telling.state_dict()
    telling.size = 3
    assert telling.told() == ["eval", "requires_grad_", "attribute 'size' was set"]


@pytest.mark.parametrize("name", ["rows", "loaded", "stream", "stored"])
def test_code_that_runs_later_is_told_when_it_is_asked_for(telling: Telling, name: str) -> None:
    later = getattr(telling, name)(*([X] if name == "rows" else []))
    assert telling.told() == [f"{name} begins", f"{name} ends", name]
    if name == "loaded":
        assert asyncio.run(later) is telling
    if name in ("rows", "stored"):
        assert (len(list(later)), telling.told()) == (4, ["call"])


def test_iteration_is_no_change(telling: Telling) -> None:
    assert (list(telling), telling.told()) == ([0, 1], ["__iter__ begins", "__iter__ ends"])


def test_an_error_goes_through_the_watch(model: Special) -> None:
    seen: list[BaseException] = []

    class Catching(Telling):
        @contextmanager
        def _ubatch_watching(self, how: str) -> Iterator[None]:
            try:
                yield
            except AttributeError as error:
                seen.append(error)
                raise

    model.size = None
    with pytest.raises(TypeError):
        Catching(model).grow()
    del model.size
    with pytest.raises(AttributeError):
        Catching(model).grow()
    assert len(seen) == 1


def test_a_kept_method_is_watched_without_its_wrapper(model: Special) -> None:
    told: list[str] = []

    class Noting(Telling):
        @contextmanager
        def _ubatch_watching(self, how: str) -> Iterator[None]:
            told.append(how)
            yield

    method = Noting(model).grow
    gc.collect()
    assert isinstance(method(), Noting)
    assert told == ["grow"]


def test_by_default_nothing_is_watched(model: Special) -> None:
    wrapper = StandIn(model)
    with wrapper._ubatch_watching("anything") as nothing:
        assert nothing is None
    assert int(UBatchWrapper(model, UBatchConfig())) == 2
