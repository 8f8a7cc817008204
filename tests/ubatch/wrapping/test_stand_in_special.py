"""Special methods, and the class of a stand-in; `test_stand_in_watch` has what it tells of methods that change it."""

from __future__ import annotations

import asyncio
import copy
import inspect
import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
from special_methods import Special, Telling, X
from torch import Tensor, nn
from torch.nn.utils import parametrize
from wrapping import through_pickle, wrapped

from ubatch import UBatchWrapper

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
        assert len(wrapper) == 2
        assert list(wrapper) == [first, second]
        assert wrapper[0] is first
        assert wrapper[-1] is second
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
        assert len(wrapper + wrapper) == 6
        assert len(2 * wrapper) == 6
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
    assert int(wrapper) == 2
    assert (wrapper < other, other < wrapper, wrapper > other) == (True, False, False)
    assert f"{wrapper:size }" == "size 2"
    assert (wrapper[1], wrapper["key"]) == (3, "key?")
    assert list(wrapper) == [0, 1]
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
        assert await wrapper == 2
        assert [number async for number in wrapper] == [0, 1]
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
