"""The order of operations in every named schedule, through real models on two ranks, is the one that was published.

Small checkpoints of DeepSeek-V3 (shared experts, a dense first layer) and Qwen3-MoE run through `ModelRunner`; what the
attention, the experts and the transport do is written down with its lane, stage by stage.
"""

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from checkpoints import load_reference, make_checkpoint, reference_greedy
from torch import Tensor

from model_runner import ModelRunner, SamplingParams, generate
from model_runner.decoder import decoder
from ranks import run_ranks
from ubatch import SCHEDULES, CommGroup, UBatchConfig, dbo_current_ubatch_id, interleave, tracing
from ubatch.trace.spans import current_trace

pytestmark = pytest.mark.ranks

SPARSE = 4
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": {"num_hidden_layers": SPARSE + 1, "first_k_dense_replace": 1},
    "Qwen3Moe": {"num_hidden_layers": SPARSE, "mlp_only_layers": []},
}
STAGES = {
    "mlp_shared_overlap": "output+prepare+core+dispatch_a, experts+combine_a+shared, combine_b",
    "two_batch_prefill": "output+prepare+core+dispatch_a, experts+combine_a, shared+combine_b",
    "two_batch_decode": "output+prepare, core, dispatch_a+shared, experts+combine_a, combine_b",
    "two_batch_decode_qwen3": "prepare, core, dispatch_a+shared, experts+combine_a, combine_b+output",
    # Without its gathers and scatters: one rank per replica.
    "two_batch_tensor_parallel": "output+prepare, core+dispatch_a, experts+combine_a, shared+combine_b",
}
"""A layer's stages. Where the last one has no point behind it, it goes on with the next layer's first."""
LANES = (2, 3)
CHUNKED = {
    schedule.name: schedule
    for schedule in (
        SCHEDULES["single_batch"],
        replace(SCHEDULES["single_batch"], name="one of combine", chunks=4, chunk_dispatch=False),
        replace(SCHEDULES["mlp_shared_overlap"], name="two by two", chunks=2),
        replace(SCHEDULES["two_batch_decode"], name="decode in chunks", chunks=3),
        replace(SCHEDULES["two_batch_prefill"], name="prefill in chunks", chunks=2, chunk_dispatch=False),
    )
}
Cell = tuple[str, str, int]
"""Family, name of the schedule, number of lanes."""
CELLS: list[Cell] = [(family, name, lanes) for family in FAMILIES for name in STAGES for lanes in LANES]
QUICK: list[Cell] = [
    ("DeepseekV3", "mlp_shared_overlap", 2),
    ("DeepseekV3", "two_batch_decode", 2),
    ("DeepseekV3", "two_batch_prefill", 3),
    ("Qwen3Moe", "two_batch_decode_qwen3", 2),
    ("Qwen3Moe", "two_batch_prefill", 2),
]
"""Those that CI runs."""
STEPS = 3
LANE_NAMES = "ABC"

STEADY = {
    # SGLang's, as `seed-errata.md` has them.
    ("DeepseekV3", "two_batch_decode"): (
        "A.core, B.combine_b, A.dispatch_a+shared, B.output+prepare, A.experts+combine_a, "
        "B.core, A.combine_b, B.dispatch_a+shared, A.output+prepare, B.experts+combine_a"
    ),
    ("Qwen3Moe", "two_batch_decode_qwen3"): (
        "A.core, B.combine_b+output, A.dispatch_a, B.prepare, A.experts+combine_a, "
        "B.core, A.combine_b+output, B.dispatch_a, A.prepare, B.experts+combine_a"
    ),
    ("DeepseekV3", "two_batch_prefill"): (
        "A.shared+combine_b+output+prepare+core+dispatch_a, B.shared+combine_b+output+prepare+core+dispatch_a, "
        "A.experts+combine_a, B.experts+combine_a"
    ),
    ("Qwen3Moe", "two_batch_prefill"): (
        "A.combine_b+output+prepare+core+dispatch_a, B.combine_b+output+prepare+core+dispatch_a, "
        "A.experts+combine_a, B.experts+combine_a"
    ),
    # vLLM's.
    ("DeepseekV3", "mlp_shared_overlap"): (
        "A.combine_b+output+prepare+core+dispatch_a, B.combine_b+output+prepare+core+dispatch_a, "
        "A.experts+combine_a+shared, B.experts+combine_a+shared"
    ),
}


