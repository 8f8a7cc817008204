"""The measuring rounds, on every rank. A round visits all cells, and runs a cell's arms in the order A B B A.

    round 0     stage times of each mode's largest cell; the simulator's best schedules become arms
    a round     every cell: every arm that is not dropped, twice
    after two   an arm far slower than the best of its cell is dropped from that cell

Rank 0 alone decides when the time is up and which arms the search adds; other decisions follow from exchanged times, so
that all ranks decide alike. A step's time is that of its slowest rank. With tensor parallelism the ranks of a replica
have the same batch.

A rank's process is started and watched as an engine of `ubatch serve` is, on every machine:

    join the run, load the model  ->  Ready  ->  measure  ->  Finished, from rank 0  ->  wait for Shutdown

Between steps it sends heartbeats, and ends early if it is told to or if the process that started it is gone.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from model_runner import ModelRunner, Step
from model_runner.parallel import most_chunks
from serving.engine.options import EngineOptions
from serving.engine.rank.build import describe_memory, make_runner
from serving.engine.rank.listeners import refuse_strangers
from serving.engine.rank.process import ToldToEnd, beating, place_rank, run_rank
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Alive, Finished, Ready, Shutdown
from serving.engine.wire.rendezvous import Place, Run, init_ranks
from serving.processes import check_parent
from serving.progress import progress
from serving.workbench.arms.cells import SERIAL_ARM, Arm, Cell, Grid, library_arms, make_batch
from serving.workbench.arms.programs import gather_texts
from serving.workbench.arms.stages import ArmSteps, NoStageTimes, best_schedules
from ubatch import CommGroup, ConfigError
from ubatch.process import Heart
from ubatch.ranks import taking_long


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


# -- the process -------------------------------------------------------------------------------------------------------

_BEAT_S = 1.0


@dataclass(frozen=True)
class Measured:
    """What rank 0 sends at the end.

    Attributes:
        arms: mode -> the arms that were measured.
    """

    state: State
    arms: dict[str, list[Arm]]


def tune_rank(plan: Plan, state: State, path: Path, options: EngineOptions, rank: int, place: Place) -> None:
    """Main function of a rank's process; see `run_rank`.

    Args:
        state: of an earlier run, to go on from; rank 0's counts.
        path: where rank 0 writes the state.
    """
    run_rank(options, rank, place, partial(_measure, plan, state, path, options, rank))


def _measure(
    plan: Plan, state: State, path: Path, options: EngineOptions, rank: int, run: Run, link: EngineLink
) -> None:
    local_rank = place_rank(options, rank)
    with ExitStack() as held:
        with beating(link, rank):
            init_ranks(run, rank, options)
            with taking_long("starting"):  # ranks load and compile at different speeds
                group = CommGroup.from_process_group(timeout_s=options.dbo.timeout_s)
                num_blocks = plan.grid.kv_blocks_needed(options.block_size)
                made = make_runner(options, group, device_index=local_rank, num_kv_blocks=num_blocks)
                runner = held.enter_context(made)
        if options.device == "cpu":
            refuse_strangers()
        client = _Client(rank, link)
        link.send(Ready(rank, runner.max_model_len, runner.config.vocab_size, describe_memory(runner)))
        with ArmSteps(runner, runner.link) as steps, runner.together():
            of_rank_0 = gather_texts(msgspec.json.encode(state).decode() if rank == 0 else "", group)[0]
            state = msgspec.json.decode(of_rank_0, type=State)
            tuner = Tuner(runner, group, plan, state, path if rank == 0 else None, steps, client.check)
            state = tuner.run()
        if rank == 0:
            measured = Measured(state, {mode: tuner.arms(mode) for mode in plan.grid.modes})
            link.send(Finished(rank, msgspec.json.encode(measured).decode()))
        client.wait_for_shutdown()
        group.least(0.0)  # no rank leaves, or takes the store with it, while another may still wait
    dist.destroy_process_group()
    link.close()


class _Client:
    """The client, as this rank sees it."""

    def __init__(self, rank: int, link: EngineLink) -> None:
        self._link = link
        self._heart = Heart(lambda silence_s: link.send(Alive(rank, silence_s)), _BEAT_S)

    def check(self) -> None:
        """Send a heartbeat if one is due, and check that this rank may go on.

        Raises:
            ToldToEnd: the client sent `Shutdown`.
            Orphaned: the process that started this one is gone.
        """
        if self._shutdown_came(0.0):
            raise ToldToEnd("told to end before all was measured.")

    def wait_for_shutdown(self) -> None:
        """Wait until the client sends `Shutdown`; raises `Orphaned` as `check` does."""
        while not self._shutdown_came(_BEAT_S):
            pass

    def _shutdown_came(self, wait_s: float) -> bool:
        check_parent()
        self._heart.beat()
        return any(isinstance(message, Shutdown) for message in list(self._link.receive(wait_s)))
