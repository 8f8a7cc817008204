"""`ubatch generate`: completions from a checkpoint, on one rank or on several that share its experts."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from model_runner import FAULTS, FinishReason, ModelRunner, SamplingParams, fresh_seed
from model_runner import generate as generate_tokens
from serving.engine.options import EngineOptions
from serving.engine.rank.build import make_runner
from serving.engine.rank.graph_capture import capture_graphs
from serving.engine.rank.runner_setup import describe_memory
from serving.generate_drafted import DraftedOutput, generate_drafted
from serving.generate_options import GenerateCommand, Prompts, load_tokenizer, read
from serving.options import describe_settings, fetch_checkpoints
from serving.pinning import pin_rank
from serving.ranks import run_ranks
from serving.requests import DraftCounts
from ubatch import CommGroup

__all__ = [
    "Completion",
    "Generated",
    "generate_on_rank",
    "load_tokenizer",
    "on_every_rank",
    "print_generated",
    "print_notes",
    "read",
    "run",
]


@dataclass(frozen=True)
class Completion:
    """One prompt's output."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    drafts: DraftCounts = field(default_factory=DraftCounts)


@dataclass(frozen=True)
class Generated:
    """All prompts' outputs, in order, and what the ranks' steps did (summed over the data-parallel ranks)."""

    completions: tuple[Completion, ...]
    engaged: int
    declined: Mapping[str, int]
    memory: str


def run(command: GenerateCommand) -> int:
    """Generate and print."""
    if command.print_config:
        print(describe_settings(command.settings))
        return 0
    print_notes("ubatch generate", command.notes)
    fetch_checkpoints(command.settings)
    generated = on_every_rank(generate_on_rank, command.engine, command.prompts)
    if generated is not None:
        print_generated(generated)
    return 0


def print_notes(program: str, notes: Sequence[str]) -> None:
    """What is allowed but may not be what was meant, once for all ranks."""
    for note in notes if os.environ.get("RANK", "0") == "0" else ():
        print(f"{program}: note: {note}", file=sys.stderr)


def on_every_rank(fn: Callable[..., Any], engine: EngineOptions, *args: Any) -> Any:
    """Call `fn(rank, world_size, engine, *args)` on all ranks, here if there is one; returns rank 0's result."""
    if engine.world_size == 1:
        pin_rank(0, 1, torch.device("cuda", torch.cuda.current_device()) if engine.device == "cuda" else None)
        return fn(0, 1, engine, *args)
    return run_ranks(fn, engine.world_size, engine, *args)


def generate_on_rank(rank: int, world_size: int, engine: EngineOptions, prompts: Prompts) -> Generated | None:
    """This rank's share of the prompts; rank 0 returns everything, the others None.

    The processes of a tensor-parallel group have the same prompts, and sample the same tokens.
    """
    tokenizer = load_tokenizer(engine.model)
    group = _group_of(rank, engine)
    own = list(range(engine.dp_rank(rank), len(prompts.prompt), engine.data_parallel_size))
    prompts = _with_seed(prompts, engine)
    params = [
        SamplingParams(
            max_tokens=prompts.max_tokens,
            temperature=prompts.temperature,
            top_k=prompts.top_k,
            top_p=prompts.top_p,
            seed=None if prompts.seed is None else prompts.seed + index,
        )
        for index in own
    ]
    tokens = [tokenizer.encode(prompts.prompt[index]).ids for index in own]
    with make_runner(engine, group) as runner:
        capture_graphs(runner, show=rank == 0)
        total = len(own) * prompts.max_tokens
        with tqdm(total=total, unit="token", disable=None if rank == 0 else True, leave=False) as bar:
            outputs = _generate(runner, tokens, params, engine, lambda _, __: bar.update())
        statistics, memory = runner.statistics(), describe_memory(runner)
    completions = {
        index: Completion(
            prompts.prompt[index],
            tokenizer.decode(list(out.token_ids)),
            tuple(out.token_ids),
            str(out.finish_reason),
            out.drafts,
        )
        for index, out in zip(own, outputs, strict=True)
    }
    engaged = statistics.engaged + statistics.engaged_single
    declined = {str(reason): count for reason, count in statistics.declined.items()}
    share = _Share(completions, engaged, declined)
    if engine.tp_rank(rank):
        share = _Share()  # its leader has the same to say
    return _gather(share, memory, rank, world_size)


