"""`EngineArgs`: every option of `LLM`, with vLLM's names, types for editors, and flags for scripts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from serving.arguments.parser import in_kebab_case
from serving.offline.not_offered import ELSEWHERE, LOGITS, LORA, POOLING, refused

_TEXT_ONLY = "models read and write text only"
_WORKERS = "ranks run this project's own workers"
_Parser = TypeVar("_Parser", bound=argparse._ActionsContainer)


@dataclass
class EngineArgs:
    """The options of `LLM` and `AsyncLLM`: the settings of `ubatch serve`, except the HTTP server's, and those of vLLM.

    `LLM(**vars(args))` and `LLM(**dataclasses.asdict(args))` take them as they are. A value that is the default counts
    as not given. `ubatch serve --help` tells what the settings do. Those of vLLM at the end are done (`seed`,
    `speculative_config`, ...) or refused with a sentence, unless their value asks for nothing.

    Attributes:
        model: folder of a Hugging Face checkpoint, or its name on the hub.
        max_engine_restarts: None is 0: ranks that have failed are not started again.
        skip_tokenizer_init: load no tokenizer: prompts are tokens, and outputs have no text.
        seed: seeds of requests without one follow from it; None takes fresh ones.
        max_logprobs: most log-probabilities per token that a request may ask for, 0 to 20.
        generation_config: whose sampling parameters are the defaults: `auto` the checkpoint's, `vllm` none, or a folder
            with a `generation_config.json`.
        override_generation_config: values that take the place of those.
        speculative_config: `method`, `num_speculative_tokens`, `model`, `prompt_lookup_max`, `prompt_lookup_min`.
        profiler_config: `torch_profiler_dir`, where `stop_profile` writes.
    """

    model: str | Path
    _: KW_ONLY
    # The checkpoint.
    revision: str | None = None
    download_dir: str | Path | None = None
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    trust_remote_code: bool = False
    dtype: str | torch.dtype = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    allow_long_max_model_len: bool = False
    # Ranks.
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    all2all_backend: str | None = None
    all2all_options: Mapping[str, bool | int | float | str] | None = None
    moe_backend: str = "auto"
    emulated_link: tuple[float, float] | None = None
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    cluster_secret_file: str | Path | None = None
    # Overlap.
    enable_dbo: bool | None = None
    enable_two_batch_overlap: bool | None = None
    dbo_auto: bool = False
    ubatch_size: int | None = None
    num_ubatches: int | None = None
    dbo_decode_token_threshold: int | None = None
    dbo_prefill_token_threshold: int | None = None
    schedule: str | None = None
    schedule_decode: str | None = None
    schedule_prefill: str | None = None
    schedule_verify: str | None = None
    comm_sms: int | None = None
    split_by: Literal["tokens", "cost"] | None = None
    tbo_token_distribution_threshold: float | None = None
    timeout_s: float | None = None
    profile_ranges: bool = False
    enable_single_batch_overlap: bool = False
    schedules: Mapping[str, Mapping[str, Any]] | None = None
    decode: Mapping[str, Any] | None = None
    prefill: Mapping[str, Any] | None = None
    verify: Mapping[str, Any] | None = None
    # The cache.
    block_size: int = 16
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    enable_prefix_caching: bool | None = None
    num_state_snapshots: int = 64
    # Steps.
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    max_prefill_tokens_per_mixed_step: int | Literal["auto", "off"] | None = None
    scheduling_policy: Literal["fcfs", "lpm", "priority"] = "fcfs"
    prefill_first: bool = False
    overlap_schedule: bool | None = None
    # Back ends of attention, and graphs.
    attention_backend: str = "auto"
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    cudagraph_mode: Literal["auto", "none", "full"] = "auto"
    cudagraph_capture_sizes: Sequence[int] | None = None
    max_cudagraph_capture_size: int | None = None
    enforce_eager: bool = False
    # The experts' load, and its balance.
    enable_eplb: bool = False
    eplb_config: Mapping[str, Any] | None = None
    init_expert_location: str | Path | None = None
    expert_load_out: str | Path | None = None
    # Engines that have failed.
    max_engine_restarts: int | None = None
    engine_restart_window_s: float = 600.0
    resume_timeout_s: float = 60.0
    # Drafts.
    speculative_algorithm: Literal["ngram", "eagle", "mtp", "draft_model"] | None = None
    speculative_draft_model_path: str | Path | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_accept: Literal["match", "rejection"] | None = None
    speculative_ngram_max: int | None = None
    speculative_ngram_min: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    # Of vLLM: done.
    skip_tokenizer_init: bool = False
    seed: int | None = 0
    max_logprobs: int = 20
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    speculative_config: Mapping[str, Any] | None = None
    profiler_config: Mapping[str, Any] | None = None
    kv_cache_memory_bytes: int | None = None
    async_scheduling: bool | None = None
    # Of vLLM: refused, unless they ask for nothing.
    disable_log_stats: bool = refused(True, "outputs always have metrics, and get_metrics works", False)
    disable_custom_all_reduce: bool = refused(False, "there is no custom all-reduce", True)
    disable_cascade_attn: bool = refused(False, "there is no cascade attention", True)
    use_tqdm_on_load: bool = refused(True, "whether there is a bar depends on the terminal", False)
    tokenizer: str | None = refused(
        None, "the tokenizer is the checkpoint's; put that tokenizer's files into its folder"
    )
    tokenizer_mode: str = refused("auto", "tokenizers are transformers' fast ones", "hf")
    tokenizer_revision: str | None = refused(None, "the tokenizer is the checkpoint's; use revision")
    code_revision: str | None = refused(None, "no code of a checkpoint is ever run")
    hf_token: bool | str | None = refused(None, "log in with `hf auth login`, or set HF_TOKEN", False)
    hf_overrides: Any = refused(None, "change the checkpoint's config.json, or a copy of it", {})
    hf_config_path: str | None = refused(None, "put the config.json into the checkpoint's folder")
    config_format: str = refused("auto", "configs are Hugging Face's", "hf")
    task: str | None = refused(None, POOLING, "auto", "generate")
    runner: str = refused("auto", POOLING, "generate")
    convert: str = refused("auto", POOLING, "none")
    model_impl: str = refused("auto", "models are this project's", "vllm")
    quantization: str | None = refused(None, "the checkpoint's config says how it is quantized (docs/quantization.md)")
    swap_space: float = refused(
        4, "nothing is swapped out: a request that loses its pages is computed again", 0, 0.0, 4.0
    )
    cpu_offload_gb: float = refused(0, "weights stay where they are computed with; use more ranks", 0.0)
    max_seq_len_to_capture: int = refused(
        8192, "graphs are captured by requests, not by length; use max_cudagraph_capture_size"
    )
    num_gpu_blocks_override: int | None = refused(None, "use kv_cache_memory, in bytes")
    pipeline_parallel_size: int = refused(1, "use tensor_parallel_size or data_parallel_size")
    distributed_executor_backend: Any = refused(
        None,
        "LLM starts its ranks by itself: call the script once, without a launcher; data_parallel_size and "
        "tensor_parallel_size say how many",
        "mp",
        "uni",
    )
    data_parallel_backend: str = refused("mp", "ranks are processes of this machine, or of several with nnodes")
    worker_cls: Any = refused("auto", _WORKERS)
    worker_extension_cls: str = refused("", _WORKERS)
    scheduler_cls: Any = refused(None, "the scheduler is this project's; see scheduling_policy")
    compilation_config: Any = refused(None, "nothing is compiled; use cudagraph_mode and cudagraph_capture_sizes", {})
    structured_outputs_config: Any = refused(
        None,
        "grammars are llguidance's; SamplingParams(structured_outputs=...) says what form an output has",
        *({}, {"backend": "auto"}, {"backend": "guidance"}),
    )
    reasoning_parser: str = refused("", "an output has its whole text, reasoning too; split it at the model's marker")
    logprobs_mode: str = refused(
        "raw_logprobs", "log-probabilities are the model's own, before temperature and penalties"
    )
    logits_processors: Sequence[Any] | None = refused(None, LOGITS, [], ())
    enable_lora: bool = refused(False, LORA)
    max_loras: int = refused(1, LORA)
    max_lora_rank: int = refused(16, LORA)
    enable_prompt_embeds: bool = refused(False, "prompts are text or token ids")
    limit_mm_per_prompt: Mapping[str, Any] | None = refused(None, _TEXT_ONLY, {})
    mm_processor_kwargs: Mapping[str, Any] | None = refused(None, _TEXT_ONLY, {})
    allowed_local_media_path: str = refused("", _TEXT_ONLY, {})
    pooler_config: Any = refused(None, POOLING)
    enable_sleep_mode: bool = refused(False, "an LLM keeps its memory until it is closed")
    kv_transfer_config: Any = refused(None, ELSEWHERE)
    kv_events_config: Any = refused(None, ELSEWHERE)
    stream_interval: int = refused(1, "it is per request: SamplingParams(stream_interval=...)")
    additional_config: Mapping[str, Any] | None = refused(None, "no platform's plug-in would read it", {})
    model_loader_extra_config: Mapping[str, Any] | None = refused(None, "checkpoints are safetensors files", {})

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Add a flag for every option to a parser, or to a group of one."""
        for name, default, kind in _typed_fields():
            _add_flag(parser, name, default, kind)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The options among a parser's results."""
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls) if hasattr(args, each.name)})

    def given(self) -> dict[str, Any]:
        """The options whose values are not the defaults, and `model`."""
        return {
            name: value
            for name, default, _ in _typed_fields()
            if ((value := getattr(self, name)) is not None or name == "seed")
            and not (type(value) is type(default) and value == default)
        }


