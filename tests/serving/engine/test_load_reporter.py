"""A rank tells its experts' load when a part of a window is over and before it pauses, and never waits in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe import ExpertPlacement
from moe.balance import Ints
from serving.engine.rank.loads import LoadReporter
from serving.engine.rank.tracing import EXPERT_LOADS, StepTracer
from serving.engine.wire.messages import Loads, decode_from_engine, encode
from ubatch.streams import HostCopy
from ubatch.trace import read_chrome


@dataclass(eq=False)
class LateCopy(HostCopy):
    """A copy that arrives when the test says so."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(0))
    has_arrived: bool = False
    waited: bool = False

    def wait(self) -> Tensor:
        self.waited = not self.has_arrived
        return self.counts

    def done(self) -> bool:
        return self.has_arrived


class Device:
    """Counts that lie on a device: every step adds `1` to all of them."""

    def __init__(self, every: int = 3) -> None:
        self.counts = torch.zeros(2, 1, 2, dtype=torch.int64)
        self.copies: list[LateCopy] = []
        self.reporter = LoadReporter(self._copy, ExpertPlacement.default(1, 2, 2), every)

    def _copy(self) -> HostCopy:
        self.copies.append(LateCopy(self.counts, counts=self.counts.clone()))
        return self.copies[-1]

    def step(self, tokens: int = 1) -> None:
        self.counts += tokens
        self.reporter.stepped()

    def news(self, *, now: bool = False) -> list[tuple[int, int]]:
        return [(steps, int(counts.sum())) for steps, counts in self.reporter.news(now=now)]


def test_a_report_is_told_once_it_has_arrived() -> None:
    device = Device()
    for _ in range(3):
        assert device.news() == []
        device.step()
    (copy,) = device.copies
    for _ in range(4):  # it is late: the next one has to wait for it
        assert device.news() == []
        device.step()
    assert device.copies == [copy]
    copy.has_arrived = True
    assert device.news() == [(3, 12)]
    assert not copy.waited
    device.step()
    device.copies[-1].has_arrived = True
    assert device.news() == [(5, 20)]
    assert device.news() == []


def test_before_a_pause_all_is_told_at_once() -> None:
    device = Device()
    for _ in range(5):
        device.step()
    assert device.news(now=True) == [(3, 12), (2, 8)]
    assert device.news(now=True) == []
    device.step(0)
    assert device.news(now=True) == [(1, 0)], "the steps count, though this rank had no token"
    device.step()
    assert device.news(now=True) == [(1, 4)]


def test_total_leaves_the_reports_alone() -> None:
    device = Device()
    device.step()
    assert device.reporter.total().sum() == 4
    assert device.news(now=True) == [(1, 4)]


def test_a_profile_has_the_load_of_its_time(tmp_path: Path) -> None:
    device = Device()
    device.step(100)
    tracer = StepTracer(loads=device.reporter)
    tracer.start_profile()
    device.step(7)
    assert tracer.stop_profile(tmp_path / "rank-0.json", 0) is None
    (rank,) = read_chrome(tmp_path / "rank-0.json")
    told = rank.extra[EXPERT_LOADS]
    assert told == {"counts": [[[7, 7]], [[7, 7]]], "slots": [[0, 1]], "num_ranks": 2}


def test_a_kind_without_tokens_travels_as_nothing() -> None:
    counts: Ints = np.array([[[0, 0, 0]], [[1, 2, 2**40]]])
    message = Loads.of(3, 7, counts)
    assert message.prefill == b""
    read = decode_from_engine(encode(message))
    assert read == message
    assert isinstance(read, Loads)
    np.testing.assert_array_equal(read.counts((1, 3)), counts)