def _generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    engine: EngineOptions,
    on_token: Callable[[int, int], None],
) -> list[DraftedOutput]:
    most, speculation = engine.scheduler.max_num_batched_tokens, engine.speculation
    if speculation is not None:
        return generate_drafted(runner, prompts, params, speculation, max_num_batched_tokens=most, on_token=on_token)
    outputs = generate_tokens(runner, prompts, params, max_num_batched_tokens=most, on_token=on_token)
    return [DraftedOutput(list(output.token_ids), output.finish_reason) for output in outputs]


def _group_of(rank: int, engine: EngineOptions) -> CommGroup | None:
    """The ranks that step with this one: all if they share experts, else those of its tensor-parallel group."""
    if engine.enable_expert_parallel:
        return CommGroup.from_process_group()
    size = engine.tensor_parallel_size
    if size == 1:
        return None
    firsts = range(0, engine.world_size, size)
    groups = [dist.new_group(list(range(first, first + size))) for first in firsts]  # all ranks make all of them
    return CommGroup.from_process_group(groups[engine.dp_rank(rank)])


def _with_seed(prompts: Prompts, engine: EngineOptions) -> Prompts:
    """With a seed that all processes know, where those of a tensor-parallel group would each draw their own."""
    if engine.tensor_parallel_size == 1 or prompts.temperature == 0 or prompts.seed is not None:
        return prompts
    seed = [fresh_seed()]
    dist.broadcast_object_list(seed, src=0)
    return replace(prompts, seed=seed[0])


@dataclass(frozen=True)
class _Share:
    """What one process adds to `Generated`; completions by the place of their prompt."""

    completions: Mapping[int, Completion] = field(default_factory=dict)
    engaged: int = 0
    declined: Mapping[str, int] = field(default_factory=dict)


def _gather(share: _Share, memory: str, rank: int, world_size: int) -> Generated | None:
    shares: list[Any] = [None] * world_size
    if world_size == 1:
        shares = [share]
    else:
        dist.gather_object(share, shares if rank == 0 else None)
    if rank != 0:
        return None
    merged = {index: completion for each in shares for index, completion in each.completions.items()}
    declined: Counter[str] = Counter()
    for each in shares:
        declined.update(each.declined)
    completions = tuple(merged[index] for index in sorted(merged))
    return Generated(completions, sum(each.engaged for each in shares), dict(declined), memory)


def print_generated(generated: Generated) -> None:
    """Completions, then one line about the steps."""
    for completion in generated.completions:
        print(f"--- {completion.prompt!r} ({len(completion.token_ids)} tokens, {completion.finish_reason})")
        print(f"{completion.prompt}{completion.text}")
        fault = FAULTS.get(FinishReason(completion.finish_reason))
        if fault is not None:
            print(f"error: {fault}")
    print(f"steps: {describe_steps(generated.engaged, generated.declined)}")
    drafts = sum((completion.drafts for completion in generated.completions), DraftCounts())
    if drafts.verified:
        print(
            f"speculation: {drafts.drafted} tokens guessed, {drafts.accepted} of them right; "
            f"{drafts.mean_accepted_length:.2f} tokens per request and verify step"
        )
    print(f"memory of a rank: {generated.memory}")


def describe_steps(engaged: int, declined: Mapping[str, int]) -> str:
    """`12 overlapped, 40 not (below_decode_threshold 38, peer_declined 2)`."""
    reasons: Sequence[str] = [f"{reason} {count}" for reason, count in sorted(declined.items())]
    return f"{engaged} overlapped, {sum(declined.values())} not" + (f" ({', '.join(reasons)})" if reasons else "")