class AsyncEngineArgs(EngineArgs):
    """The options of `AsyncLLM`: those of `LLM`."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of `argparse.ArgumentParser`."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([in_kebab_case(word) for word in words], namespace)


def _typed_fields() -> Iterator[tuple[str, Any, Any]]:
    """Every option's name, default and type."""
    kinds = get_type_hints(EngineArgs)
    for each in fields(EngineArgs):
        default = None if each.default is MISSING else each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        yield each.name, default, kinds[each.name]


def _add_flag(parser: argparse._ActionsContainer, name: str, default: Any, kind: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    parts = [
        part for part in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)) if part is not NoneType
    ]
    origins = [get_origin(part) for part in parts]
    if parts == [bool]:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
    elif origins[0] is Literal and len(parts) == 1:
        parser.add_argument(flag, choices=get_args(parts[0]), default=default)
    elif origins[0] is tuple:
        parser.add_argument(flag, nargs=len(get_args(parts[0])), type=float, default=default)
    elif parts[0] == Sequence[int]:
        parser.add_argument(flag, nargs="+", type=int, default=default)
    elif parts[0] in (int, float) and len(parts) == 1:
        parser.add_argument(flag, type=parts[0], default=default)
    else:
        parser.add_argument(flag, type=str if set(parts) <= {str, Path} else _value, default=default)


def _value(word: str) -> Any:
    """A word of the command line as JSON, or else as it is."""
    try:
        return json.loads(word)
    except ValueError:
        return word
