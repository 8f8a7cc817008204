"""Layers with linear attention have stages of their own: in the trace, for the simulator, and in the search."""

import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoints import load_reference, make_checkpoint, reference_greedy

from attention.linear.plan import LinearPlan
from model_runner import ModelRunner, SamplingParams, generate
from ranks import run_ranks
from serving.workbench.arms.cells import Arm, Cell, Grid, make_batch
from serving.workbench.arms.programs import read_steps, traced_step, write_steps
from serving.workbench.arms.stages import ArmSteps, best_schedules, layer_times
from ubatch import SCHEDULES, CommGroup, Schedule, UBatchConfig, tracing, write_chrome
from ubatch.schedules import Compute, Launch, LayerTimes, Op, Pass, layer_program, simulate
from ubatch.schedules.schedule import KNOWN_POINTS, LINEAR_ATTENTION
from ubatch.trace.file import read_chrome
from ubatch.trace.stages import stage_names

KINDS = (LINEAR_ATTENTION, "", LINEAR_ATTENTION, LINEAR_ATTENTION)
SLOW_S = 4e-3
TRACED = 5  # steps: one alone may be disturbed
LINEAR_TOO = {"norm, linear attention's projections", "linear attention, router"}
GRID = Grid(("prefill",), 16, 64, 8, 16, 1)
CELL = Cell("prefill", 64)
PROMPTS = ([3, 5, 7, 9, 2, 4], [8, 1, 30], [11, 12, 13, 14], [90])


def hybrid(folder: Path) -> Path:
    kinds = [kind or "full_attention" for kind in KINDS]
    return make_checkpoint(folder, "Qwen3Next", num_hidden_layers=len(kinds), layer_types=kinds)


def stages_of_a_hybrid(rank: int, world_size: int, path: str, trace_file: str) -> dict[str, Any]:
    group = CommGroup.from_process_group(timeout_s=60)
    forward = LinearPlan.forward

    def slow(*arguments: Any) -> Any:
        until = time.process_time() + SLOW_S
        while time.process_time() < until:
            pass
        return forward(*arguments)

    room = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 16}
    slowed = mock.patch.object(LinearPlan, "forward", slow)
    with (
        slowed,
        ModelRunner(path, group=group, **room) as runner,
        ArmSteps(runner) as arms,
        make_batch(runner, CELL, GRID, seed=rank) as batch,
    ):
        model = arms.stage_model(batch)
        found = arms.search(batch, lambda own: best_schedules(own, "prefill", [], max_lanes=2, max_chunks=2, keep=1))
        lanes = Arm("in turns", SCHEDULES["two_batch_decode"].one_by_one())
        steps = [traced_step(lambda: arms.run(lanes, batch), None) for _ in range(TRACED)]
        with tracing() as trace, torch.inference_mode():
            arms.run(Arm("two", SCHEDULES["two_batch_decode"]), batch)
    if rank == 0:
        write_chrome(trace_file, {0: trace.spans})
    schedules = {each.schedule.name: each.schedule for each in found}
    dbo = UBatchConfig(
        dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2, schedule=found[0].schedule, schedules=schedules
    )
    with ModelRunner(path, group=group, dbo=dbo, **room) as runner:
        outputs = generate(runner, [list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=5))
        engaged = runner.statistics().engaged + runner.statistics().engaged_single
    return {
        "model": model,
        "found": [each.schedule for each in found],
        "programs": write_steps([[step.programs] for step in steps]),
        "tokens": [list(output.token_ids) for output in outputs],
        "engaged": engaged,
    }


@pytest.mark.wide
@pytest.mark.ranks
def test_a_hybrids_kinds_are_told_apart_from_the_trace_to_the_schedule(tmp_path: Path) -> None:
    path, trace_file = hybrid(tmp_path / "model"), tmp_path / "trace.json"
    first, second = run_ranks(stages_of_a_hybrid, 2, str(path), str(trace_file))

    # The trace, also when it is read again: one block of each kind for every layer of it and lane.
    spans = read_chrome(trace_file)[0].spans
    named = Counter(stage_names(spans).values())
    linear, full = KINDS.count(LINEAR_ATTENTION), KINDS.count("")
    assert {name: named[name] for name in LINEAR_TOO} == dict.fromkeys(LINEAR_TOO, 2 * linear)
    assert {name: named[name] for name in ("norm, qkv", "attention, router")} == {
        "norm, qkv": 2 * full,
        "attention, router": 2 * full,
    }

    # Stage times by kind: only linear attention was slowed down.
    model = first["model"]
    assert model == second["model"]
    assert model.kinds == KINDS
    one = dict(zip(KINDS, model.times(1, 1, True), strict=True))
    assert one[LINEAR_ATTENTION].attn_core > one[""].attn_core + 0.7 * SLOW_S

    # The simulator's step is as long as the traced one, whose lanes ran in turns.
    turns = SCHEDULES["two_batch_decode"].one_by_one()
    traced = median(simulate(programs, turns).compute_s for (programs,) in read_steps(first["programs"]))
    predicted = simulate([layer_program(model.times(2, 1, True), len(KINDS), turns)] * 2, turns).compute_s
    assert 2 * linear * SLOW_S < predicted < 1.5 * traced
    assert traced < 1.5 * predicted

    # What the search found runs on both ranks, and gives transformers' tokens.
    assert first["found"] == second["found"]
    assert first["found"][0].overlaps
    reference = load_reference(path)
    expected = [reference_greedy(reference, list(prompt), 5)[0] for prompt in PROMPTS]
    assert first["tokens"] == second["tokens"] == expected
    assert first["engaged"] > 0


def test_a_program_gives_back_the_times_of_each_kind() -> None:
    """Layers in any order, a dense one among them, which counts for those of its kind."""
    times = {
        LINEAR_ATTENTION: LayerTimes(0.3, 4.0, 0.5, 0.7, attn_prepare=1.0, shared=1.5),
        "": LayerTimes(2.6, 5.0, 0.6, 0.9, attn_prepare=0.8, shared=1.1),
    }
    one_by_one = Schedule("one by one", points_off=KNOWN_POINTS)

    def traced(kinds: tuple[str, ...]) -> list[Op]:
        program = layer_program([times[kind] for kind in kinds], len(kinds), one_by_one)
        told = iter(kinds)
        named = [Pass(op.point, next(told)) if op == Pass("attn_prepare") else op for op in program]
        behind = [[op, Compute(0.0)] if isinstance(op, Launch) else [op] for op in named]
        return [op for ops in behind for op in ops]

    program = traced(KINDS)
    [[[again]]] = read_steps(write_steps([[[program]]]))
    stages = layer_times(program)
    assert layer_times(again) == stages
    assert stages.kinds == KINDS
    for kind, own in times.items():
        assert vars(stages.times[kind]) == pytest.approx(vars(own))

    dense: list[Op] = [Compute(0.1), Pass("attn_prepare", LINEAR_ATTENTION), Compute(0.6), Pass("layer")]
    with_dense = layer_times([*dense, *program])
    assert with_dense.kinds == KINDS
    assert with_dense.times[""] == stages.times[""]
    both = with_dense.times[LINEAR_ATTENTION].attn_core, stages.times[LINEAR_ATTENTION].attn_core
    assert both[0] == pytest.approx(both[1] + 0.6 / 3)
    assert layer_times([*dense, *traced(("",))]).times.keys() == {""}, "no MoE layer of its kind"
