"""What the guard cannot see: the exceptions that `docs/wrapping.md` names, each shown.

A test that fails here is good news: one exception less. Take it out of the document, too.
"""

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from wrapping import Late, Plain, made, proved, rows

from ubatch import dbo_enabled

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_grad")]


def count_on_a_tensor(module: Any) -> None:
    module.linear.bias.calls = getattr(module.linear.bias, "calls", 0) + 1


def write_in_inference_mode(module: Any) -> None:
    with torch.inference_mode():
        module.held.add_(1)


@torch.enable_grad()
def learn(module: Any) -> None:
    module.linear(torch.ones(3)).sum().backward()


def gradient(module: Any) -> float:
    return 0.0 if module.linear.bias.grad is None else module.linear.bias.grad[0].item()


OUTSIDE: list[int] = []
UNSEEN: dict[str, tuple[Callable[[Any], object], Callable[[Any], float], float]] = {
    "a write by .data to a weight": (lambda m: m.linear.bias.data.add_(1), lambda m: m.linear.bias[0].item(), 2),
    "a write by numpy to a large buffer": (lambda m: m.table.numpy().__iadd__(1), lambda m: m.table[0, 0].item(), 2),
    "a write to a large inference tensor": (write_in_inference_mode, lambda m: m.held[0].item(), 2),
    "an attribute of a tensor": (count_on_a_tensor, lambda m: getattr(m.linear.bias, "calls", 0), 2),
    "a write to a large array": (lambda m: m.array.__iadd__(1), lambda m: m.array[0], 2),
    "a container of very many items": (lambda m: m.many.append(m.many.pop() + 1), lambda m: m.many[-1], 2),
    "what an object in C keeps to itself": (
        lambda m: setattr(m.shared, "value", m.shared.value + 1),
        lambda m: m.shared.value,
        2,
    ),
    "a gradient that the call computes": (learn, gradient, 2),
    "an effect outside of the module": (lambda m: OUTSIDE.append(1), lambda m: len(OUTSIDE), 2),
    "a switch that the second lane turns back": (
        lambda m: m.linear.train(not m.linear.training),
        lambda m: float(m.linear.training),
        0,
    ),
}
"""What a call does, how it is read, and by how much it has changed after an overlapped call that nothing stopped."""


@pytest.mark.parametrize("what", UNSEEN)
def test_what_is_done_in_every_lane_unseen(what: str) -> None:
    act, read, changed = UNSEEN[what]
    module = Late(lambda m, x: act(m)).eval()
    module.array, module.many, module.shared = np.zeros(20_000), [0] * 70_000, multiprocessing.Value("i", 0)
    with torch.inference_mode():
        module.held = torch.zeros(20_000)
    with proved(module) as wrapper:
        module.late()[0] = True
        before = read(module)
        wrapper(rows(8))
        assert (wrapper.statistics().engaged, read(module) - before) == (2, pytest.approx(changed))


def test_what_another_thread_sets_during_a_call_that_is_put_back() -> None:
    """The other thread does not call the wrapper, so nobody knows that it is at work."""

    def act(module: Any, x: Tensor) -> None:
        module.count += 1
        if dbo_enabled() and module.count == 1:
            other = threading.Thread(target=setattr, args=(module, "note", "set by another thread"))
            other.start()
            other.join()

    module = Late(act).eval()
    module.note = "as it was"
    with proved(module) as wrapper:
        module.late()[0] = True
        wrapper(rows(8))
    assert (module.count, module.note) == (1, "as it was")


def test_a_limit_on_the_number_of_rows() -> None:
    with proved(Plain(lambda x: (x * 2)[:10])) as wrapper:
        assert len(wrapper(rows(16))) == 16, "the module alone gives ten"


def test_a_coupling_in_the_backward() -> None:
    def centring(x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient - gradient.mean(0))
        return y

    module = Plain(centring)
    with torch.enable_grad(), proved(module, lambda: rows(8).requires_grad_()) as wrapper:
        gradients = []
        for call in (wrapper, module):
            x = rows(8).requires_grad_()
            (call(x) * rows(8)).sum().backward()
            gradients.append(x.grad)
        assert wrapper.statistics().engaged == 2
        assert not torch.allclose(*gradients)


class Scales:
    """Reads a `threading.local` for a module that does not hold it."""

    def __init__(self) -> None:
        self.local = threading.local()

    def scale(self) -> float:
        return getattr(self.local, "scale", 1.0)


SCALES = Scales()


def test_a_local_of_the_thread_that_a_global_object_reads() -> None:
    with proved(made(lambda self, x: x * SCALES.scale())()) as wrapper:
        SCALES.local.scale = 3.0
        assert torch.equal(wrapper(rows(8)), rows(8)), "the lanes' own is 1"
        assert torch.equal(wrapper.module(rows(8)), rows(8) * 3)


def test_outputs_are_new_tensors() -> None:
    def twins(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        return y, y, x[:, :2]

    with proved(Plain(twins)) as wrapper:
        x = rows(8)
        one, other, view = wrapper(x)
        assert wrapper.statistics().engaged == 2
        assert one is not other
        assert view.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_a_hook_on_a_submodule() -> None:
    module = nn.Sequential(nn.Linear(3, 3)).eval()
    with proved(module) as wrapper:
        module[0].register_forward_hook(lambda part, given, output: output - output.mean(0))
        wrapper(rows(8))
        assert wrapper.statistics().engaged == 2, "not proved anew"
