"""Devices whose times are made up, for what chooses the fastest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ubatch.kernels import autotuner, candidates


@dataclass
class FakeTimer(autotuner.CudaTimer):
    """A CPU that is tuned as a GPU is. It runs what it times, so what is timed works, and takes a second.

    Attributes:
        idle: whether anything can be timed.
        name: of the device.
    """

    idle: bool = True
    tuned: bool = True
    name: str = "told"

    def tunes(self, device: torch.device) -> bool:
        return self.tuned

    def can_time(self, device: torch.device) -> bool:
        return self.idle

    def fingerprint(self, device: torch.device) -> str:
        return self.name

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        run()
        return 1.0


@dataclass
class ToldTimes(FakeTimer):
    """Every back end takes the time that it is told to take.

    Attributes:
        times: seconds of each back end, one per batch.
        timed: which back end with which batch, in order.
    """

    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    timed: list[tuple[str, int]] = field(default_factory=list)

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        taken, call = super().seconds(run, device), run
        if not hasattr(call.args[-1], "name"):  # type: ignore[attr-defined]
            return taken  # of a kernel's tiles
        batch, way = call.args  # type: ignore[attr-defined]
        self.timed.append((way.name, batch))
        return self.times[way.name][batch]


def told(monkeypatch: pytest.MonkeyPatch, folder: Path, times: Mapping[str, Sequence[float]]) -> ToldTimes:
    """Measure on the CPU, with these times, and keep it in `folder/autotune.json`; a new process, as it were."""
    timer, file = ToldTimes(times=times), folder / "autotune.json"
    tuner = autotuner.Autotuner(timer, file)
    monkeypatch.setenv("UBATCH_AUTOTUNE_CACHE", str(file))
    monkeypatch.setattr(autotuner, "_process_wide", lambda given: tuner)
    monkeypatch.setattr(candidates, "_DEVICES", ("cpu", "cuda"))
    return timer
