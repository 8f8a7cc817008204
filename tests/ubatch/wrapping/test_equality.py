"""What counts as equal, in a proof and in a later merge: large values hide nothing, and what was zero tells nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, Plain, assert_same, made, outcome, proved, rows, seen, wrapped

from ubatch import DeclineReason
from ubatch.calls.closeness import Comparison

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_grad")]


def becomes(function: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32, count: int = 16) -> set[str]:
    """What becomes of four calls, each equal to the bare one."""
    module = Plain(function)
    with wrapped(module, **FIRST) as wrapper:
        for number in range(4):
            x = torch.randn(count, 6, generator=torch.Generator().manual_seed(number)).to(dtype)
            result, expected = wrapper(x.clone()), function(x.clone())
            if wrapper.statistics().engaged == 0:
                assert_same(result, expected)
        engaged, _, declined = seen(wrapper)
        return {*map(str, declined), *(["overlaps"] if engaged else [])}


def centred(x: Tensor) -> Tensor:
    return x - 0.2 * x.mean(0)


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "next to a large column": lambda x: torch.cat([x[:, :1] * 1e4, centred(x)], 1),
    "next to five large columns": lambda x: torch.cat([x[:, :5] * 1e4, centred(x)[:, :5]], 1),
    "in one column of many": lambda x: torch.cat([x.repeat(1, 9) * 1e4, centred(x)[:, :1]], 1),
    "next to a large row": lambda x: centred(x) * torch.where(torch.arange(len(x)) == 0, 1e5, 1.0)[:, None],
    "in a vector": lambda x: torch.cat([x[:1, 0] * 1e6, centred(x)[1:, 0]]),
    "by a thousandth": lambda x: x - 1e-3 * x.mean(0),
}


@pytest.mark.parametrize("what", COUPLED)
def test_large_values_hide_no_coupling(what: str) -> None:
    assert becomes(COUPLED[what]) == {DeclineReason.ROWS_DEPEND}


@pytest.mark.parametrize(
    "fine",
    [
        lambda x: torch.cat([x[:, :1] * 1e4, x @ torch.ones(6, 6)], 1),
        lambda x: x.softmax(1).masked_fill(x > 1, -1e9),
        lambda x: (x @ torch.ones(6, 40)).sum(1),
        lambda x: x.double() @ torch.ones(6, 3).double(),
        lambda x: torch.fft.fft(x),
    ],
)
@pytest.mark.parametrize("count", [3, 16, 200])
def test_rounding_is_no_coupling(fine: Callable[[Tensor], Tensor], count: int) -> None:
    assert becomes(fine, count=count) == {"overlaps"}


def doubled(x: Tensor) -> Tensor:
    """The row with the largest norm counts twice: one of many is off, in lanes another one, too."""
    place = x.float().norm(dim=1).argmax()
    return torch.where(torch.arange(len(x))[:, None] == place, 2 * x, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_that_is_off_in_sixteen_bits_must_be_a_near_tie(dtype: torch.dtype) -> None:
    assert becomes(doubled, dtype, 64) == {DeclineReason.ROWS_DEPEND}
    column = lambda x: torch.cat([x[:, :1] * 100, centred(x)], 1)  # noqa: E731
    assert becomes(column, dtype) == {DeclineReason.ROWS_DEPEND}
    assert becomes(lambda x: x * 2, dtype, 64) == {"overlaps"}


def test_an_unused_buffer_in_sixteen_bits_makes_no_call_coarse() -> None:
    module = made(
        lambda self, x: doubled(self.linear(x)),
        linear=lambda: nn.Linear(6, 6),
        unused=lambda: torch.zeros(1000, dtype=torch.float16),
    )
    calls = [(torch.randn(64, 6),) for _ in range(4)]
    assert outcome(module(), *calls) == (0, 0, {DeclineReason.ROWS_DEPEND: 4})


def compared(off: list[int], cut: int, rows: int = 64) -> Comparison:
    """A comparison in which these rows are off."""
    expected = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    got = expected.clone()
    got[off] *= 2
    comparison = Comparison(True, range(rows), cut)
    comparison.tensors("output", expected, got, 0)
    return comparison


@pytest.mark.parametrize(
    ("first", "second", "coupled"),
    [
        (([5], 31), ([], 29), None),
        (([5], 31), ([40], 29), None),
        (([5], 31), ([5, 40], 29), "output"),
        (([31], 31), ([29], 29), "output"),
        (([30], 31), ([29], 29), "output"),
        (([31], 31), ([3], 29), None),
    ],
    ids=["off once", "others are off", "off again", "behind the cut", "at the cut", "at one cut"],
)
def test_the_same_rows_off_under_another_cut_are_a_coupling(first: Any, second: Any, coupled: str | None) -> None:
    assert compared(*first).coupled(compared(*second)) == coupled


def test_rows_are_known_by_their_number_in_the_whole_call() -> None:
    """Where rows were repeated, or have several entries each."""
    one = Comparison(True, [0, 1, 0, 2, 3, 2], 3)
    many = torch.ones(6, 20, 5)
    other = many.clone()
    other[3, 7] = 2
    one.tensors("y", many, other, 0)
    assert one.off == {"y": {2 * 20 + 7}}


# --------------------------------------------------------------------------- equal in both lanes, not in the whole call


TELLS: dict[str, Callable[[Tensor], Any]] = {
    "a count": lambda x: int(x.isnan().sum()),
    "a tensor's count": lambda x: x.isnan().sum(),
    "counts": lambda x: x.isnan().sum(0),
    "indices": lambda x: x.isnan().any(1).nonzero(),
    "a list": lambda x: [index for index, bad in enumerate(x.isnan().any(1).tolist()) if bad],
    "exactly one": lambda x: bool(x.isnan().any(1).sum() == 1),
    "words": lambda x: "x" * int(x.isnan().sum()),
    "a number of values": lambda x: x.nan_to_num()[:, 0].unique().numel(),
    "a message": lambda x: f"{int(x[:, 0].isnan().sum())} bad rows",
    "one of three words": lambda x: ("none", "one", "many")[min(2, int(x[:, 0].isnan().sum()))],
    "counted down": lambda x: torch.full((3,), 5) - x[:, 0].isnan().sum(),
}


@pytest.mark.parametrize("what", TELLS)
def test_what_lanes_agree_on_may_not_be_the_wholes(what: str) -> None:
    """It was zero, empty or the same in the proof; later every lane has one bad row, and the whole two."""
    tells = TELLS[what]
    with proved(Plain(lambda x: (x * 2, tells(x))), lambda: torch.ones(8, 3)) as wrapper:
        x = torch.ones(8, 3)
        x[[1, 5], 0] = float("nan")
        found, expected = wrapper(x)[1], tells(x)
        assert torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
        assert wrapper.statistics().engaged == 1


def test_what_lanes_agree_on_is_taken_if_proofs_had_it() -> None:
    """A value that does not follow the batch may change, as a length does, but each of the first four is proved."""
    module = Plain(lambda x: (x * 2, x.shape[1]))
    with wrapped(module, **FIRST) as wrapper:
        for length in (5, 5, 6, 6, 6, 5, 7, 7, 8, 8, 9, 10):
            assert wrapper(torch.randn(8, length))[1] == length
        assert seen(wrapper) == (5, 4, {DeclineReason.CANNOT_MERGE: 3})


# ------------------------------------------------------------------------------------------------- classes of tensors


class Tag(torch.Tensor):
    """Carries a scale."""


class Untyped(torch.Tensor):
    """Loses its class in every operation."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def scaled(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor) * getattr(x, "scale", 1.0)


