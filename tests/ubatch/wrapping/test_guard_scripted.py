"""Submodules that torch.jit has compiled: their attributes lie in C++, and are guarded like others."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from wrapping import FIRST, rows, wrapped

from ubatch import DeclineReason

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Inner(nn.Module):
    """Counts in every way that a scripted module can, once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.log = 0, [0]
        self.held = torch.zeros(())
        self.replaced = torch.zeros(())
        self.register_buffer("buffer", torch.zeros(()))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, late: int) -> Tensor:
        if late == 1:
            self.count += 1
        elif late == 2:
            self.log.append(len(self.log))
        elif late == 3:
            self.held += 1
        elif late == 4:
            self.replaced = self.replaced + 1
        elif late == 5:
            self.buffer += 1
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module, *, given: bool = True) -> None:
        super().__init__()
        self.inner = inner
        late: list[int] = []
        self.late, self.given = lambda: late, given

    def forward(self, x: Tensor) -> Tensor:
        late = self.late()
        return self.inner(x, late[0] if late else 0) if self.given else self.inner(x)


def reloaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)


READ: dict[int, Callable[[nn.Module], float]] = {
    1: lambda inner: inner.count,
    2: lambda inner: len(inner.log) - 1,
    3: lambda inner: inner.held.item(),
    4: lambda inner: inner.replaced.item(),
    5: lambda inner: inner.buffer.item(),
}


@pytest.mark.parametrize("late", READ)
@pytest.mark.parametrize("prepare", [lambda module: module, reloaded], ids=["scripted", "loaded"])
def test_what_a_scripted_submodule_counts_is_counted_once(
    late: int, prepare: Callable[[torch.jit.ScriptModule], nn.Module]
) -> None:
    module = Outer(prepare(torch.jit.script(Inner()))).eval()
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(2):
            wrapper(rows(8))
        assert wrapper.statistics().engaged == 1, "a scripted submodule overlaps"
        module.late().append(late)
        wrapper(rows(8))
        assert READ[late](module.inner) == 1
        assert wrapper.statistics().declined[DeclineReason.MODULE_KEEPS_STATE] == 1


class Accumulating(nn.Module):
    """Adds up what it has seen, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * 2


def test_a_traced_submodule_that_counts_is_not_split() -> None:
    module = Outer(torch.jit.trace(Accumulating().eval(), rows(8)), given=False).eval()
    before = module.inner.seen.item()
    with wrapped(module, **FIRST) as wrapper:
        for _ in range(3):
            wrapper(rows(8))
        assert module.inner.seen.item() - before == 3
        assert wrapper.statistics().declined[DeclineReason.MODULE_KEEPS_STATE] == 3