@dataclass
class Record:
    """What the operations of a rank's steps were: `(step, lane, operation)`."""

    events: list[tuple[int, int, str]] = field(default_factory=list)

    def note(self, what: str) -> None:
        trace = current_trace()
        self.events.append((trace.step if trace is not None else 0, dbo_current_ubatch_id(), what))

    def stages(self, step: int) -> list[str]:
        """`A.experts+combine_a`: what a lane did until another one ran."""
        mine = [(lane, what) for at, lane, what in self.events if at == step]
        turns = groupby(mine, key=lambda event: event[0])
        return [f"{LANE_NAMES[lane]}.{'+'.join(what for _, what in turn)}" for lane, turn in turns]


def watch(runner: ModelRunner, record: Record) -> Any:
    """Note what the sparse layers of the runner's model do; in a `with` block."""
    for layer in runner.model.layers:
        layer.register_forward_pre_hook(lambda module, args: record.note("prepare"))
        if hasattr(layer.mlp, "kernel"):
            kernel = layer.mlp.kernel
            kernel.experts.register_forward_pre_hook(lambda module, args: record.note("experts"))
            if kernel.shared_experts is not None:
                kernel.shared_experts.register_forward_pre_hook(lambda module, args: record.note("shared"))
            kernel.register_forward_hook(lambda module, args, output: record.note("output"))
    transport: Any = runner.all2all
    dispatch, combine = transport.dispatch, transport.combine

    def arrived(y: Tensor) -> Tensor:
        record.note("combine_b")
        return y

    transport.dispatch = lambda *args: record.note("dispatch_a") or dispatch(*args)
    transport.combine = lambda *args: record.note("combine_a") or combine(*args).map(arrived)

    def noted_plan(plan_of: Any = decoder.current_plan) -> tuple[Any, Any]:
        plan, num_tokens = plan_of()
        return SimpleNamespace(forward=lambda *args: record.note("core") or plan.forward(*args)), num_tokens

    return mock.patch.object(decoder, "current_plan", noted_plan)


def prompts_of(rank: int) -> list[list[int]]:
    """At least one per lane, of about equal lengths."""
    rng = random.Random(rank)
    return [[rng.randrange(131) for _ in range(length)] for length in ((9, 8, 9, 8) if rank == 0 else (5, 6, 5))]


@contextmanager
def running(path: str, group: CommGroup, schedule: Any, lanes: int = 2) -> Iterator[ModelRunner]:
    thresholds = {"dbo_decode_token_threshold": lanes, "dbo_prefill_token_threshold": lanes}
    config = UBatchConfig(schedule=schedule, num_ubatches=lanes, group=group, timeout_s=20.0, **thresholds)
    with ModelRunner(path, group=group, num_kv_blocks=64, block_size=4, dbo=config) as runner:
        yield runner


def tokens_of(runner: ModelRunner, rank: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=STEPS if rank == 0 else STEPS - 1)  # rank 1 idles at the end
    return [list(output.token_ids) for output in generate(runner, prompts_of(rank), params)]


