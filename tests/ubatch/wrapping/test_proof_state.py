"""The proof and state: a module that keeps state, random numbers, memory that lanes would overwrite."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, Plain, made, outcome, rows, seen, wrapped

from ubatch import DeclineReason, dbo_enabled

pytestmark = pytest.mark.long


def static(self: Any, x: Tensor) -> Tensor:
    """Writes its output into a buffer of its own."""
    out = self.out[: len(x)]
    return torch.mul(x, 2, out=out) if not out.requires_grad else out


def keys(self: Any, x: Tensor) -> Tensor:
    """Keeps keys between calls, in a plain object."""
    self.cache.keys = torch.cat([self.cache.keys, x])
    return x + self.cache.keys.sum()


def normed(self: Any, x: Tensor) -> Tensor:
    """Running statistics that no version counter sees."""
    return nn.functional.batch_norm(x, self.mean, self.var, training=True)


def written(self: Any, x: Tensor) -> Tensor:
    """Writes to a buffer behind autograd's back."""
    self.count.data += 1
    return x * 2


def trained(self: Any, x: Tensor) -> Tensor:
    """Changes a weight as it goes."""
    with torch.no_grad():
        self.weight.mul_(1.5)
    return x * self.weight


def trained_unseen(self: Any, x: Tensor) -> Tensor:
    """Changes a weight where autograd does not look."""
    self.weight.data.mul_(0.9)
    return x * self.weight


def replaced(self: Any, x: Tensor) -> Tensor:
    self.weight = nn.Parameter(self.weight.detach() * 0.9)
    return x * self.weight


def held(self: Any, x: Tensor) -> Tensor:
    """Keeps a number in an object of its own."""
    self.own.calls += 1
    return x * (1 + self.own.calls)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


KEEPING = [
    made(static, out=lambda: torch.zeros(64, 3)),
    made(keys, cache=lambda: SimpleNamespace(keys=torch.zeros(0, 3))),
    made(normed, mean=lambda: torch.zeros(3), var=lambda: torch.ones(3)),
    made(written, count=lambda: torch.zeros(2)),
    made(trained, weight=weight),
    made(trained_unseen, weight=weight),
    made(replaced, weight=weight),
    made(held, own=lambda: SimpleNamespace(calls=0)),
]


@pytest.mark.parametrize("make", KEEPING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_module_that_keeps_state_runs_whole_and_once(make: Callable[[], nn.Module], mode: Any) -> None:
    if mode is torch.enable_grad and make in KEEPING[:4]:
        mode = torch.no_grad  # what they write to records no gradients
    with mode():
        calls = [(rows(8) + number,) for number in range(4)]
        assert outcome(make(), *calls) == (0, 0, {DeclineReason.MODULE_KEEPS_STATE: 4})


def test_what_is_made_ready_once_is_no_state() -> None:
    def lazy(self: Any, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(3.0)
        return x + self.table

    calls = [(rows(8),)] * 3
    assert outcome(made(lazy, table=lambda: None)(), *calls) == (1, 1, {DeclineReason.MODULE_KEEPS_STATE: 1})


def test_random_numbers_are_drawn_as_often_as_by_the_module() -> None:
    module = Plain(lambda x: x + torch.rand(1))
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            torch.manual_seed(3)
            result, after = wrapper(rows(8)), torch.rand(1)
            torch.manual_seed(3)
            assert torch.equal(result, rows(8) + torch.rand(1))
            assert torch.equal(after, torch.rand(1))
        assert len(module.calls) == 3
        assert seen(wrapper) == (0, 0, {DeclineReason.DRAWS_RANDOM: 3})

    def only_in_lanes(x: Tensor) -> Tensor:
        return x + 0 * torch.rand(1) if dbo_enabled() else x * 1

    with wrapped(Plain(only_in_lanes), **FIRST) as wrapper:
        torch.manual_seed(3)
        wrapper(rows(8))
        after = torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(after, torch.rand(1)), "what the proof draws, it gives back"
