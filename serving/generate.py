"""`ubatch generate`: completions from a checkpoint, on one rank or on several that share its experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from model_runner import LOGITS_NOT_FINITE, FinishReason, ModelRunner, SamplingParams, fresh_seed
from model_runner import generate as generate_tokens
from serving.generate_drafted import DraftedOutput, generate_drafted
from serving.generate_options import (
    Options,
    choose_device,
    compute_dtype,
    graph_options,
    load_tokenizer,
    prepare,
    speculation_of,
)
from serving.graph_capture import capture_graphs
from serving.pinning import pin_rank
from serving.ranks import run_ranks
from serving.requests import DraftCounts
from serving.runner_setup import WeightsBar, describe_memory, make_link
from serving.speculation import SpeculationConfig, runner_options
from ubatch import CommGroup, UBatchConfig

__all__ = [
    "Completion",
    "Generated",
    "Options",
    "choose_device",
    "generate_on_rank",
    "load_tokenizer",
    "on_every_rank",
    "prepare",
    "print_generated",
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


def run(options: Options) -> int:
    """Generate and print."""
    config = prepare(options)
    generated = on_every_rank(generate_on_rank, options, config)
    if generated is not None:
        print_generated(generated)
    return 0


def on_every_rank(fn: Callable[..., Any], options: Options, config: UBatchConfig) -> Any:
    """Call `fn(rank, world_size, options, config)` on all ranks, here if there is one; returns rank 0's result."""
    if options.num_processes == 1:
        pin_rank(0, 1, torch.device("cuda", torch.cuda.current_device()) if choose_device(options) == "cuda" else None)
        return fn(0, 1, options, config)
    return run_ranks(fn, options.num_processes, options, config)


def generate_on_rank(rank: int, world_size: int, options: Options, config: UBatchConfig) -> Generated | None:
    """This rank's share of the prompts; rank 0 returns everything, the others None.

    The processes of a tensor-parallel group have the same prompts, and sample the same tokens.
    """
    tokenizer = load_tokenizer(options.model)
    group = _group_of(rank, options)
    own = list(range(rank // options.tensor_parallel_size, len(options.prompt), options.data_parallel_size))
    options = _with_seed(options)
    params = [
        SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=None if options.seed is None else options.seed + index,
        )
        for index in own
    ]
    prompts = [tokenizer.encode(options.prompt[index]).ids for index in own]
    device = choose_device(options)
    speculation = speculation_of(options)
    with (
        ModelRunner(
            options.model,
            device=device,
            dtype=compute_dtype(options, device),
            **graph_options(options),
            **runner_options(speculation),
            group=group,
            tensor_parallel_size=options.tensor_parallel_size,
            all2all_backend=options.all2all_backend,
            all2all_options=options.all2all_options,
            max_num_batched_tokens=options.max_num_batched_tokens,
            experts_backend=options.moe_backend,
            link=make_link(options.emulated_link),
            dbo=config,
            attention_backend=options.attention_backend,
            prefill_attention_backend=options.prefill_attention_backend,
            decode_attention_backend=options.decode_attention_backend,
            block_size=options.block_size,
            kv_cache_dtype=options.kv_cache_dtype,
            on_weights=WeightsBar(show=rank == 0),
        ) as runner,
    ):
        capture_graphs(runner, show=rank == 0)
        total = len(own) * options.max_tokens
        with tqdm(total=total, unit="token", disable=None if rank == 0 else True, leave=False) as bar:
            outputs = _generate(runner, prompts, params, options, speculation, lambda _, __: bar.update())
        statistics, memory = runner.statistics(), describe_memory(runner)
    completions = {
        index: Completion(
            options.prompt[index],
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
    if rank % options.tensor_parallel_size:
        share = _Share()  # its leader has the same to say
    return _gather(share, memory, rank, world_size)


def _generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    options: Options,
    speculation: SpeculationConfig | None,
    on_token: Callable[[int, int], None],
) -> list[DraftedOutput]:
    most = options.max_num_batched_tokens
    if speculation is not None:
        return generate_drafted(runner, prompts, params, speculation, max_num_batched_tokens=most, on_token=on_token)
    outputs = generate_tokens(runner, prompts, params, max_num_batched_tokens=most, on_token=on_token)
    return [DraftedOutput(list(output.token_ids), output.finish_reason) for output in outputs]


def _group_of(rank: int, options: Options) -> CommGroup | None:
    """The ranks that step with this one: all if they share experts, else those of its tensor-parallel group."""
    if options.enable_expert_parallel:
        return CommGroup.from_process_group()
    size = options.tensor_parallel_size
    if size == 1:
        return None
    firsts = range(0, options.num_processes, size)
    groups = [dist.new_group(list(range(first, first + size))) for first in firsts]  # all ranks make all of them
    return CommGroup.from_process_group(groups[rank // size])


def _with_seed(options: Options) -> Options:
    """With a seed that all processes know, where those of a tensor-parallel group would each draw their own."""
    if options.tensor_parallel_size == 1 or options.temperature == 0 or options.seed is not None:
        return options
    seed = [fresh_seed()]
    dist.broadcast_object_list(seed, src=0)
    return options.model_copy(update={"seed": seed[0]})


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
        if completion.finish_reason == FinishReason.ERROR:
            print(f"error: {LOGITS_NOT_FINITE}")
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
