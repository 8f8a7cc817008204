"""The flags of `ubatch generate`, and what follows from them before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from pydantic import BaseModel, Field

from attention import attention_backends
from model_runner.transport import LOCAL, check_schedules_by_name
from serving.options import Speculation, read_speculation
from serving.options.fields import ExpertsName, NamedValues
from serving.runner_setup import check_transport, choose_dtype, count_gpus, read_config, tensor_parallel_faults
from serving.speculation import SpeculationConfig
from ubatch import ConfigError, UBatchConfig

__all__ = [
    "Options",
    "choose_device",
    "compute_dtype",
    "graph_options",
    "load_tokenizer",
    "overlap_config",
    "prepare",
    "speculation_of",
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
    tensor_parallel_size: Annotated[
        int,
        tyro.conf.arg(aliases=("-tp",)),
        Field(ge=1, description="processes of a rank; they share its attention heads and dense layers"),
    ] = 1
    enable_expert_parallel: Annotated[bool, Field(description="all processes share the experts")] = False
    enable_dbo: Annotated[bool, Field(description="overlap two or more microbatches")] = False
    ubatch_size: Annotated[int | None, Field(description="microbatches (default 2)")] = None
    dbo_decode_token_threshold: Annotated[int | None, Field(description="fewest tokens of a decode step (32)")] = None
    dbo_prefill_token_threshold: Annotated[int | None, Field(description="fewest tokens with a prefill (512)")] = None
    schedule: Annotated[str | None, Field(description="a named schedule (mlp_shared_overlap)")] = None
    all2all_backend: Annotated[str | None, Field(description="how tokens reach their experts (auto)")] = None
    all2all_options: Annotated[NamedValues, Field(description="its options")] = None
    moe_backend: ExpertsName = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="auto is a GPU for one rank, if there is one")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="what it computes in; auto is float32 on a CPU, else the checkpoint's"),
    ] = "auto"
    cudagraph_mode: Annotated[
        Literal["auto", "none", "full"],
        Field(description="full replays steps without prefills as CUDA graphs; auto does so on a GPU, where it can"),
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
    speculation: Annotated[Speculation, tyro.conf.arg(name="")] = Field(default_factory=Speculation)

    @property
    def num_processes(self) -> int:
        """Every tensor-parallel rank of every data-parallel rank."""
        return self.data_parallel_size * self.tensor_parallel_size


def prepare(options: Options) -> UBatchConfig:
    """Check the flags against each other, before any rank starts; returns how to overlap.

    Raises:
        ConfigError: flags that contradict each other, or a checkpoint without a tokenizer.
        CheckpointError: its settings cannot be read.
    """
    config = overlap_config(options)
    if options.enable_expert_parallel and options.num_processes == 1:
        raise ConfigError(
            "--enable-expert-parallel needs --data-parallel-size 2 or more, or --tensor-parallel-size; one rank has "
            "all experts."
        )
    transport = LOCAL
    if options.enable_expert_parallel:
        transport = check_transport(options.all2all_backend, options.all2all_options, options.num_processes)
    else:
        for flag, value in (
            ("--all2all-backend", options.all2all_backend),
            ("--all2all-options", options.all2all_options),
        ):
            if value:
                raise ConfigError(f"{flag} needs --enable-expert-parallel; without it no token travels.")
        if options.emulated_link is not None and options.tensor_parallel_size == 1:
            raise ConfigError(
                "--emulated-link needs --enable-expert-parallel, or --tensor-parallel-size 2 or more; without them "
                "nothing travels."
            )
    graph_options(options)
    load_tokenizer(options.model)
    speculation = speculation_of(options)
    model, _ = read_config(options.model)
    if model.num_experts:
        check_schedules_by_name(config, transport, verifies=speculation is not None)
    if options.tensor_parallel_size > 1:
        faults = tensor_parallel_faults(
            model,
            options.tensor_parallel_size,
            "--tensor-parallel-size",
            expert_parallel=options.enable_expert_parallel,
        )
        for fault in faults:
            raise ConfigError(fault)
    return config


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
        if options.num_processes > 1:
            flag = "--data-parallel-size" if options.data_parallel_size > 1 else "--tensor-parallel-size"
            raise ConfigError(f"--device cuda with {flag}: use `ubatch serve` for ranks with a GPU each.")
        if not count_gpus():
            raise ConfigError("--device cuda: there is no GPU here that torch can use. Use --device cpu.")
    if options.device != "auto":
        return options.device
    return "cuda" if options.num_processes == 1 and count_gpus() else "cpu"


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


def speculation_of(options: Options) -> SpeculationConfig | None:
    """Who guesses tokens ahead; None for nobody.

    Raises:
        ConfigError: flags that contradict each other, or the checkpoints.
    """
    if options.speculation == Speculation():
        return None
    return read_speculation(options.speculation, read_config(options.model)[0], options.model)


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


def compute_dtype(options: Options, device: str) -> torch.dtype:
    """What the ranks compute in."""
    name: str = options.dtype
    if name == "auto":
        name, _ = choose_dtype(device, read_config(options.model)[1])
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
