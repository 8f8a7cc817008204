"""What the guard cannot see: the exceptions that `docs/wrapping.md` names, each shown.

A test that fails here is good news: one exception less. Take it out of the document, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, rows, wrapped

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
