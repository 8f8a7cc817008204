"""Tracers that record a module's operations cannot see into lanes: they are refused, or their result is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.fx.experimental.proxy_tensor import make_fx
from wrapping import wrapped

from ubatch import ConfigError, UBatchWrapper, dbo_yield

pytestmark = pytest.mark.long

X = torch.arange(24.0).reshape(6, 4)
Y = torch.arange(32.0).reshape(8, 4).flip(0)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        dbo_yield()
        return torch.relu(self.linear(x))

    def through_forward(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def __matmul__(self, x: Tensor) -> Tensor:
        return self(x)

    def __len__(self) -> int:
        return 3


@pytest.fixture
def wrapper() -> Iterator[UBatchWrapper]:
    with wrapped(Small().eval()) as made:
        yield made


WAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "script": ("torch.jit.script", torch.jit.script),
    "script a parent": ("torch.jit.script", lambda wrapper: torch.jit.script(nn.Sequential(wrapper))),
    "trace": ("torch.jit.trace", lambda wrapper: torch.jit.trace(wrapper, X)),
    "trace a parent": ("torch.jit.trace", lambda wrapper: torch.jit.trace(nn.Sequential(wrapper), X)),
    "trace the method": ("torch.jit.trace", lambda wrapper: torch.jit.trace(wrapper.forward, X)),
    "export": ("torch.export", lambda wrapper: torch.export.export(wrapper, (X,))),
    "fx": ("torch.fx", torch.fx.symbolic_trace),
    "make_fx": ("torch.fx", lambda wrapper: make_fx(wrapper)(X)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gradients", [True, False])
def test_recorders_are_refused(wrapper: UBatchWrapper, way: str, gradients: bool) -> None:
    name, record = WAYS[way]
    with torch.set_grad_enabled(gradients):
        with pytest.raises(ConfigError, match=f"{name} cannot see into a UBatchWrapper.*the module itself"):
            record(wrapper)
        torch.testing.assert_close(wrapper(X), wrapper.module(X))
    assert wrapper.statistics().engaged == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("parent", [False, True])
def test_compiled_it_is_right(wrapper: UBatchWrapper, parent: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(nn.Sequential(wrapper) if parent else wrapper, backend="eager")
    with torch.no_grad():
        for x in (X, Y, X[:1], Y, X):
            torch.testing.assert_close(compiled(x), wrapper.module(x))
    assert wrapper.statistics().engaged == 4
    torch.compiler.reset()


@pytest.mark.sample(2)
def test_compiled_code_calls_through_the_wrapper(wrapper: UBatchWrapper) -> None:
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda x: wrapper(x) * len(wrapper),
        lambda x: wrapper @ x,
        lambda x: wrapper.through_forward(x),
    ]
    for use in uses:
        torch.compiler.reset()
        before = wrapper.statistics().engaged
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(use, backend="eager")(X), use(X))
        assert wrapper.statistics().engaged == before + 2
    torch.compiler.reset()


def test_no_single_graph_has_it(wrapper: UBatchWrapper) -> None:
    torch.compiler.reset()
    compiled = torch.compile(wrapper, backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match="disable"):
        compiled(X)
    torch.compiler.reset()
