"""A device on which every back end takes the time that it is told to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ubatch.kernels import autotune, fastest


@dataclass
class ToldTimes(autotune.CudaTimer):
    """It runs what it times, so what is timed works.

    Attributes:
        times: seconds of each back end, one per batch.
        idle: whether anything can be timed.
        timed: which back end with which batch, in order.
    """

    times: Mapping[str, Sequence[float]]
    idle: bool = True
    timed: list[tuple[str, int]] = field(default_factory=list)

    def tunes(self, device: torch.device) -> bool:
        return True

    def can_time(self, device: torch.device) -> bool:
        return self.idle

    def fingerprint(self, device: torch.device) -> str:
        return "told"

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        run()
        call: Any = run
        if not hasattr(call.args[-1], "name"):
            return 1.0  # of a kernel's tiles
        batch, way = call.args
        self.timed.append((way.name, batch))
        return self.times[way.name][batch]


def told(monkeypatch: pytest.MonkeyPatch, folder: Path, times: Mapping[str, Sequence[float]]) -> ToldTimes:
    """Measure on the CPU, with these times, and keep it in `folder/autotune.json`; a new process, as it were."""
    timer, file = ToldTimes(times), folder / "autotune.json"
    tuner = autotune.Autotuner(timer, file)
    monkeypatch.setenv("UBATCH_AUTOTUNE_CACHE", str(file))
    monkeypatch.setattr(autotune, "_process_wide", lambda given: tuner)
    monkeypatch.setattr(fastest, "_DEVICES", ("cpu", "cuda"))
    return timer
