"""Overlapped calls that do what their proof did not show: found, put back and run whole, or refused by name."""

import collections
import copy
import dataclasses
import functools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, LARGE, Late, Plain, assert_same, made, proved, rows, seen, wrapped

from ubatch import Decision, DeclineReason, SideEffectError, UBatchSlice, dbo_enabled, dbo_yield, set_forward_context
from ubatch.schedules.forward_context import ForwardContext, ForwardMode
from ubatch.wrapping.effects.random_state import RandomState

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_grad")]
KEEPS_STATE = DeclineReason.MODULE_KEEPS_STATE


ACTS: dict[str, tuple[Callable[[Any, Tensor], object], DeclineReason]] = {
    "a counter": (lambda m, x: setattr(m, "count", m.count + 1), KEEPS_STATE),
    "a counter of another class": (lambda m, x: setattr(m, "count", float(m.count + 1)), KEEPS_STATE),
    "a new attribute": (lambda m, x: setattr(m, "last", len(x)), KEEPS_STATE),
    "a list": (lambda m, x: m.items.append(len(x)), KEEPS_STATE),
    "a dict": (lambda m, x: m.own.update(calls=m.own["calls"] + 1), KEEPS_STATE),
    "a buffer": (lambda m, x: m.seen.add_(1), KEEPS_STATE),
    "a buffer, by .data": (lambda m, x: m.seen.data.add_(1), KEEPS_STATE),
    "a buffer, by numpy": (lambda m, x: np.add(m.seen.numpy(), 1, out=m.seen.numpy()), KEEPS_STATE),
    "a weight": (lambda m, x: m.linear.bias.mul_(1.5), KEEPS_STATE),
    "another buffer": (lambda m, x: setattr(m, "seen", m.seen + len(x)), KEEPS_STATE),
    "torch's random numbers": (lambda m, x: torch.rand(2), DeclineReason.DRAWS_RANDOM),
    "Python's": (lambda m, x: random.random(), DeclineReason.DRAWS_RANDOM),
    "numpy's": (lambda m, x: np.random.rand(), DeclineReason.DRAWS_RANDOM),
    "an argument": (lambda m, x: x.mul_(2), DeclineReason.ARGUMENTS_CHANGED),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", ACTS)
def test_what_lanes_change_late_is_put_back_and_done_once(what: str, inference: bool) -> None:
    act, reason = ACTS[what]
    with torch.inference_mode() if inference else torch.no_grad():
        module = Late(act).eval()
        bare = copy.deepcopy(module)
        bare.late()[0] = False
        with proved(module) as wrapper:
            module.late()[0] = bare.late()[0] = True
            for calls in (1, 2):
                x, y = rows(8), rows(8)
                before = RandomState()
                expected = bare(y)
                after = RandomState()
                before.restore()
                assert_same(wrapper(x), expected)
                assert not after.moved(), "as many random numbers as the bare module drew"
                assert torch.equal(x, y)
                assert_same(module.state(), bare.state())
                assert seen(wrapper) == (1, 1, {reason: calls}), "found by the guard, then retired or found by a proof"


@pytest.mark.parametrize("act", [lambda m, x: m.table.add_(1), lambda m, x: x.neg_()], ids=["buffer", "argument"])
def test_what_has_no_copy_is_refused_by_name(act: Callable[[Any, Tensor], object]) -> None:
    module = Late(act).eval()
    with proved(module, lambda: rows(LARGE)) as wrapper:
        module.late()[0] = True
        with pytest.raises(SideEffectError, match=r"(table|'x').*cannot be put back"):
            wrapper(rows(LARGE))
        before = module.table.clone()
        wrapper(rows(LARGE))
        assert module.table.sub(before).unique().tolist() in ([0.0], [1.0]), "whole, once"


def test_a_module_that_writes_and_then_raises_is_not_run_over_its_own_writes() -> None:
    def forward(x: Tensor, fail: list[bool]) -> Tensor:
        if fail[0] and dbo_enabled():
            x.neg_()
            raise ValueError("late")
        return x * 2

    fail = [False]
    for count in (8, LARGE):
        fail[0] = False
        with proved(Plain(lambda x: forward(x, fail)), lambda: rows(count)) as wrapper:  # noqa: B023
            fail[0] = True
            x = rows(count)
            if count == 8:
                assert torch.equal(wrapper(x), rows(8) * 2)
                assert torch.equal(x, rows(8))
            else:
                with pytest.raises(ValueError, match="late") as caught:
                    wrapper(x)
                assert any("'x', which cannot be put back" in note for note in caught.value.__notes__)


def test_a_flag_proves_for_itself() -> None:
    """Values that make another call of it: 0, 1, -1, infinities and NaN, in numbers and 0-dim tensors."""
    module = Plain(lambda x, scale: x * scale if scale == scale and abs(scale) <= 1 else x - x.mean(0))
    values = (0, 1, -1, 0.0, 1.0, torch.tensor(0), torch.tensor(1.0), float("inf"), float("nan"), -float("inf"))
    with wrapped(module, **FIRST) as wrapper:
        for value in (*values, *values):
            x = torch.randn(8, 3)
            torch.testing.assert_close(wrapper(x, value), module(x, value))
        assert (wrapper.statistics().proved, wrapper.statistics().engaged) == (7, 7)


@pytest.mark.parametrize(
    ("off", "on"),
    [
        (np.bool_(False), np.bool_(True)),
        (np.float32(0), np.float32(1)),
        (frozenset(), frozenset({1})),
        (set(), {1}),
        (range(0), range(1)),
        (slice(0), slice(1)),
        (bytearray(), bytearray(b"1")),
        (collections.deque(), collections.deque([1])),
        (np.zeros(1), np.ones(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_flags_of_other_classes_prove_for_themselves(off: Any, on: Any) -> None:
    """Where the caller says that all lanes may share them."""

    def forward(x: Tensor, flag: Any) -> Tensor:
        is_on = flag.stop if isinstance(flag, slice) else len(flag) if hasattr(flag, "__len__") else bool(flag)
        is_on = bool(flag[0]) if isinstance(flag, np.ndarray) else is_on
        return x - x.mean(0) if is_on else x * 2

    module = Plain(forward)
    with wrapped(module, split_dims={"flag": None}, **FIRST) as wrapper:
        for flag in (off, off, off, on, on):
            torch.testing.assert_close(wrapper(rows(8), copy.copy(flag)), module(rows(8), flag))
        assert seen(wrapper) == (2, 1, {DeclineReason.ROWS_DEPEND: 2})


def test_generation_with_a_growing_position_overlaps() -> None:
    """By a method that calls the module with a position that grows."""

    class Generating(nn.Module):
        center = False

        def forward(self, x: Tensor, position: int) -> Tensor:
            y = x * 0.5 + position
            return y - y.mean(0) if self.center else y

        def generate(self, x: Tensor, length: int) -> Tensor:
            for position in range(2, length):
                x = self(x, position).clamp(-1, 1)
            return x

        def set_center(self, center: bool) -> None:
            self.center = center

    module = Generating().eval()
    with wrapped(module, **FIRST) as wrapper:
        for calls in (1, 2, 3):
            torch.testing.assert_close(wrapper.generate(rows(8), 22), module.generate(rows(8), 22))
            assert seen(wrapper) == (20 * calls - 4, 4, {}), "its own method changed nothing"
        wrapper.set_center(True)
        torch.testing.assert_close(wrapper(rows(8), 2), module(rows(8), 2))
        assert wrapper.statistics().declined == {DeclineReason.ROWS_DEPEND: 1}, "proved anew"


def test_values_that_never_come_twice_run_whole() -> None:
    with wrapped(Plain(lambda x, name: x * 2), **FIRST) as wrapper:
        for number in range(40):
            wrapper(rows(8), f"request {number}")
        assert seen(wrapper) == (0, 16, {DeclineReason.CANNOT_PROVE: 24})
        assert "none of them twice" in str(wrapper.statistics().last_reason)
        wrapper(rows(8), "request 3")
        assert wrapper.statistics().engaged == 1


def test_a_failed_proof_leaves_no_trace_of_its_lanes() -> None:
    def noting(self: Any, x: Tensor) -> Tensor:
        self.size, self.sizes = len(x), (len(x),)
        return x * 2

    module = made(noting, size=int, sizes=tuple)()
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(4):
            wrapper(rows(64))
            assert (module.size, module.sizes) == (64, (64,))
        assert seen(wrapper) == (0, 0, {KEEPS_STATE: 4})


def test_a_proof_that_finds_other_values_puts_back_what_its_lanes_left() -> None:
    def scaling(self: Any, x: Tensor) -> Tensor:
        """Doubles an attribute for as long as it runs; lanes in between double it twice, and halve it once."""
        self.scale, before = self.scale * 2, self.scale
        dbo_yield()
        y = x * self.scale
        self.scale = before
        return y

    module = made(scaling, scale=lambda: 1.0)()
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(4):
            assert_same(wrapper(rows(8)), rows(8) * 2)
            assert module.scale == 1.0
        assert wrapper.statistics().engaged == 0


# ------------------------------------------------------------------------------------------------ between two points


Own = dataclasses.make_dataclass("Own", ["pad"], slots=True)


@pytest.mark.parametrize("in_object", [False, True])
def test_what_one_lane_leaves_for_later_is_not_overwritten(in_object: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        """Leaves something on itself across a point, and clears it."""
        own = self.own if in_object else self
        own.pad = bool((x[:, 0] < 0).any())
        dbo_yield()
        result = self.linear(x)
        result = result.masked_fill((x[:, :1] < 0), 0) if own.pad else result
        own.pad = False
        return result

    module = made(forward, linear=lambda: nn.Linear(3, 3), own=lambda: Own(False), pad=lambda: False)()
    with proved(module) as wrapper:
        wrapper(rows(8))
        assert wrapper.statistics().engaged == 2
        x = rows(8)
        x[1, 0] = -1
        torch.testing.assert_close(wrapper(x), module(x))
        assert seen(wrapper) == (2, 1, {KEEPS_STATE: 1})


# ------------------------------------------------------------------------------------------------- who else is running


def test_random_numbers_drawn_elsewhere_are_not_given_back() -> None:
    """A helper thread draws while a call runs, once in a proof's lanes and once in an overlapped call."""
    draw, drawn = threading.Event(), threading.Event()
    numbers: list[float] = []

    def helper() -> None:
        for _ in range(2):
            draw.wait(20)
            draw.clear()
            sum(index * index for index in range(200_000))  # a thread that draws uses its processor
            numbers.append(torch.rand(1).item())
            drawn.set()

    wanted = [False]

    def forward(x: Tensor) -> Tensor:
        if wanted[0] and dbo_enabled():
            wanted[0] = False
            draw.set()
            assert drawn.wait(20)
            drawn.clear()
        return x * 2

    thread = threading.Thread(target=helper)
    thread.start()
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    with wrapped(Plain(forward), **FIRST) as wrapper:
        wanted[0] = True
        wrapper(rows(8))  # in the proof
        wrapper(rows(8))
        wrapper(rows(8))
        assert wrapper.statistics().engaged == 1, "one draw elsewhere does not end overlap for good"
        wanted[0] = True
        assert torch.equal(wrapper(rows(8)), rows(8) * 2)
        thread.join(20)
        assert numbers == expected, "no number came twice"
        wrapper(rows(8))  # proves again
        wrapper(rows(8))
        assert wrapper.statistics().engaged == 2
        assert wrapper.statistics().declined == {DeclineReason.DRAWS_RANDOM: 2}


def test_nothing_is_put_back_while_another_thread_is_in_a_call() -> None:
    inside, leave = threading.Event(), threading.Event()
    late = [False]

    def counting(self: Any, x: Tensor) -> Tensor:
        if late[0] and dbo_enabled() and not inside.is_set():
            inside.set()
            assert leave.wait(20)
        if late[0] and not dbo_enabled():
            self.count += 1
        return self.linear(x)

    module = made(counting, linear=lambda: nn.Linear(3, 3), count=int)()
    with proved(module) as wrapper:
        late[0] = True

        @torch.no_grad()
        def call() -> Tensor:
            return wrapper(rows(8))

        with ThreadPoolExecutor(1) as other:
            outcome = other.submit(call)
            assert inside.wait(20)
            call()
            leave.set()
            assert type(error := outcome.exception(20)) is SideEffectError
        assert module.count == 1, "the other thread's"
        assert "'count'" in str(error)


# ----------------------------------------------------------------------------------------------------- not by a proof


@pytest.mark.parametrize("decision", [None, Decision(True, None, None, ((4, 4),))], ids=["slices", "and a decision"])
def test_slices_of_the_caller_are_guarded(decision: Decision | None) -> None:
    module = Late(lambda m, x: setattr(m, "count", m.count + 1)).eval()
    slices = [UBatchSlice(slice(0, 4), slice(0, 4)), UBatchSlice(slice(4, 8), slice(4, 8))]
    context = ForwardContext(num_tokens=8, mode=ForwardMode.PREFILL, ubatch_slices=slices, decision=decision)
    with wrapped(module, **FIRST) as wrapper, set_forward_context(context):
        torch.testing.assert_close(wrapper(rows(8)), module(rows(8)))
        assert wrapper.statistics().engaged == 1
        module.late()[0] = True
        with pytest.raises(ValueError, match="the module changed 'count'"):
            wrapper(rows(8))
        assert module.count == 0


def test_calls_without_a_proof_are_guarded() -> None:
    module = Late(lambda m, x: setattr(m, "count", m.count + 1)).eval()
    module.late()[0] = True
    with wrapped(module) as wrapper:
        for calls in (1, 2):
            wrapper(rows(8))
            assert module.count == calls
        assert seen(wrapper) == (0, 0, {KEEPS_STATE: 2})


# ------------------------------------------------------------------------------------------------- arguments of a call


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
