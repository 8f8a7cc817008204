"""The measurements of `--dbo-auto` before the first request: it searches for more arms, and measures all arms.

for every kind of step     make a large step of synthetic requests
search                     measure its stages; a schedule expected to beat the usual arms is added to them
measure                    run steps of that size, a quarter of it, a sixteenth, ... in every arm -> first settings;
                           then of half the smallest size that overlaps under these -> the settings to begin with
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from model_runner import DboAuto, InputBatch, ModelRunner
from serving.tuning.batches import make_batch, request_shapes
from serving.tuning.cells import Arm, Cell, Grid
from serving.tuning.stages import better_schedule
from serving.tuning.steps import ArmSteps, NoStageTimes
from ubatch import UBatchConfig
from ubatch.schedules.cost_table import SERIAL_ARM

__all__ = ["Room", "prepare_auto"]

_CONTEXT = 64
_PROMPT = 128
_MOST_PREFILL_TOKENS = 2048
_FEWEST_TOKENS = 8
_SECONDS, _MOST_ROUNDS = 1.0, 16
"""Seconds to spend on one size, and most rounds; more would add little."""
_LEAST_ROUNDS, _LONG_ROUND_S = 4, 2.0
"""Least rounds; two are enough if a round takes this long (seconds), because long steps are less noisy."""


@dataclass(frozen=True)
class Room:
    """Limits of steps, the same on every rank.

    Attributes:
        max_num_seqs: most requests.
        max_prefill_tokens: most tokens of a step with a prefill.
        draft_tokens: drafts of a request in a verify step; 0 if there are no such steps.
    """

    max_num_seqs: int
    max_prefill_tokens: int
    draft_tokens: int = 0


@torch.inference_mode()
def prepare_auto(auto: DboAuto, runner: ModelRunner, room: Room) -> dict[str, Arm]:
    """For every kind of step, search for a better schedule and add it as an arm; then measure all arms, and begin with
    the best settings. Collective: every rank calls it before the first real step.

    Kinds that are tuned already, or whose steps do not fit, are left out. The search is skipped if stages cannot be
    measured: see `ArmSteps.stage_model`; and on a GPU, whose work the host's clock cannot time.

    Args:
        auto: gets the arms and the times.
        runner: the runner whose steps it decides on.
        room: limits of the steps; prefills are measured up to 2048 tokens.

    Returns:
        Kind -> added arm.

    Raises:
        PeerFailed, TransferTimeout: as in a step.
    """
    with runner.together():
        grid, sizes = _cells(runner, room)
        sizes = {kind: cells for kind, cells in sizes.items() if auto.arms(kind) and not auto.is_tuned(kind)}
        added: dict[str, Arm] = {}
        with ArmSteps(runner, runner.link) as steps:
            for kind, cells in sizes.items():
                arm = None if runner.streams.asynchronous else _search(auto, runner, steps, cells[0], grid)
                if arm is not None:
                    auto.add_arm(kind, arm.schedule)
                    added[kind] = arm
        for cells in sizes.values():
            for cell in cells[::2]:
                _measure(auto, runner, cell, grid)
        auto.begin()
        for kind, cells in sizes.items():
            tokens = _least(runner, _below_threshold(auto, kind, cells))
            if tokens:
                _measure(auto, runner, Cell(kind, int(tokens)), grid)
        auto.begin()
    return added


def _below_threshold(auto: DboAuto, kind: str, cells: list[Cell]) -> int:
    """Tokens of the largest unmeasured cell below the smallest cell that overlaps now; 0 if there is none."""
    threshold = auto.statistics().settings[kind].threshold
    overlapping = [cell for cell in cells[::2] if threshold is not None and cell.tokens >= threshold]
    smaller = [cell.tokens for cell in cells[1::2] if overlapping and cell.tokens < overlapping[-1].tokens]
    return max(smaller, default=0)


def _search(auto: DboAuto, runner: ModelRunner, steps: ArmSteps, cell: Cell, grid: Grid) -> Arm | None:
    """The arm found for this cell, the same on every rank; None if none is better."""
    with make_batch(runner, cell, grid, seed=_replica(runner)) as batch:
        known = [*auto.arms(cell.mode).values()]
        with suppress(NoStageTimes):
            found = steps.search(
                batch, lambda model: [arm for arm in [better_schedule(model, cell.mode, known)] if arm is not None]
            )
            return next(iter(found), None)
    return None


def _measure(auto: DboAuto, runner: ModelRunner, cell: Cell, grid: Grid) -> None:
    """Run a step of this cell in every arm, in alternating order; the first run of each arm only warms up."""
    settings = [auto.arm_settings(cell.mode, arm) for arm in (SERIAL_ARM, *auto.arms(cell.mode))]
    with make_batch(runner, cell, grid, seed=_replica(runner)) as batch:
        for config in settings:
            runner.forward(batch, runner.coordinate(batch, config))
        first = [_run(auto, runner, batch, config) for config in reversed(settings)]
        slowest_s = -_least(runner, -sum(seconds() for seconds in first))
        least = _LEAST_ROUNDS if slowest_s < _LONG_ROUND_S else 2
        for number in range(1, min(max(least, int(_SECONDS / slowest_s)), _MOST_ROUNDS)):
            for config in settings if number % 2 else reversed(settings):
                _run(auto, runner, batch, config)


def _run(auto: DboAuto, runner: ModelRunner, batch: InputBatch, config: UBatchConfig) -> Callable[[], float]:
    """Run a measured step; returns a function that gives its seconds on this rank."""
    agreed = runner.coordinate(batch, config)
    with auto.measured(agreed.decision) as seconds:
        runner.forward(batch, agreed)
    return seconds


def _cells(runner: ModelRunner, room: Room) -> tuple[Grid, dict[str, list[Cell]]]:
    """Kind -> cells, the largest first: it has the server's largest size, or what fits the rank with least memory."""
    blocks = int(_least(runner, runner.kv_cache.num_blocks))
    longest, drafts = runner.max_model_len, room.draft_tokens
    context, prompt = min(_CONTEXT, longest - 1 - drafts), min(_PROMPT, longest)
    if context < 1:
        return Grid((), 0, 0, 0, 0, 0), {}
    blocks_for = runner.kv_cache.spec.blocks_for
    decodes = min(room.max_num_seqs, blocks // blocks_for(context + 1 + drafts))
    prompts = min(room.max_num_seqs, blocks // blocks_for(prompt))
    prefills = min(room.max_prefill_tokens, _MOST_PREFILL_TOKENS, prompts * prompt)
    grid = Grid(("decode", "prefill", "verify"), decodes, prefills, context, prompt, drafts)

    def fits(cell: Cell) -> bool:
        sizes = [sum(shape) for shape in request_shapes(cell, grid)]
        return 0 < len(sizes) <= room.max_num_seqs and sum(map(blocks_for, sizes)) <= blocks

    largest = [Cell("decode", decodes), Cell("prefill", prefills)]
    if drafts:
        largest.append(Cell("verify", decodes * (drafts + 1)))
    return grid, {
        each.mode: list(filter(fits, _smaller(each)))
        for each in largest
        if each.tokens >= _FEWEST_TOKENS and fits(each)
    }


def _smaller(cell: Cell) -> Iterator[Cell]:
    """The cell, then half of its tokens, a quarter, and so on."""
    tokens = cell.tokens
    while tokens >= _FEWEST_TOKENS:
        yield Cell(cell.mode, tokens)
        tokens //= 2


def _replica(runner: ModelRunner) -> int:
    """Number of this rank's replica; all ranks of a replica have the same requests."""
    return 0 if runner.group is None else runner.group.rank // runner.tensor_parallel_size


def _least(runner: ModelRunner, number: float) -> float:
    """The smallest `number` of all ranks."""
    return number if runner.group is None else runner.group.least(number)
