"""What the sections of `ubatch bench faults` share: a checkpoint, requests, their right answers, and who judges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.workbench.bench.faults.answers import Answer, Asked
from serving.workbench.bench.faults.referee import Referee
from serving.workbench.bench.faults.victims import Subject, subject

EXPERT_PARALLEL = ("--data-parallel-size=2", "--enable-expert-parallel")
LANES = ("--enable-dbo", "--dbo-decode-token-threshold=4", "--dbo-prefill-token-threshold=8")
UNLIMITED = "--max-engine-restarts=1000"
AGAIN_S = 120.0
"""A server that is not healthy so many seconds after a fault does not come back."""
MOST_EXCUSED = 0.01


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        configurations: how many of the kills' configurations.
        blocks: of `cost`, in all.
        soak_s, every_s: seconds of `soak`, and between two of its kills.
    """

    kills: int
    configurations: int
    pauses: int
    blocks: int
    soak_s: float
    every_s: float


@dataclass(frozen=True)
class Setting:
    """What all sections get.

    Attributes:
        flags: of every server.
        requests: more than run at a time, so that one with a near-tie does not come too often.
        streams: how many run at a time.
        timeout_s: the servers' `--timeout-s`, where a rank hangs or a link is cut.
        exact: whether a difference is a fault: in float32.
    """

    model: Path
    flags: tuple[str, ...]
    requests: Sequence[Asked]
    references: Sequence[Answer]
    referee: Referee
    sizes: Sizes
    streams: int
    timeout_s: float
    exact: bool

    def server(self, *flags: str, **how: Any) -> AbstractContextManager[Subject]:
        """A server with the common flags and these; `how` as of `subject`."""
        return subject(self.model, [*self.flags, *flags], **how)


@dataclass(frozen=True)
class Found:
    """What a section has found.

    Attributes:
        figures: for the file of results.
        faults: what was not as promised.
    """

    figures: Any
    faults: list[str] = field(default_factory=list)
