"""The proof and state: a module that keeps state, random numbers, memory that lanes would overwrite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, Plain, assert_same, rows, seen, wrapped

from ubatch import (
    DeclineReason,
    dbo_enabled,
)

pytestmark = pytest.mark.long


class Static(nn.Module):
    """Writes its output into a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("out", torch.zeros(64, 3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.out[: len(x)]
        return torch.mul(x, 2, out=out) if not out.requires_grad else out


class Keys(nn.Module):
    """Keeps keys between calls, in a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = type("Cache", (), {})()
        self.cache.keys = torch.zeros(0, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.keys = torch.cat([self.cache.keys, x])
        return x + self.cache.keys.sum()


class Normed(nn.Module):
    """Running statistics that no version counter sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True)


class Written(nn.Module):
    """Writes to a buffer behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count.data += 1
        return x * 2


class Parametric(nn.Module):
    """Changes a weight as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(1.5)
        return x * self.weight


@pytest.mark.parametrize("kind", [Static, Keys, Normed, Written, Parametric])
@pytest.mark.parametrize("inference", [False, True])
@torch.no_grad()
def test_a_module_that_keeps_state_runs_whole_and_once(kind: type[nn.Module], inference: bool) -> None:
    bare = kind()
    with wrapped(copy.deepcopy(bare), **FIRST) as wrapper, torch.inference_mode(inference):
        for number in range(4):
            x = rows(8) + number
            assert_same(wrapper(x), bare(x))
            for one, other in zip(wrapper.buffers(), bare.buffers(), strict=True):
                assert torch.equal(one, other)
        assert seen(wrapper) == (0, 0, {DeclineReason.MODULE_KEEPS_STATE: 4})


def test_what_is_made_ready_once_is_no_state() -> None:
    class Lazy(nn.Module):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.arange(3.0)
            return x + self.table

    with wrapped(Lazy(), **FIRST) as wrapper:
        for _ in range(3):
            assert torch.equal(wrapper(rows(8)), rows(8) + torch.arange(3.0))
        assert seen(wrapper) == (1, 1, {DeclineReason.MODULE_KEEPS_STATE: 1})


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


def test_memory_outside_the_module_that_lanes_would_overwrite() -> None:
    out = torch.zeros(64, 3)

    def forward(x: Tensor) -> Tensor:
        out[: len(x)] = x * 2
        return out[: len(x)]

    with wrapped(Plain(forward), **FIRST) as wrapper:
        for number in range(3):
            x = rows(8) + number
            assert torch.equal(wrapper(x), x * 2)
        assert seen(wrapper) == (0, 0, {DeclineReason.MODULE_KEEPS_STATE: 3})