@pytest.mark.parametrize("kind", [Tensor, Tag])
def test_attributes_of_an_argument_reach_the_lanes(kind: type[Tensor]) -> None:
    with wrapped(Plain(scaled), **FIRST) as wrapper:
        for scale in (None, None, 3.0, 3.0, 3.0):
            x = rows(8).as_subclass(kind)
            if scale is not None:
                x.scale = scale
            assert torch.equal(wrapper(x), scaled(x))
        assert wrapper.statistics().engaged == 3


def test_an_output_keeps_its_class_and_its_attributes() -> None:
    def marked(x: Tensor) -> Tensor:
        result = x * 2
        result.marks = "yes"
        return result

    for function in (lambda x: (x * 2).as_subclass(Untyped), lambda x: (x * 2).as_subclass(Tag), marked):
        with wrapped(Plain(function), **FIRST) as wrapper:
            for _ in range(3):
                result, expected = wrapper(rows(8)), function(rows(8))
                assert type(result) is type(expected)
                assert vars(result) == vars(expected)


def test_gradients_that_are_asked_for_later_are_another_call() -> None:
    module = made(lambda self, x: self.linear(x.mul_(2)) ** 2, linear=lambda: nn.Linear(3, 3))().requires_grad_(False)
    with torch.enable_grad(), proved(module) as wrapper:
        module.requires_grad_(True)
        wrapper(rows(8)).sum().backward()
        ours = module.linear.weight.grad.clone()
        module.zero_grad()
        module(rows(8)).sum().backward()
        torch.testing.assert_close(ours, module.linear.weight.grad)
