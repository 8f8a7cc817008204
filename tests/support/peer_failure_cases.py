"""What tests of failing ranks share: a module that raises where it is told to, and stop watches.

Every payload of `Probe` says which step, layer, lane and rank sent it, and every receiver checks that: no tensor of one
step is ever paired with another step's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import ubatch
from ubatch import (
    CommGroup,
    UBatchConfig,
    UBatchWrapper,
    dbo_current_ubatch_id,
    dbo_enabled,
    launch_all_gather,
)

GROUP_TIMEOUT_S = 30.0
PROMPT_S = 10.0
"""A failed peer must be noticed well within the group's time-out; measured: a slice of 0.2 s and a little."""
LAYERS = 4


class BoomError(Exception):
    """What a test's module raises."""


@dataclass(frozen=True)
class Failure:
    """Where a rank's module raises: in which lane, before which layer (`LAYERS`: after the last one)."""

    rank: int
    lane: int
    layer: int
    launched: bool = False  # with a transfer in the air


class Probe(nn.Module):
    """Layers of collectives that check whom and when each tensor comes from. Output: the input times the ranks."""

    def __init__(self, group: CommGroup) -> None:
        super().__init__()
        self.group = group
        self.step = 0
        self.failures: tuple[Failure, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        lane = dbo_current_ubatch_id()
        for layer in range(LAYERS):
            self.maybe_fail(lane, layer)
            self.exchange(lane, layer)
            x = ubatch.all_reduce(x, self.group) / self.group.size
        self.maybe_fail(lane, LAYERS)
        return x * self.group.size

    def maybe_fail(self, lane: int, layer: int) -> None:
        for failure in self.failures:
            if (failure.rank, failure.lane if dbo_enabled() else 0, failure.layer) == (self.group.rank, lane, layer):
                if failure.launched:
                    launch_all_gather(torch.tensor([[self.step, -1, -1, -1]]), self.group)
                raise BoomError(f"step {self.step}, lane {lane}, layer {layer}")

    def exchange(self, lane: int, layer: int) -> None:
        size = self.group.size
        mine = torch.tensor([[self.step, layer, lane, self.group.rank]]).repeat(size, 1)
        received = ubatch.all_to_all_single(mine, self.group).tolist()
        assert received == [[self.step, layer, lane, rank] for rank in range(size)], f"paired with {received}"


@dataclass
class Told:
    """In place of a connection: keeps what a `PeerWatch` tells it."""

    dead: list[int] = field(default_factory=list)
    forged: list[str] = field(default_factory=list)

    def adopt_failure(self) -> bool:
        return False

    def lost(self, rank: int) -> None:
        self.dead.append(rank)

    def fail(self, what: str) -> None:
        self.forged.append(what)


def wrap(group: CommGroup) -> tuple[UBatchWrapper, Probe]:
    probe = Probe(group)
    return UBatchWrapper(probe, UBatchConfig(verify="off", dbo_prefill_token_threshold=4, group=group)), probe


def healthy_step(model: UBatchWrapper, probe: Probe, step: int, rows: int = 8) -> None:
    probe.step, probe.failures = step, ()
    x = torch.arange(rows, dtype=torch.float32).repeat(2, 1).T.contiguous()
    assert torch.equal(model(x), x * probe.group.size)


@contextmanager
def promptly(seconds: float = PROMPT_S) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


@contextmanager
def lasting(seconds: float) -> Iterator[None]:
    """It takes this long, and not much longer."""
    begun = time.monotonic()
    yield
    assert seconds <= time.monotonic() - begun < seconds + 5.0
