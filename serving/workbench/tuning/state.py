"""What was measured so far, in a file beside the result: a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.tuning.cells import Arm
from ubatch import ConfigError, Schedule

__all__ = ["State", "load_state", "save_state", "state_file"]


@dataclass
class State:
    """Everything that a run has found out.

    Attributes:
        key: what the figures are of: model, ranks, link, machine. Another key means another run.
        samples: cell -> arm -> seconds of a step, one entry per round; None where the arm cannot run.
        searched: mode -> schedules that the simulator proposed; a mode that was not searched is missing.
        rounds: completed.
        seconds: spent.
    """

    key: Mapping[str, Any]
    samples: dict[str, dict[str, list[float] | None]] = field(default_factory=dict)
    searched: dict[str, list[Arm]] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0


def state_file(out: Path) -> Path:
    """Where the state of a run that writes `out` is kept."""
    return out.with_name(out.name + ".state.json")


def save_state(path: Path, state: State) -> None:
    """Write it, whole or not at all."""
    text = json.dumps(
        {
            "key": state.key,
            "samples": state.samples,
            "searched": {
                mode: [{"name": arm.name, "schedule": arm.schedule.to_mapping()} for arm in arms]
                for mode, arms in state.searched.items()
            },
            "rounds": state.rounds,
            "seconds": state.seconds,
        }
    )
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def load_state(path: Path, key: Mapping[str, Any]) -> State | None:
    """The state of an earlier run with the same key; None where there is no file, or it is of another run.

    Raises:
        ConfigError: the file cannot be read, or is no state.
    """
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["key"] != json.loads(json.dumps(key)):
            return None
        searched = {
            mode: [Arm(each["name"], Schedule.from_mapping(each["name"], each["schedule"])) for each in arms]
            for mode, arms in values["searched"].items()
        }
        return State(key, values["samples"], searched, int(values["rounds"]), float(values["seconds"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no state of `ubatch tune` ({error}). Remove it to start anew.") from error
