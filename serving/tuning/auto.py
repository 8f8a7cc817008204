"""What `--dbo-auto` may try beside the usual arms: the schedule that the search likes best, looked for at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from model_runner import DboAuto, ModelRunner
from serving.tuning.batches import make_batch, request_shapes
from serving.tuning.cells import Arm, Cell, Grid
from serving.tuning.stages import better_schedule
from serving.tuning.steps import ArmSteps

__all__ = ["Room", "add_searched_arms"]

_CONTEXT = 64
_PROMPT = 128
_MOST_PREFILL_TOKENS = 2048
_FEWEST_TOKENS = 8


@dataclass(frozen=True)
class Room:
    """What steps may have, the same on every rank.

    Attributes:
        max_num_seqs: requests.
        max_prefill_tokens: tokens of a step with a prefill.
        draft_tokens: of a request that verifies drafts; 0 where none does.
    """

    max_num_seqs: int
    max_prefill_tokens: int
    draft_tokens: int = 0


def add_searched_arms(auto: DboAuto, runner: ModelRunner, room: Room) -> dict[str, Arm]:
    """Measure the stages of a large step of every kind, and add the schedule found for it where one promises more.

    Left out are kinds that were tuned already, those for whose steps there is no room, and all of them where the stages
    cannot be measured: `ArmSteps.stage_model`, and on a GPU, whose work the host's clock does not see. Every rank calls
    it, before the first step that counts, and all do the same.

    Args:
        auto: gets the arms.
        runner: whose steps it decides on; one alone has nothing to measure.
        room: for the steps; of prefills, up to 2048 tokens are measured.

    Returns:
        What was added, by kind.

    Raises:
        PeerFailed, TransferTimeout: as of a step.
    """
    if runner.group is None or runner.group.size == 1 or not runner.config.num_experts or runner.streams.asynchronous:
        return {}
    added: dict[str, Arm] = {}
    with runner.together(), ArmSteps(runner, runner.link) as steps:
        grid, cells = _cells(runner, room)
        for cell in cells:
            if auto.arms(cell.mode) and not auto.is_tuned(cell.mode):
                arm = _search(auto, runner, steps, cell, grid)
                if arm is not None:
                    auto.add_arm(cell.mode, arm.schedule)
                    added[cell.mode] = arm
    return added


def _search(auto: DboAuto, runner: ModelRunner, steps: ArmSteps, cell: Cell, grid: Grid) -> Arm | None:
    """The same on every rank."""
    replica = dist.get_rank() // runner.tensor_parallel_size  # its ranks have the same requests
    with make_batch(runner, cell, grid, seed=replica) as batch:
        return steps.search(batch, lambda model: better_schedule(model, cell.mode, auto.arms(cell.mode)))


def _cells(runner: ModelRunner, room: Room) -> tuple[Grid, list[Cell]]:
    """Steps as large as the server's, as far as there is memory for them on the rank that has the least."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, runner.kv_cache.num_blocks)
    blocks, longest, drafts = min(box), runner.max_model_len, room.draft_tokens
    context, prompt = min(_CONTEXT, longest - 1 - drafts), min(_PROMPT, longest)
    if context < 1:
        return Grid((), 0, 0, 0, 0, 0), []
    blocks_for = runner.kv_cache.spec.blocks_for
    decodes = min(room.max_num_seqs, blocks // blocks_for(context + 1 + drafts))
    prompts = min(room.max_num_seqs, blocks // blocks_for(prompt))
    prefills = min(room.max_prefill_tokens, _MOST_PREFILL_TOKENS, prompts * prompt)
    grid = Grid(("decode", "prefill", "verify"), decodes, prefills, context, prompt, drafts)
    cells = [Cell("decode", decodes), Cell("prefill", prefills)]
    if drafts:
        cells.append(Cell("verify", decodes * (drafts + 1)))

    def fits(cell: Cell) -> bool:
        sizes = [sum(shape) for shape in request_shapes(cell, grid)]
        return len(sizes) <= room.max_num_seqs and sum(map(blocks_for, sizes)) <= blocks

    return grid, [cell for cell in cells if cell.tokens >= _FEWEST_TOKENS and fits(cell)]
