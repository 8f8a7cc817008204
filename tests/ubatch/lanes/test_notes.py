"""Lane information is added to a user's error as a note; an error that refuses notes is raised unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import lane_pool, run
from torch import Tensor
from wrapper_cases import x_of
from wrapping import Plain, wrapped

from ubatch import dbo_register_recv_hook, dbo_yield
from ubatch.errors import describe, note


class Refusing(Exception):
    def add_note(self, text: str) -> None:
        raise RuntimeError("no notes here")


class Shadowing(Exception):
    add_note = None  # type: ignore[assignment]


class Immutable(Exception):
    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__t"):  # Python itself sets the traceback
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


class OwnNotes(Exception):
    __notes__ = ()  # type: ignore[assignment]


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


KINDS = [Refusing, Shadowing, Immutable, OwnNotes, Unprintable]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"schedule": "single_batch"}])
@pytest.mark.parametrize("place", ["lane", "hook"])
def test_the_error_comes_out_as_itself(kind: type[Exception], settings: dict[str, str], place: str) -> None:
    raised: list[Exception] = []
    fails = True

    def failing() -> None:
        raised.append(kind("it"))
        raise raised[-1]

    def forward(x: Tensor) -> Tensor:
        dbo_yield()
        if fails and place == "hook":
            dbo_register_recv_hook(failing)
            dbo_yield()
        elif fails:
            failing()
        return x * 1

    with wrapped(Plain(forward), **settings) as wrapper:
        with pytest.raises(kind) as caught:
            wrapper(x_of(4))
        assert caught.value is raised[0]
        fails = False
        assert torch.equal(wrapper(torch.ones(2, 3)), torch.ones(2, 3))


def test_notes_are_added_where_they_can_be() -> None:
    for kind in (Refusing, Shadowing, Unprintable, ValueError):
        error = kind("it")
        note(error, "noted")
        assert error.__notes__ == ["noted"]
    assert describe(Unprintable()) == "Unprintable (which cannot be printed)"
    assert describe(ValueError("x")) == "ValueError('x')"


def test_a_second_error_that_cannot_be_printed() -> None:
    def first() -> None:
        dbo_yield()
        raise ValueError("first")

    def second() -> None:
        try:
            while True:
                dbo_yield()
        finally:
            raise Unprintable

    with lane_pool() as pool, pytest.raises(ValueError, match="first") as caught:
        run(pool, first, second)
    assert "lane 1 also raised Unprintable (which cannot be printed) while it unwound" in caught.value.__notes__
