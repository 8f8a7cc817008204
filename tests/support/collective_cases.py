"""Every collective, whoever is asked: its call, what a rank gives and gets, and torch's own of the kind.

A collective is added here once; its values are compared in every dtype, inside lanes and outside, and its gradients of
first and second order, forward-mode gradients and transforms with slopes and with torch's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as torchs
from torch import Tensor, nn

import ubatch
from ubatch import CommGroup

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MOVED = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64, *FP8)
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Collective:
    """A collective of one shape.

    Attributes:
        call: on this rank's input.
        shapes: of every rank's input.
        reference: this rank's result, from every rank's input.
        sums: whether it adds up, which not every dtype can.
        torchs: the same by torch.distributed.nn, if it has such a function.
    """

    name: str
    call: Call
    shapes: Sequence[Sequence[int]]
    reference: Callable[[list[Tensor]], Tensor]
    sums: bool = False
    torchs: Call | None = None

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """Those that it can carry."""
        return SUMMED if self.sums else MOVED


def collectives(group: CommGroup) -> Iterator[Collective]:
    """All of them, as this rank sees them; every rank has the same list."""
    yield from _sums(group)
    yield from _gathers(group)
    yield from _swaps(group)


def _sums(group: CommGroup) -> Iterator[Collective]:
    rank, size = group.rank, group.size

    def reduce(x: Tensor) -> Tensor:
        return ubatch.all_reduce(x, group)

    for shape in ((3, 4), (5,), (), (0, 4), (2, 3, 2)):
        yield Collective(f"all_reduce {shape}", reduce, [shape] * size, _total, True, torchs.all_reduce)
    yield Collective("all_reduce strided", lambda x: reduce(x.t()), [(3, 4)] * size, lambda xs: _total(xs).t(), True)

    def theirs(x: Tensor) -> Tensor:
        into = torch.empty_like(x[: len(x) // size])
        return torchs.reduce_scatter(into, list(x.chunk(size)), group=dist.group.WORLD)

    for dim, shape in ((0, (2 * size, 3)), (1, (3, 2 * size, 2)), (-1, (3, size)), (0, (0, 3))):
        yield Collective(
            f"reduce_scatter {shape} {dim}",
            lambda x, d=dim: ubatch.reduce_scatter(x, group, d),
            [shape] * size,
            lambda xs, d=dim: _total(xs).chunk(size, d)[rank] if xs[0].numel() else xs[0],
            True,
            theirs if shape == (2 * size, 3) else None,
        )
    for sizes in ([1, 4, 0][:size], [5, 0, 0][:size]):
        yield Collective(
            f"reduce_scatter {sizes}",
            lambda x, s=sizes: ubatch.reduce_scatter(x, group, sizes=s),
            [(sum(sizes), 2)] * size,
            lambda xs, s=sizes: _total(xs).split(s)[rank],
            True,
        )


def _gathers(group: CommGroup) -> Iterator[Collective]:
    size = group.size

    def theirs(x: Tensor) -> Tensor:
        return torch.cat(torchs.all_gather(x, group=dist.group.WORLD))

    for dim, shape in ((0, (2, 3)), (1, (2, 3)), (-1, (2, 1, 4)), (-2, (2, 3, 2)), (0, (3,)), (0, (0, 2)), (1, (0, 2))):
        yield Collective(
            f"all_gather {shape} {dim}",
            lambda x, d=dim: ubatch.all_gather(x, group, d),
            [shape] * size,
            lambda xs, d=dim: _cat(xs, d),
            torchs=theirs if (dim, shape) == (0, (2, 3)) else None,
        )
    for dim, sizes in ((0, [1, 0, 4][:size]), (1, [1, 3, 0][:size])):
        yield Collective(
            f"all_gather {sizes} {dim}",
            lambda x, d=dim, s=sizes: ubatch.all_gather(x, group, d, sizes=s),
            [(each, 2) if dim == 0 else (2, each) for each in sizes],
            lambda xs, d=dim: _cat(xs, d),
        )


def _swaps(group: CommGroup) -> Iterator[Collective]:
    rank, size = group.rank, group.size
    of_all = range(size)
    tables = {  # [from][to] rows
        "even": [[2] * size for _ in of_all],
        "uneven": [[(3 * a + b) % 4 for b in of_all] for a in of_all],
        "one way": [[2 if a == 0 and b == size - 1 else 0 for b in of_all] for a in of_all],
        "nothing": [[0] * size] * size,
    }
    for (name, rows), tail in ((table, tail) for table in tables.items() for tail in ((), (3,), (2, 2))):
        sent, received = rows[rank], [rows[other][rank] for other in of_all]
        sizes = (None, None) if name == "even" else (received, sent)

        def theirs(x: Tensor, sizes: tuple[list[int], list[int]] = (received, sent)) -> Tensor:
            into = x.new_empty(sum(sizes[0]), *x.shape[1:])
            return torchs.all_to_all_single(into, x, *sizes, group=dist.group.WORLD)

        yield Collective(
            f"all_to_all {name} {tail}",
            lambda x, s=sizes: ubatch.all_to_all_single(x, group, *s),
            [(sum(rows[other]), *tail) for other in of_all],
            lambda xs, t=rows: _cat([x.split(own)[rank] for x, own in zip(xs, t, strict=True)], 0),
            torchs=theirs if name in ("even", "uneven") and tail == (3,) else None,
        )


def _total(inputs: list[Tensor]) -> Tensor:
    return torch.stack(inputs).sum(0, dtype=inputs[0].dtype)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, also of dtypes that it does not know."""
    plain = [x.view(torch.uint8) if x.dtype in FP8 else x for x in tensors]
    return torch.cat(plain, dim).view(tensors[0].dtype)


class Mlp(nn.Module):
    """A dense MLP, column then row parallel: each rank has its part of the hidden units, one all-reduce per layer."""

    def __init__(self, group: CommGroup | None, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.group = group
        generator = torch.Generator().manual_seed(7)
        up = torch.randn(layers, 4 * width, width, generator=generator, dtype=torch.float64) / 3
        down = torch.randn(layers, width, 4 * width, generator=generator, dtype=torch.float64) / 6
        if group is not None:
            up, down = up.chunk(group.size, 1)[group.rank], down.chunk(group.size, 2)[group.rank]
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            y = torch.tanh(x @ up.T) @ down.T
            x = x + (y if self.group is None else ubatch.all_reduce(y, self.group))
        return x
