"""What `--dbo-auto` may try beside the usual arms: the schedule that the search likes best, looked for at the start."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from model_runner import DboAuto, ModelRunner
from serving.tuning.batches import make_batch
from serving.tuning.cells import Arm, Cell, Grid
from serving.tuning.stages import better_schedule
from serving.tuning.steps import ArmSteps

__all__ = ["add_searched_arms"]

_MAX_LANES = 4
_CONTEXT = 64
_PROMPT = 128
_MOST_PREFILL_TOKENS = 2048
_FEWEST_TOKENS = 8


def add_searched_arms(
    auto: DboAuto, runner: ModelRunner, max_num_seqs: int, max_prefill_tokens: int, draft_tokens: int = 0
) -> dict[str, Arm]:
    """Measure the stages of a large step of every kind, and add the schedule found for it where one promises more.

    Left out are kinds that were tuned already, those of steps that are replayed from graphs, which have to be captured
    for every schedule, and all of them where the stages cannot be measured (`ArmSteps.stage_model`). Every rank calls
    it, before the first step that counts.

    Args:
        auto: gets the arms.
        runner: whose steps it decides on; one alone has nothing to measure.
        max_num_seqs: requests of a step.
        max_prefill_tokens: of a step; up to 2048 of them are measured.
        draft_tokens: of a request that verifies drafts; 0 where none does.

    Returns:
        What was added, by kind.
    """
    if runner.group is None or runner.group.size == 1:
        return {}
    grid = _grid(runner, max_num_seqs, max_prefill_tokens, draft_tokens)
    first, replica = runner.group.rank == 0, runner.group.rank // runner.tensor_parallel_size
    added: dict[str, Arm] = {}
    with ArmSteps(runner, runner.link) as steps:
        for kind, tokens in (
            ("decode", grid.max_decode_tokens),
            ("prefill", grid.max_prefill_tokens),
            ("verify", grid.max_decode_tokens * (draft_tokens + 1) if draft_tokens else 0),
        ):
            replayed = runner.graphs is not None and kind != "prefill"
            if tokens < _FEWEST_TOKENS or replayed or not auto.arms(kind) or auto.is_tuned(kind):
                continue
            with make_batch(runner, Cell(kind, tokens), grid, seed=replica) as batch:
                model = steps.stage_model(batch)
            if model is None:
                continue
            found = better_schedule(model, kind, auto.arms(kind), max_lanes=_MAX_LANES) if first else None
            box: list[Any] = [found]
            dist.broadcast_object_list(box, src=0)
            arm: Arm | None = box[0]
            if arm is not None:
                auto.add_arm(kind, arm.schedule)
                added[kind] = arm
    return added


def _grid(runner: ModelRunner, max_num_seqs: int, max_prefill_tokens: int, draft_tokens: int) -> Grid:
    """Steps as large as the server's, as far as there is memory for them."""
    context = min(_CONTEXT, runner.max_model_len // 2)
    prompt = min(_PROMPT, runner.max_model_len - 1)
    spec, blocks = runner.kv_cache.spec, runner.kv_cache.num_blocks
    decodes = min(max_num_seqs, blocks // spec.blocks_for(context + 1 + draft_tokens))
    prompts = min(max_num_seqs, blocks // spec.blocks_for(prompt))
    return Grid(
        ("decode", "prefill", "verify"),
        decodes,
        min(max_prefill_tokens, _MOST_PREFILL_TOKENS, prompts * prompt),
        context,
        prompt,
        draft_tokens,
    )
