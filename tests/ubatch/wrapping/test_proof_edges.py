"""Cases that a proof must detect: groups of rows, masks, hidden state, and changes after the proof."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, Plain, assert_same, rows, seen, wrapped

from ubatch import (
    DeclineReason,
)


def equal_thrice(function: Callable[..., Any], *calls: tuple[Any, ...]) -> tuple[int, int, dict[DeclineReason, int]]:
    """Every call equal to the bare one; what the wrapper has seen."""
    with wrapped(Plain(function), **FIRST) as wrapper:
        for args in calls:
            assert_same(wrapper(*copy.deepcopy(args)), function(*copy.deepcopy(args)))
        return seen(wrapper)


@pytest.mark.long
def test_groups_of_neighbouring_rows_are_not_cut_unseen() -> None:
    def centred(x: Tensor, size: int) -> Tensor:
        group = torch.arange(len(x)) // size
        total = torch.zeros(int(group.max()) + 1, x.shape[1]).index_add(0, group, x)
        return x - total[group]

    for size in (2, 3):
        for count in range(2, 25):
            engaged, _, _ = equal_thrice(lambda x, size=size: centred(x, size), *[(torch.randn(count, 5),)] * 3)
            assert not engaged, (size, count)


def test_what_is_masked_does_not_hide_the_rest() -> None:
    keep = torch.ones(8, 6, dtype=torch.bool)
    keep[:, 3] = False
    for fill in (-1e9, torch.finfo(torch.float32).min, 1e4):
        for dtype in (torch.float32, torch.bfloat16):
            fitting = max(fill, torch.finfo(dtype).min)
            depends = equal_thrice(
                lambda x, keep, fill=fitting: x.softmax(0).masked_fill(~keep, fill),
                *[(torch.randn(8, 6).to(dtype), keep)] * 4,
            )
            assert depends[0] == 0
            fine = equal_thrice(
                lambda x, keep, fill=fitting: x.softmax(1).masked_fill(~keep, fill),
                *[(torch.randn(8, 6).to(dtype), keep)] * 4,
            )
            assert fine[0] > 0


def test_keywords_may_come_in_any_order() -> None:
    module = Plain(lambda a, b: a @ b.T)
    with wrapped(module, **FIRST) as wrapper:
        for first, second in ((8, 3), (8, 3), (4, 8)):
            a, b = torch.randn(first, 5), torch.randn(second, 5)
            torch.testing.assert_close(wrapper(b=b, a=a), a @ b.T)
            torch.testing.assert_close(wrapper(a=a, b=b), a @ b.T)


def test_another_function_is_another_call() -> None:
    functions = [lambda t: t.relu(), lambda t: t.softmax(0)]
    x = torch.randn(8, 5)
    equal_thrice(lambda x, fn: fn(x), *[(x, function) for function in functions for _ in range(3)])


def test_an_output_list_may_have_another_length() -> None:
    with torch.inference_mode():
        calls = [(torch.randn(8, length, 3),) for length in (4, 4, 5, 6, 4)]
        assert equal_thrice(lambda x: [part * 2 for part in x.unbind(1)], *calls) == (4, 1, {})


def test_lanes_that_disagree_for_once_run_whole_in_inference_mode() -> None:
    ones = torch.ones(8, 4)
    mixed = torch.cat([ones[:4], -ones[:4]])
    with torch.inference_mode():
        engaged, proved, declined = equal_thrice(lambda x: (x * 2, bool((x > 0).any())), (ones,), (ones,), (mixed,))
    assert (engaged, proved, declined) == (1, 1, {DeclineReason.CANNOT_MERGE: 1})


def test_a_lane_that_raises_after_the_proof_runs_whole() -> None:
    def even(x: Tensor) -> Tensor:
        if len(x) == 4:
            raise ValueError("four")
        return x * 2

    assert equal_thrice(even, (rows(16),), (rows(16),), (rows(8),)) == (1, 1, {DeclineReason.LANE_FAILED: 1})


def test_modules_whose_weights_come_with_the_first_call() -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(4):
            x = torch.randn(8, 4)
            torch.testing.assert_close(wrapper(x), module(x))
        assert wrapper.statistics().engaged >= 1


def test_training_through_what_writes_to_its_argument() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            wrapper(torch.randn(8, 4)).pow(2).sum().backward()
        assert seen(wrapper) == (0, 0, {DeclineReason.GRADIENTS: 3})


class Held(nn.Module):
    """Keeps a number in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = SimpleNamespace(calls=0)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.own.calls += 1
        return x * self.weight


class Averaged(nn.Module):
    """Changes a weight where autograd does not look."""

    def __init__(self, replaced: bool) -> None:
        super().__init__()
        self.weight, self.replaced = nn.Parameter(torch.ones(4)), replaced

    def forward(self, x: Tensor) -> Tensor:
        if self.replaced:
            self.weight = nn.Parameter(self.weight.detach() * 0.9)
        else:
            self.weight.data.mul_(0.9)
        return x * self.weight


@pytest.mark.parametrize("make", [Held, lambda: Averaged(True), lambda: Averaged(False)])
def test_state_in_other_places(make: Callable[[], nn.Module]) -> None:
    bare = make()
    with wrapped(copy.deepcopy(bare), **FIRST) as wrapper:
        for _ in range(3):
            x = torch.randn(8, 4)
            assert_same(wrapper(x), bare(x))
            assert torch.equal(wrapper.module.weight, bare.weight)
        assert seen(wrapper) == (0, 0, {DeclineReason.MODULE_KEEPS_STATE: 3})
        assert getattr(wrapper.module, "own", None) == getattr(bare, "own", None)


@dataclass
class Doubling:
    """Is another one when it is made anew."""

    x: Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


class Tagged(list):  # type: ignore[type-arg]
    """A list with an attribute."""


def test_outputs_that_cannot_be_made_anew() -> None:
    x = torch.randn(8, 4)
    with wrapped(Plain(Doubling), **FIRST) as wrapper:
        for _ in range(3):
            assert torch.equal(wrapper(x).x, x * 2)

    def tagged(x: Tensor) -> Tagged:
        made = Tagged([x * 2, x])
        made.tag = "t"
        return made

    with wrapped(Plain(tagged), **FIRST) as wrapper:
        for _ in range(3):
            assert wrapper(x).tag == "t"


def test_arguments_that_overlap_are_written_to_whole() -> None:
    def forward(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    with wrapped(Plain(forward), **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(16), rows(16))
        one, other = rows(17), rows(17)
        assert torch.equal(wrapper(one[:-1], one[1:]), forward(other[:-1], other[1:]))


def test_what_changes_the_modules_structure_is_proved_anew() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with wrapped(module, **FIRST) as wrapper:
        wrapper(x)
        wrapper(x)
        wrapper.add_module("1", nn.Softmax(0))
        torch.testing.assert_close(wrapper(x), module(x))
