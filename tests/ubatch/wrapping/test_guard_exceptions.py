"""What the guard cannot see: the exceptions that `docs/wrapping.md` names, each shown.

A test that fails here is good news: one exception less. Take it out of the document, too.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, Plain, rows, wrapped

from ubatch import dbo_enabled

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Late(nn.Module):
    """Does something besides its result once it is told to."""

    def __init__(self, act: Callable[[Late], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("large", torch.zeros(20_000))
        late: list[bool] = []
        self.late, self.act = lambda: late, lambda: act(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.late():
            self.act()
        return self.linear(x)


def twice(act: Callable[[Late], object], read: Callable[[Late], float]) -> float:
    """How often the act was done by one overlapped call that nothing stopped."""
    module = Late(act).eval()
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        module.late().append(True)
        before = read(module)
        wrapper(rows(8))
        assert wrapper.statistics().engaged == 2
        return read(module) - before


def test_a_write_by_data_to_a_weight() -> None:
    assert twice(lambda m: m.linear.bias.data.add_(1), lambda m: m.linear.bias[0].item()) == pytest.approx(2)


def test_a_write_by_numpy_to_a_large_buffer() -> None:
    assert twice(lambda m: m.large.numpy().__iadd__(1), lambda m: m.large[0].item()) == 2


def test_a_write_to_a_large_inference_tensor() -> None:
    with torch.inference_mode():
        table = torch.zeros(20_000)
        module = Late(lambda m: m.large.add_(1)).eval()
        module.large = table
        with wrapped(module, **FIRST) as wrapper:
            for _ in range(2):
                wrapper(rows(8))
            module.late().append(True)
            wrapper(rows(8))
            assert (wrapper.statistics().engaged, table[0].item()) == (2, 2)


def test_an_attribute_of_a_tensor() -> None:
    def count(module: Late) -> None:
        module.linear.bias.calls = getattr(module.linear.bias, "calls", 0) + 1

    assert twice(count, lambda m: getattr(m.linear.bias, "calls", 0)) == 2


def test_a_write_to_a_large_array() -> None:
    def count(module: Late) -> None:
        module.array += 1

    module = Late(count).eval()
    module.array = np.zeros(20_000)
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        module.late().append(True)
        wrapper(rows(8))
        assert (wrapper.statistics().engaged, module.array[0]) == (2, 2)


def test_a_write_to_a_container_of_very_many_items() -> None:
    def count(module: Late) -> None:
        module.items[-1] += 1

    module = Late(count).eval()
    module.items = [0] * 70_000
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        module.late().append(True)
        wrapper(rows(8))
        assert (wrapper.statistics().engaged, module.items[-1]) == (2, 2)


def test_what_an_object_in_c_keeps_to_itself() -> None:
    def count(module: Late) -> None:
        module.shared.value += 1

    module = Late(count).eval()
    module.shared = multiprocessing.Value("i", 0)
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        module.late().append(True)
        wrapper(rows(8))
        assert (wrapper.statistics().engaged, module.shared.value) == (2, 2)


def test_a_switch_that_the_second_lane_turns_back() -> None:
    def flip(module: Late) -> None:
        module.linear.train(not module.linear.training)

    assert twice(flip, lambda m: float(m.linear.training)) == 0


def test_what_another_thread_sets_during_a_call_that_is_put_back() -> None:
    """The other thread does not call the wrapper, so nobody knows that it is at work."""

    def act(module: Late) -> None:
        module.count += 1
        if dbo_enabled() and module.count == 1:
            other = threading.Thread(target=setattr, args=(module, "note", "set by another thread"))
            other.start()
            other.join()

    module = Late(act).eval()
    module.count, module.note = 0, "as it was"
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        module.late().append(True)
        wrapper(rows(8))
    assert (module.count, module.note) == (1, "as it was")


def test_a_gradient_that_the_call_computes() -> None:
    def learn(module: Late) -> None:
        with torch.enable_grad():
            module.linear(torch.ones(3)).sum().backward()

    assert twice(learn, lambda m: 0.0 if m.linear.bias.grad is None else m.linear.bias.grad[0].item()) == 2


def test_a_limit_on_the_number_of_rows() -> None:
    with wrapped(Plain(lambda x: (x * 2)[:10]), **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        assert len(wrapper(rows(16))) == 16, "the module alone gives ten"


def test_a_coupling_in_the_backward() -> None:
    def centring(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient - gradient.mean(0))
        return y

    with torch.enable_grad(), wrapped(Plain(centring), **FIRST) as wrapper:
        gradients = []
        for _ in range(2):
            x = rows(8).requires_grad_()
            (wrapper(x) * rows(8)).sum().backward()
            gradients.append(x.grad)
        assert wrapper.statistics().engaged == 1
        assert not torch.allclose(*gradients)


class Scales:
    """Reads a `threading.local` for a module that does not hold it."""

    def __init__(self) -> None:
        self.local = threading.local()

    def scale(self) -> float:
        return getattr(self.local, "scale", 1.0)


SCALES = Scales()


class Scaling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * SCALES.scale()


def test_a_local_of_the_thread_that_a_global_object_reads() -> None:
    with wrapped(Scaling(), **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        SCALES.local.scale = 3.0
        assert torch.equal(wrapper(rows(8)), rows(8)), "the lanes' own is 1"
        assert torch.equal(wrapper.module(rows(8)), rows(8) * 3)


def test_outputs_are_new_tensors() -> None:
    def twins(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return y, y, x[:, :2]

    with wrapped(Plain(twins), **FIRST) as wrapper:
        for _ in range(2):
            x = rows(8)
            one, other, view = wrapper(x)
        assert wrapper.statistics().engaged == 1
        assert one is not other
        assert view.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_an_effect_outside_of_the_module() -> None:
    calls: list[int] = []
    assert twice(lambda m: calls.append(1), lambda m: len(calls)) == 2


def test_a_hook_on_a_submodule() -> None:
    module = nn.Sequential(nn.Linear(3, 3)).eval()
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        module[0].register_forward_hook(lambda part, given, output: output - output.mean(0))
        wrapper(rows(8))
        assert wrapper.statistics().engaged == 2, "not proved anew"
