"""Modules and inputs for the tests of the wrapper."""

import torch
from torch import Tensor, nn

from ubatch import Point, dbo_register_recv_hook, dbo_yield

LAYER = (Point.ATTN_PREPARE, Point.SELECT, Point.DISPATCH, Point.COMBINE, Point.OUTPUT, "my own", Point.LAYER)
LAYERS = 3


class Model(nn.Module):
    """Some layers, each passing every point, with something to receive after dispatch and combine."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.register_buffer("scale", torch.tensor(0.5))
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            received: list[Tensor] = []
            for point in LAYER:
                if point in (Point.DISPATCH, Point.COMBINE):
                    dbo_register_recv_hook(lambda y=x, to=received: to.append(y))
                dbo_yield(point)
            assert len(received) == 2
            x = x + torch.tanh(layer(received[-1])) * self.scale * self.factor
        return x

    def twice(self, x: Tensor) -> Tensor:
        return self(x) + self.forward(x)

    @property
    def width(self) -> int:
        return int(self.layers[0].in_features)


def x_of(rows: int = 6, *beside: int) -> Tensor:
    return torch.randn(rows, *(beside or (4,)))


def identity(x: Tensor) -> Tensor:
    return x * 1
