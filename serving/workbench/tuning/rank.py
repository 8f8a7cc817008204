"""A rank's process in `ubatch tune`. It is started and watched as an engine of `ubatch serve` is, on every machine.

    join the run, load the model  ->  Ready  ->  measure  ->  Finished, from rank 0  ->  wait for Shutdown

Between steps it sends heartbeats, and ends early if it is told to or if the process that started it is gone.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch.distributed as dist

from serving.engine.options import EngineOptions
from serving.engine.rank.build import make_runner
from serving.engine.rank.listeners import refuse_strangers
from serving.engine.rank.process import ToldToEnd, beating, place_rank, run_rank
from serving.engine.rank.runner_setup import describe_memory
from serving.engine.wire.link import EngineLink
from serving.engine.wire.messages import Alive, Finished, Ready, Shutdown
from serving.engine.wire.rendezvous import Place, Run, init_ranks
from serving.processes import check_parent
from serving.workbench.arms.cells import Arm, kv_blocks_needed
from serving.workbench.arms.programs import gather_texts
from serving.workbench.arms.steps import ArmSteps
from serving.workbench.tuning.measure import Plan, State, Tuner
from ubatch import CommGroup
from ubatch.process import Heart
from ubatch.ranks import taking_long

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
                num_blocks = kv_blocks_needed(plan.grid, options.block_size)
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
