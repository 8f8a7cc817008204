"""What a stand-in tells of its module's methods: which of them may have changed it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from special_methods import Special, Telling, X

from ubatch import UBatchConfig, UBatchWrapper
from ubatch.wrapping.stand_in import StandIn

pytestmark = pytest.mark.long


@pytest.fixture
def model() -> Special:
    return Special(2).eval()


@pytest.fixture
def telling(model: Special) -> Telling:
    return Telling(model)


def test_own_methods_are_watched(model: Special, telling: Telling) -> None:
    assert telling.grow() is telling
    assert telling.told() == ["grow begins", "grow ends"]
    telling.twice(X)
    assert telling.told() == ["twice begins", "call", "call", "twice ends"], "the methods inside are the module's"
    telling.kept()
    assert telling.told() == ["kept begins", "kept ends"]
    assert model.size == 5


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
        assert len(list(later)) == 4
        assert telling.told() == ["call"]


def test_iteration_is_no_change(telling: Telling) -> None:
    assert list(telling) == [0, 1]
    assert telling.told() == ["__iter__ begins", "__iter__ ends"]


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
