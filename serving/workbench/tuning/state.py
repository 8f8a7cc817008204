"""The measurements so far, in a file next to the result, so that a stopped run can be resumed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from serving.workbench.arms.cells import Arm
from ubatch import ConfigError


@dataclass
class State:
    """All measurements of a run.

    Attributes:
        key: identifies the run: model, ranks, link, machine. A state with another key is not resumed.
        samples: cell -> arm -> seconds of a step, one entry per round; None if the arm cannot run.
        searched: mode -> schedules that the simulator proposed; modes that were not searched are missing.
        rounds: number of completed rounds.
        seconds: time spent.
    """

    key: Mapping[str, Any]
    samples: dict[str, dict[str, list[float] | None]] = field(default_factory=dict)
    searched: dict[str, list[Arm]] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0


def state_file(out: Path) -> Path:
    return out.with_name(out.name + ".state.json")


def save_state(path: Path, state: State) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.encode(state))
    os.replace(part, path)


def load_state(path: Path, key: Mapping[str, Any]) -> State | None:
    """Load the state of an earlier run with the same key; None if there is no file, or its key differs.

    Raises:
        ConfigError: the file cannot be read, or is no state file.
    """
    if not path.exists():
        return None
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no state of `ubatch tune` ({error}). Remove it to start anew.") from error
    return state if state.key == key else None
