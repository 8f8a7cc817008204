"""What is done to a call's arguments is put back, or the call declines; unusual arguments decline, or overlap."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, Late, Plain, proved, rows, seen, wrapped

from ubatch import DeclineReason, SideEffectError

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_grad")]


def test_arguments_that_are_not_what_they_seem_decline() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    word = type("Word", (str,), {"__hash__": None})("a")
    with wrapped(Plain(lambda x, other: x * 2), **FIRST) as wrapper:
        for other in (circle, word, nn.UninitializedParameter()):
            assert torch.equal(wrapper(rows(8), other), rows(8) * 2)
        assert seen(wrapper)[0] == 0


def test_an_argument_at_an_odd_place_in_memory_overlaps() -> None:
    with proved(nn.Linear(3, 3), lambda: rows(9)[1:]):
        pass


def test_what_is_done_to_an_argument_itself_is_not_lost() -> None:
    def forces(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.requires_grad_(True)
            return torch.autograd.grad((x**2).sum(), x)[0]

    def marking(x: Tensor) -> Tensor:
        x.mark = "seen"
        return x * 2

    for function, read in ((forces, lambda x: x.requires_grad), (marking, lambda x: getattr(x, "mark", None))):
        with wrapped(Plain(function), **FIRST) as wrapper:
            for _ in range(3):
                x, y = rows(8), rows(8)
                assert torch.equal(wrapper(x), function(y))
                assert read(x) == read(y)
            assert seen(wrapper) == (0, 0, {DeclineReason.ARGUMENTS_CHANGED: 3})


def test_a_write_that_became_part_of_a_graph_is_not_put_back() -> None:
    """The values could be, but gradients would go through the lanes' write, too."""
    module = Late(lambda m, x: x.neg_()).eval()
    with torch.enable_grad(), proved(module, lambda: rows(8).requires_grad_() * 1) as wrapper:
        module.late()[0] = True
        with pytest.raises(SideEffectError, match="'x', which cannot be put back"):
            wrapper(rows(8).requires_grad_() * 1)
        leaf, other = rows(8).requires_grad_(), rows(8).requires_grad_()
        wrapper(leaf * 1).sum().backward()
        module(other * 1).sum().backward()
        assert torch.equal(leaf.grad, other.grad)


def test_a_strided_argument_is_put_back() -> None:
    module = Late(lambda m, x: x.mul_(2)).eval()
    with proved(module, lambda: rows(8, 6)[:, ::2]) as wrapper:
        module.late()[0] = True
        x, y = rows(8, 6)[:, ::2], rows(8, 6)[:, ::2]
        torch.testing.assert_close(wrapper(x), module(y))
        assert torch.equal(x, y)


def test_arguments_that_are_methods_are_told_apart_by_what_they_belong_to() -> None:
    class Centring:
        on = False

        def apply(self, y: Tensor) -> Tensor:
            return y - y.mean(0) if self.on else y

    centring, module = Centring(), Plain(lambda x, function: function(x * 2))
    partial = functools.partial(lambda y, of: of.apply(y), of=centring)
    with wrapped(module, **FIRST) as wrapper:
        for function in (centring.apply, partial):
            centring.on = False
            for _ in range(2):
                wrapper(rows(8), function)
            centring.on = True
            torch.testing.assert_close(wrapper(rows(8), function), module(rows(8), function))
        assert wrapper.statistics().engaged == 2
