"""A module with special methods of all kinds, and a stand-in that notes what it is told of them."""

import asyncio
import functools
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ubatch.wrapping.stand_in import StandIn

X = torch.arange(12.0).reshape(4, 3)


class Telling(StandIn):
    """A stand-in that runs the module unsplit, and notes what it is told."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._ubatch_keep("_ubatch_told", [])

    def forward(self, *args: Any) -> Any:
        self._ubatch_told.append("call")
        return self._ubatch_model(*args)

    @contextmanager
    def _ubatch_watching(self, how: str) -> Iterator[None]:
        self._ubatch_told.append(f"{how} begins")
        yield
        self._ubatch_told.append(f"{how} ends")

    def _ubatch_module_changed(self, how: str) -> None:
        self._ubatch_told.append(how)

    def told(self) -> list[str]:
        """What it was told since it was asked last."""
        told = list(self._ubatch_told)
        self._ubatch_told.clear()
        return told


class Special(nn.Module):
    """A module with special methods of all kinds. It is as big as its `size`."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.size = size
        self.log: list[str] = []
        self.kept = self.grow

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def grow(self, by: int = 1) -> Any:
        self.size += by
        return self

    def twice(self, x: Tensor) -> Tensor:
        return self.grow()(x) + self(x)

    def __bool__(self) -> bool:
        return self.size > 0

    def __int__(self) -> int:
        return self.size

    def __lt__(self, other: Any) -> bool:
        return self.size < other.size if isinstance(other, Special) else NotImplemented

    def __matmul__(self, x: Tensor) -> Tensor:
        return self(x)

    def __rmatmul__(self, x: Any) -> Any:
        return self(torch.tensor(x))

    def __add__(self, other: Any) -> Any:
        return type(self)(self.size + other.size) if isinstance(other, type(self)) else NotImplemented

    def __iadd__(self, other: int) -> Any:
        return self.grow(other)

    def __sub__(self, other: Any) -> Any:
        return NotImplemented

    @functools.singledispatchmethod
    def __getitem__(self, key: Any) -> str:
        return f"{key}?"

    @__getitem__.register
    def _(self, key: int) -> int:
        return key + self.size

    __rshift__ = functools.partialmethod(grow)

    def __enter__(self) -> Any:
        self.log.append("enter")
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> bool:
        self.log.append("exit" if kind is None else kind.__name__)
        return kind is KeyError

    def __format__(self, how: str) -> str:
        return f"{how}{self.size}"

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *failed: Any) -> None:
        self.log.append("left")

    def __await__(self) -> Generator[Any, None, int]:
        yield from asyncio.sleep(0).__await__()
        return self.size

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in self:
            yield number

    def rows(self, x: Tensor) -> Iterator[Tensor]:
        yield from self(x)

    async def loaded(self) -> Any:
        return self.grow()

    async def stream(self) -> AsyncIterator[int]:
        yield self.size

    def stored(self) -> Iterator[Tensor]:
        return self.rows(X)
