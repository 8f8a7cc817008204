"""Values that stages hand over are left once, taken once, and not forgotten."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from functools import partial

import pytest

from ubatch.lanes.handover import Handover, HandoverError, Left


class Thing:
    """Something that can be watched."""


@dataclass(frozen=True, slots=True)
class Layer(Handover):
    rows: Left[Thing | None] = field(default_factory=partial(Left, "rows"))
    sums: Left[Thing] = field(default_factory=partial(Left, "sums"))


def test_once_and_nothing_is_kept() -> None:
    layer, thing = Layer(), Thing()
    layer.rows.leave(thing)
    assert layer.rows.take() is thing
    seen = weakref.ref(thing)
    del thing
    gc.collect()
    assert seen() is None
    layer.end()


def test_none_may_be_left_too() -> None:
    layer = Layer()
    layer.rows.leave(None)
    with pytest.raises(HandoverError, match=r"nobody took 'rows'\."):
        layer.end()
    assert layer.rows.take() is None
    layer.end()


def test_overwriting_and_missing_are_named() -> None:
    layer = Layer()
    with pytest.raises(HandoverError, match="'sums' was taken before it was left"):
        layer.sums.take()
    layer.sums.leave(Thing())
    with pytest.raises(HandoverError, match="'sums' was left for a later stage twice"):
        layer.sums.leave(Thing())
    layer.sums.take()
    with pytest.raises(HandoverError, match="'sums' was taken twice"):
        layer.sums.take()
    with pytest.raises(HandoverError, match="'sums' was left for a later stage twice"):
        layer.sums.leave(Thing())


def test_all_that_was_forgotten_is_named() -> None:
    layer = Layer()
    layer.rows.leave(Thing())
    layer.sums.leave(Thing())
    with pytest.raises(HandoverError, match="nobody took 'rows', 'sums'"):
        layer.end()
