"""`ubatch generate`: completions from a checkpoint, on one rank or on several that share its experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from pydantic import BaseModel, Field
from tqdm import tqdm

from attention import attention_backends
from model_runner import Checkpoint, ModelRunner, SamplingParams
from model_runner import generate as generate_tokens
from serving.graph_capture import capture_graphs
from serving.ranks import pin_rank, run_ranks
from serving.runner_setup import choose_dtype, count_gpus, describe_memory, make_link
from ubatch import CommGroup, ConfigError, UBatchConfig, UBatchStatistics

__all__ = [
    "Completion",
    "Generated",
    "Options",
    "generate_on_rank",
    "load_tokenizer",
    "on_every_rank",
    "prepare",
    "print_generated",
    "run",
]


_MOST_PROMPTS_AT_ONCE = 256


class Options(BaseModel):
    """A checkpoint, prompts, and how to run them."""

    model: Annotated[tyro.conf.Positional[Path], Field(description="folder of a Hugging Face checkpoint")]
    prompt: Annotated[tuple[str, ...], Field(min_length=1, description="one or more prompts")]
    max_tokens: Annotated[int, Field(ge=1, description="tokens to generate per prompt")] = 64
    temperature: Annotated[float, Field(ge=0, description="0 is greedy")] = 0.0
    top_k: Annotated[int, Field(ge=0, description="sample from the k likeliest tokens; 0 for all")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="sample from the likeliest tokens of this mass")] = 1.0
    seed: Annotated[int | None, Field(description="seed of the first prompt; prompt i gets seed + i")] = None
    max_num_batched_tokens: Annotated[
        int | None, Field(ge=1, description="most prompt tokens per step; longer prompts run in chunks")
    ] = None
    data_parallel_size: Annotated[int, Field(ge=1, description="ranks; prompts are dealt out in turn")] = 1
    enable_expert_parallel: Annotated[bool, Field(description="the ranks share the experts")] = False
    enable_dbo: Annotated[bool, Field(description="overlap two or more microbatches")] = False
    ubatch_size: Annotated[int | None, Field(description="microbatches (default 2)")] = None
    dbo_decode_token_threshold: Annotated[int | None, Field(description="fewest tokens of a decode step (32)")] = None
    dbo_prefill_token_threshold: Annotated[int | None, Field(description="fewest tokens with a prefill (512)")] = None
    schedule: Annotated[str | None, Field(description="a named schedule (mlp_shared_overlap)")] = None
    all2all_backend: Annotated[str | None, Field(description="how tokens reach their experts")] = None
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="auto is a GPU for one rank, if there is one")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="what it computes in; auto is float32 on a CPU, else the checkpoint's"),
    ] = "auto"
    cudagraph_mode: Annotated[
        Literal["auto", "none", "full"],
        Field(description="full replays decode steps as CUDA graphs; auto does so on a GPU, where all can be captured"),
    ] = "auto"
    cudagraph_capture_sizes: Annotated[
        tuple[int, ...] | None,
        tyro.conf.arg(metavar="INT [INT ...]"),
        Field(description="prompts of the steps that are captured; others are padded to the next"),
    ] = None
    enforce_eager: Annotated[bool, Field(description="capture nothing, as --cudagraph-mode none")] = False
    attention_backend: Annotated[str, Field(description=f"one of {', '.join(attention_backends())}")] = "auto"
    prefill_attention_backend: Annotated[str | None, Field(description="another one for prefills")] = None
    decode_attention_backend: Annotated[str | None, Field(description="another one for decodes")] = None
    block_size: Annotated[int, Field(ge=1, description="tokens per KV page")] = 16
    kv_cache_dtype: Annotated[str, Field(description="auto, or fp8 to store one byte a number")] = "auto"
    emulated_link: Annotated[
        tuple[float, float] | None,
        tyro.conf.arg(metavar="US MB/S"),
        Field(description="deliver over a link of this latency and bandwidth"),
    ] = None
    config: Annotated[Path | None, Field(description="YAML file of overlap settings; flags beat it")] = None


@dataclass(frozen=True)
class Completion:
    """One prompt's output."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class Generated:
    """All prompts' outputs, in order, and what the ranks' steps did (summed over the ranks)."""

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


def prepare(options: Options) -> UBatchConfig:
    """Check the flags against each other, before any rank starts; returns how to overlap.

    Raises:
        ConfigError: flags that contradict each other, or a checkpoint without a tokenizer.
    """
    config = overlap_config(options)
    if options.enable_expert_parallel and options.data_parallel_size == 1:
        raise ConfigError("--enable-expert-parallel needs --data-parallel-size 2 or more; one rank has all experts.")
    exchange = {"--all2all-backend": options.all2all_backend, "--emulated-link": options.emulated_link}
    for flag, value in exchange.items():
        if value is not None and not options.enable_expert_parallel:
            raise ConfigError(f"{flag} needs --enable-expert-parallel; without it nothing is exchanged.")
    graph_options(options)
    load_tokenizer(options.model)
    return config


def on_every_rank(fn: Callable[..., Any], options: Options, config: UBatchConfig) -> Any:
    """Call `fn(rank, world_size, options, config)` on all ranks, here if there is one; returns rank 0's result."""
    if options.data_parallel_size == 1:
        pin_rank(0, 1)
        return fn(0, 1, options, config)
    return run_ranks(fn, options.data_parallel_size, options, config)


def overlap_config(options: Options) -> UBatchConfig:
    """Flags beat the file, the file beats the defaults."""
    base = UBatchConfig.from_yaml(options.config) if options.config is not None else UBatchConfig(enable_dbo=False)
    flags: dict[str, Any] = {
        "num_ubatches": options.ubatch_size,
        "dbo_decode_token_threshold": options.dbo_decode_token_threshold,
        "dbo_prefill_token_threshold": options.dbo_prefill_token_threshold,
        "schedule": options.schedule,
        "enable_dbo": True if options.enable_dbo else None,
    }
    return replace(base, **{name: value for name, value in flags.items() if value is not None})


