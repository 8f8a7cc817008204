"""Cases that a proof must detect: groups of rows, masks, hidden state, and changes after the proof."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, Plain, outcome, proved, rows, seen, wrapped

from ubatch import DeclineReason


@pytest.mark.long
def test_groups_of_neighbouring_rows_are_not_cut_unseen() -> None:
    def centred(x: Tensor, size: int) -> Tensor:
        group = torch.arange(len(x)) // size
        total = torch.zeros(int(group.max()) + 1, x.shape[1]).index_add(0, group, x)
        return x - total[group]

    for size in (2, 3):
        for count in range(2, 25):
            engaged, _, _ = outcome(lambda x, size=size: centred(x, size), *[(torch.randn(count, 5),)] * 3)
            assert not engaged, (size, count)


def test_what_is_masked_does_not_hide_the_rest() -> None:
    keep = torch.ones(8, 6, dtype=torch.bool)
    keep[:, 3] = False
    for fill in (-1e9, torch.finfo(torch.float32).min, 1e4):
        for dtype in (torch.float32, torch.bfloat16):
            fitting = max(fill, torch.finfo(dtype).min)
            for dim in (0, 1):
                masked = lambda x, keep, dim=dim, fill=fitting: x.softmax(dim).masked_fill(~keep, fill)  # noqa: E731
                engaged, _, _ = outcome(masked, *[(torch.randn(8, 6).to(dtype), keep)] * 4)
                assert (engaged > 0) == (dim == 1)


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
    outcome(lambda x, fn: fn(x), *[(x, function) for function in functions for _ in range(3)])


def test_an_output_list_may_have_another_length() -> None:
    with torch.inference_mode():
        calls = [(torch.randn(8, length, 3),) for length in (4, 4, 5, 6, 4)]
        assert outcome(lambda x: [part * 2 for part in x.unbind(1)], *calls) == (4, 1, {})


def test_lanes_that_disagree_for_once_run_whole_in_inference_mode() -> None:
    ones = torch.ones(8, 4)
    mixed = torch.cat([ones[:4], -ones[:4]])
    with torch.inference_mode():
        engaged, proved, declined = outcome(lambda x: (x * 2, bool((x > 0).any())), (ones,), (ones,), (mixed,))
    assert (engaged, proved, declined) == (1, 1, {DeclineReason.CANNOT_MERGE: 1})


def test_a_lane_that_raises_after_the_proof_runs_whole() -> None:
    def even(x: Tensor) -> Tensor:
        if len(x) == 4:
            raise ValueError("four")
        return x * 2

    assert outcome(even, (rows(16),), (rows(16),), (rows(8),)) == (1, 1, {DeclineReason.LANE_FAILED: 1})


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

    with proved(Plain(lambda pair: forward(*pair)), lambda: (rows(16), rows(16))) as wrapper:
        one, other = rows(17), rows(17)
        assert torch.equal(wrapper((one[:-1], one[1:])), forward(other[:-1], other[1:]))


def test_what_changes_the_modules_structure_is_proved_anew() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with proved(module, lambda: x) as wrapper:
        wrapper.add_module("1", nn.Softmax(0))
        torch.testing.assert_close(wrapper(x), module(x))