def run_cells(rank: int, world_size: int, paths: dict[str, str], cells: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
    group = CommGroup.from_process_group(timeout_s=20)
    results = {}
    for family, name, lanes in cells:
        record = Record()
        with running(paths[family], group, name, lanes) as runner, watch(runner, record), tracing():
            tokens = tokens_of(runner, rank)
            engaged = runner.statistics().engaged
        stages = [record.stages(step) for step in range(1, STEPS + 1)]
        results[family, name, lanes] = {"stages": stages, "tokens": tokens, "engaged": engaged}
    return results


def run_chunked(rank: int, world_size: int, paths: dict[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    group = CommGroup.from_process_group(timeout_s=20)
    results = {}
    for (family, path), (name, schedule) in product(paths.items(), CHUNKED.items()):
        with running(path, group, schedule) as runner, tracing() as trace:
            tokens = tokens_of(runner, rank)
            statistics = runner.statistics()
        results[family, name] = {
            "tokens": tokens,
            "engaged": (statistics.engaged, statistics.engaged_single),
            "combines": sum(event.name.startswith("combine.") for event in trace.events if event.kind == "launch"),
        }
    return results


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("schedules")
    return {family: make_checkpoint(folder / family, family, **fields) for family, fields in FAMILIES.items()}


@pytest.fixture(scope="module")
def ranks(checkpoints: dict[str, Path]) -> Callable[[Cell], list[dict[Cell, dict[str, Any]]]]:
    """Both ranks' results of all quick cells, or of all others, with whichever a cell is."""
    paths = {family: str(path) for family, path in checkpoints.items()}
    of = functools.cache(
        lambda quick: run_ranks(run_cells, 2, paths, [each for each in CELLS if (each in QUICK) == quick])
    )
    return lambda cell: of(cell in QUICK)


def whole_order(family: str, name: str, lanes: int) -> list[str]:
    """Every lane's stages from the model's first to its last, in the ring's order."""
    ops = [stage.split("+") for stage in STAGES[name].split(", ")]
    program: list[list[str]] = [[]]
    points = SCHEDULES[name]
    if family == "DeepseekV3":  # the dense layer passes the points around its attention
        program[-1].append("prepare")
        if points.active("attn_prepare"):
            program.append([])
        program[-1].append("core")
        if points.active("layer"):
            program.append([])
    for layer in range(SPARSE):
        for number, stage in enumerate(ops):
            mine = [op for op in stage if not (op == "shared" and family == "Qwen3Moe")]
            program[-1] += [op for op in mine if layer or op != "output" or number]
            if number + 1 < len(ops) or points.active("output") or points.active("layer"):
                program.append([])
    if "output" in ops[0]:
        program[-1].append("output")
    labels = ["+".join(stage) for stage in program]
    order = interleave([labels[:-1]] * lanes, lead=points.lead)
    ended = [(lane, labels[-1] if label == "end" else label) for lane, label in order]
    turns = groupby([(lane, label) for lane, label in ended if label], key=lambda turn: turn[0])
    return [f"{LANE_NAMES[lane]}.{'+'.join(label for _, label in turn)}" for lane, turn in turns]


def parameters(cells: Iterable[Cell]) -> list[Any]:
    return [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=[] if cell in QUICK else pytest.mark.slow)
        for cell in cells
    ]


@pytest.mark.parametrize(("family", "name", "lanes"), parameters(CELLS))
def test_the_whole_order(ranks: Callable[[Cell], list[Any]], family: str, name: str, lanes: int) -> None:
    """Prefill, decode, and a step in which rank 1 has nothing to do: the same on both ranks, stage by stage."""
    expected = whole_order(family, name, lanes)
    for rank, results in enumerate(ranks((family, name, lanes))):
        found = results[family, name, lanes]
        assert found["engaged"] == STEPS, rank
        for step, stages in enumerate(found["stages"]):
            assert stages == expected, f"rank {rank}, step {step + 1}"


@pytest.mark.parametrize(("family", "name", "lanes"), parameters((*each, 2) for each in STEADY))
def test_the_steady_order_is_the_published_one(
    ranks: Callable[[Cell], list[Any]], family: str, name: str, lanes: int
) -> None:
    """Two lanes, from the second sparse layer on: as often as layers go on with another one."""
    steady = STEADY[family, name].split(", ")
    cycles = SPARSE - 2 if SCHEDULES[name].lead else SPARSE - 1  # the leading lane is a part of a layer ahead
    for results in ranks((family, name, lanes)):
        for stages in results[family, name, lanes]["stages"]:
            begin = stages.index(steady[0])
            assert stages[begin : begin + cycles * len(steady)] == steady * cycles


@pytest.mark.parametrize("cell", [QUICK[0], pytest.param(CELLS[-1], marks=pytest.mark.slow)], ids=["quick", "others"])
def test_tokens_are_transformers_in_every_schedule(
    ranks: Callable[[Cell], list[Any]], checkpoints: dict[str, Path], cell: Cell
) -> None:
    references = {family: load_reference(path) for family, path in checkpoints.items()}
    for rank, results in enumerate(ranks(cell)):
        for family, name, lanes in results:
            expected = [reference_greedy(references[family], prompt, STEPS - rank)[0] for prompt in prompts_of(rank)]
            assert results[family, name, lanes]["tokens"] == expected, (family, name, lanes, rank)


@pytest.mark.slow
def test_in_chunks_too(checkpoints: dict[str, Path]) -> None:
    """One lane or several: every chunk's combine was launched, and the tokens are transformers'."""
    ranks = run_ranks(run_chunked, 2, {family: str(path) for family, path in checkpoints.items()})
    for family, path in checkpoints.items():
        reference = load_reference(path)
        for rank, results in enumerate(ranks):
            expected = [reference_greedy(reference, prompt, STEPS - rank)[0] for prompt in prompts_of(rank)]
            for name, schedule in CHUNKED.items():
                found = results[family, name]
                assert found["tokens"] == expected, (family, name, rank)
                assert found["engaged"] == ((0, STEPS) if schedule.lanes == 1 else (STEPS, 0)), (family, name, rank)
                assert found["combines"] == STEPS * SPARSE * schedule.lanes * schedule.chunks, (family, name, rank)