def choose_device(options: Options) -> str:
    """`cpu` or `cuda`.

    Raises:
        ConfigError: there is no GPU, or several ranks would need one each.
    """
    if options.device == "cuda":
        if options.data_parallel_size > 1:
            raise ConfigError("--device cuda with --data-parallel-size: use `ubatch serve` for ranks with a GPU each.")
        if not count_gpus():
            raise ConfigError("--device cuda: there is no GPU here that torch can use. Use --device cpu.")
    if options.device != "auto":
        return options.device
    return "cuda" if options.data_parallel_size == 1 and count_gpus() else "cpu"


def graph_options(options: Options) -> dict[str, Any]:
    """What `ModelRunner` is told about CUDA graphs.

    Raises:
        ConfigError: flags that contradict each other, or the device.
    """
    mode, sizes = options.cudagraph_mode, options.cudagraph_capture_sizes
    if options.enforce_eager and mode == "full":
        raise ConfigError("--enforce-eager and --cudagraph-mode full contradict each other. Remove one.")
    mode = "none" if options.enforce_eager else mode
    if choose_device(options) == "cpu" and (mode == "full" or sizes is not None):
        name = "--cudagraph-mode full" if mode == "full" else "--cudagraph-capture-sizes"
        raise ConfigError(f"{name} needs a GPU, and the ranks run on a CPU. Remove it.")
    if mode == "none" and sizes is not None:
        raise ConfigError("--cudagraph-capture-sizes has no effect where nothing is captured. Remove it.")
    return {
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": sizes,
        "max_num_seqs": min(_MOST_PROMPTS_AT_ONCE, -(-len(options.prompt) // options.data_parallel_size)),
    }


def load_tokenizer(model: Path) -> Any:
    """The checkpoint's own tokenizer.

    Raises:
        ConfigError: the folder has no `tokenizer.json`.
    """
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist. `model` must be the folder of a checkpoint with its tokenizer.")
    return Tokenizer.from_file(str(file))


def generate_on_rank(rank: int, world_size: int, options: Options, config: UBatchConfig) -> Generated | None:
    """This rank's share of the prompts; rank 0 returns everything, the others None."""
    tokenizer = load_tokenizer(options.model)
    group = CommGroup.from_process_group() if options.enable_expert_parallel else None
    own = list(range(rank, len(options.prompt), world_size))
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
    with (
        ModelRunner(
            options.model,
            device=device,
            dtype=_dtype(options, device),
            **graph_options(options),
            group=group,
            all2all_backend=options.all2all_backend,
            link=make_link(options.emulated_link),
            dbo=config,
            attention_backend=options.attention_backend,
            prefill_attention_backend=options.prefill_attention_backend,
            decode_attention_backend=options.decode_attention_backend,
            block_size=options.block_size,
            kv_cache_dtype=options.kv_cache_dtype,
        ) as runner,
    ):
        capture_graphs(runner, show=rank == 0)
        total = len(own) * options.max_tokens
        with tqdm(total=total, unit="token", disable=None if rank == 0 else True, leave=False) as bar:
            outputs = generate_tokens(
                runner,
                prompts,
                params,
                max_num_batched_tokens=options.max_num_batched_tokens,
                on_token=lambda _, __: bar.update(),
            )
        statistics, memory = runner.statistics(), describe_memory(runner)
    completions = {
        index: Completion(
            options.prompt[index], tokenizer.decode(list(out.token_ids)), out.token_ids, str(out.finish_reason)
        )
        for index, out in zip(own, outputs, strict=True)
    }
    return _gather(completions, statistics, memory, rank, world_size)


def _dtype(options: Options, device: str) -> torch.dtype:
    name: str = options.dtype
    if name == "auto":
        checkpoint = Checkpoint(options.model)
        name, _ = choose_dtype(device, str(checkpoint.config.values.get("dtype", "")))
        checkpoint.close()
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _gather(
    completions: Mapping[int, Completion], statistics: UBatchStatistics, memory: str, rank: int, world_size: int
) -> Generated | None:
    shares: list[Any] = [None] * world_size
    engaged = statistics.engaged + statistics.engaged_single
    share = (completions, engaged, {str(reason): count for reason, count in statistics.declined.items()})
    if world_size == 1:
        shares = [share]
    else:
        dist.gather_object(share, shares if rank == 0 else None)
    if rank != 0:
        return None
    merged = {index: completion for own, _, _ in shares for index, completion in own.items()}
    declined: Counter[str] = Counter()
    for _, _, counts in shares:
        declined.update(counts)
    return Generated(
        tuple(merged[index] for index in sorted(merged)), sum(s[1] for s in shares), dict(declined), memory
    )


def print_generated(generated: Generated) -> None:
    """Completions, then one line about the steps."""
    for completion in generated.completions:
        print(f"--- {completion.prompt!r} ({len(completion.token_ids)} tokens, {completion.finish_reason})")
        print(f"{completion.prompt}{completion.text}")
    print(f"steps: {describe_steps(generated.engaged, generated.declined)}")
    print(f"memory of a rank: {generated.memory}")


def describe_steps(engaged: int, declined: Mapping[str, int]) -> str:
    """`12 overlapped, 40 not (below_decode_threshold 38, peer_declined 2)`."""
    reasons: Sequence[str] = [f"{reason} {count}" for reason, count in sorted(declined.items())]
    return f"{engaged} overlapped, {sum(declined.values())} not" + (f" ({', '.join(reasons)})" if reasons else "")
