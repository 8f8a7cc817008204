"""The measuring rounds, on every rank. A round visits all cells, and runs a cell's arms in the order A B B A.

    round 0     stage times of each mode's largest cell; the simulator's best schedules become arms
    a round     every cell: every arm that is not dropped, twice
    after two   an arm far slower than the best of its cell is dropped from that cell

Rank 0 alone decides when the time is up and which arms the search adds; other decisions follow from exchanged times, so
that all ranks decide alike. A step's time is that of its slowest rank. With tensor parallelism the ranks of a replica
have the same batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from model_runner import ModelRunner, Step
from model_runner.parallel import most_chunks
from serving.progress import progress
from serving.workbench.arms.cells import Arm, Cell, Grid, library_arms, make_batch
from serving.workbench.arms.cost_table import SERIAL_ARM
from serving.workbench.arms.stages import best_schedules
from serving.workbench.arms.steps import ArmSteps, NoStageTimes
from ubatch import CommGroup, ConfigError


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


_RACE_ROUNDS = 2
_OUT_OF_THE_RACE = 1.25
_MAX_CHUNKS = 4


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how long.

    Attributes:
        lanes: numbers of lanes to try under the default schedule.
        rounds: most rounds.
        max_seconds: limit of the whole run, earlier parts of a resumed run included; a started cell is finished.
        search_best: schedules that the simulator may propose for each mode; 0 for none.
    """

    grid: Grid
    lanes: tuple[int, ...]
    rounds: int
    max_seconds: float
    search_best: int


@dataclass
class Tuner:
    """One rank's part of the measuring. Every rank makes one and calls the same methods.

    Attributes:
        runner: the model; of its overlap settings only the time-out is used.
        group: the runner's.
        plan: what to measure.
        state: results of an earlier run, or an empty state; new results are added to it.
        state_path: where to write the state; None, as on all ranks but 0, writes none.
        steps: runs the arms on this runner.
        check: called before every step; may raise to end the measuring.
    """

    runner: ModelRunner
    group: CommGroup
    plan: Plan
    state: State
    state_path: Path | None
    steps: ArmSteps
    check: Callable[[], object]

    def __post_init__(self) -> None:
        self._seed = self.group.rank // self.runner.tensor_parallel_size
        self._start = time.monotonic() - self.state.seconds

    def run(self) -> State:
        """Run as many rounds as the time allows, at least one."""
        first = self.group.rank == 0
        for mode in progress(self.plan.grid.modes, desc="stage times", unit="mode", show=first):
            if mode not in self.state.searched:
                self.state.searched[mode] = self._search(mode)
        self._save()
        cells = self.plan.grid.cells()
        for done in range(self.state.rounds, self.plan.rounds):
            label = f"round {done + 1} of at most {self.plan.rounds}"
            for cell in progress(cells, desc=label, unit="cell", show=first):
                serial = self.state.samples.get(str(cell), {}).get(SERIAL_ARM)
                if serial is not None and len(serial) > done:
                    continue  # measured before the run was stopped
                if done and self._time_is_up():
                    return self.state
                self._visit(cell)
                self._save()
            self.state.rounds = done + 1
        self._save()
        return self.state

    def arms(self, mode: str) -> list[Arm]:
        """The arms that are measured in a mode's cells."""
        chunks = most_chunks(self.runner.all2all) > 1 and self.runner.config.num_experts > 0
        lanes = [count for count in self.plan.lanes if self.steps.serves(count)]
        return [*library_arms(lanes, chunks=chunks), *self.state.searched.get(mode, [])]

    # -- a cell ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _visit(self, cell: Cell) -> None:
        samples = self.state.samples.setdefault(str(cell), {})
        with make_batch(self.runner, cell, self.plan.grid, seed=self._seed) as batch:
            racing = []
            for arm in self.arms(cell.mode):
                if arm.name not in samples:
                    samples[arm.name] = [] if self._run(arm, batch) else None
                if samples[arm.name] is not None and not self._is_out(samples, arm):
                    racing.append(arm)
            times: dict[str, list[float]] = {arm.name: [] for arm in racing}
            for arm in racing:
                self._run(arm, batch)  # a warm-up: after other arms the caches are cold
            for arm in [*racing, *reversed(racing)]:
                times[arm.name].append(self._timed(arm, batch))
        for arm in racing:
            slowest = -self.group.least(-sum(times[arm.name]) / 2)
            own = samples[arm.name]
            if own is not None:
                own.append(slowest)

    def _is_out(self, samples: Mapping[str, list[float] | None], arm: Arm) -> bool:
        times = samples[arm.name]
        if arm.is_serial or not times or len(times) < _RACE_ROUNDS:
            return False
        best = min(median(each) for each in samples.values() if each)
        return median(times) > _OUT_OF_THE_RACE * best

    # -- stages ------------------------------------------------------------------------------------------------

    def _search(self, mode: str) -> list[Arm]:
        """The simulator's best schedules for the mode's largest cell; none if its stages cannot be measured."""
        if not self.plan.search_best:
            return []
        cell = max((cell for cell in self.plan.grid.cells() if cell.mode == mode), key=lambda cell: cell.tokens)
        limits = {"max_lanes": max(self.plan.lanes), "max_chunks": _MAX_CHUNKS, "keep": self.plan.search_best}
        with make_batch(self.runner, cell, self.plan.grid, seed=self._seed) as batch, suppress(NoStageTimes):
            return self.steps.search(batch, lambda model: best_schedules(model, mode, self.arms(mode), **limits))
        return []

    # -- a step, and what the ranks exchange ----------------------------------------------------------------------

    def _run(self, arm: Arm, batch: Step) -> bool:
        self.check()
        return self.steps.run(arm, batch)

    def _timed(self, arm: Arm, batch: Step) -> float:
        """Seconds of a step, from when all ranks are ready; on a GPU, until its work is done."""
        self.check()
        self._wait_for_device()
        self.group.least(0.0)
        start = time.perf_counter()
        self.steps.run(arm, batch)
        self._wait_for_device()
        return time.perf_counter() - start

    def _wait_for_device(self) -> None:
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)

    def _time_is_up(self) -> bool:
        """Whether the time is up, by rank 0's clock."""
        up = self.group.rank == 0 and time.monotonic() - self._start > self.plan.max_seconds
        return self.group.least(0.0 if up else 1.0) == 0.0

    def _save(self) -> None:
        self.state.seconds = time.monotonic() - self._start
        if self.state_path is not None:
            save_state(self.state_path, self.state)
