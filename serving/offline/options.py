"""From `EngineArgs` to settings: vLLM's options are done, take another name here, or are refused with a sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from model_runner import MAX_TOP_LOGPROBS
from serving.engine.rank.runner_setup import count_gpus
from serving.offline.engine_args import EngineArgs
from serving.options import GENERATE, SERVE, Settings, resolve_keywords
from serving.options.sources import read_keywords
from ubatch import ConfigError
from ubatch.errors import shown

MAX_LOGPROBS = 20
"""Most likely tokens that a request may ask for at each position, unless `max_logprobs` says otherwise."""
PROFILE_FOLDER = "VLLM_TORCH_PROFILER_DIR"
"""vLLM's environment variable for the folder that profiles are written to."""
_RANKS = "VLLM_DP_SIZE"
_OF_SERVER = SERVE.settings.keys() - GENERATE.settings.keys() - EngineArgs.__dataclass_fields__.keys()


@dataclass(frozen=True)
class FrontOptions:
    """Options that no engine sees. See `EngineArgs`.

    Attributes:
        profile_folder: where `stop_profile` writes if its caller does not say; None for a new folder.
    """

    skip_tokenizer_init: bool = False
    seed: int | None = 0
    max_logprobs: int = MAX_LOGPROBS
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    profile_folder: Path | None = None


@dataclass(frozen=True)
class _Asks:
    """A refused option of vLLM.

    Attributes:
        why: the reason, or what to do instead; completes a sentence.
        neutral: values that ask for nothing, besides the default and None.
    """

    why: str
    neutral: tuple[Any, ...] = ()


_TEXT_ONLY = _Asks("models read and write text only", ({},))
_LORA = _Asks("there are no LoRA adapters; merge one into the checkpoint")
_WORKERS = _Asks("ranks run this project's own workers")
_ELSEWHERE = _Asks("keys and values are not exchanged with other servers")
_ANY = (True, False)
REFUSED: Mapping[str, _Asks] = {
    "disable_log_stats": _Asks("outputs always have metrics, and get_metrics works", _ANY),
    "disable_custom_all_reduce": _Asks("there is no custom all-reduce", _ANY),
    "disable_cascade_attn": _Asks("there is no cascade attention", _ANY),
    "use_tqdm_on_load": _Asks("whether there is a bar depends on the terminal", _ANY),
    "tokenizer": _Asks("the tokenizer is the checkpoint's; put that tokenizer's files into its folder"),
    "tokenizer_mode": _Asks("tokenizers are transformers' fast ones", ("auto", "hf")),
    "tokenizer_revision": _Asks("the tokenizer is the checkpoint's; use revision"),
    "code_revision": _Asks("no code of a checkpoint is ever run"),
    "hf_token": _Asks("log in with `hf auth login`, or set HF_TOKEN", (False,)),
    "hf_overrides": _Asks("change the checkpoint's config.json, or a copy of it", ({},)),
    "hf_config_path": _Asks("put the config.json into the checkpoint's folder"),
    "config_format": _Asks("configs are Hugging Face's", ("hf",)),
    "task": _Asks("models generate text; embeddings, scores and classes are not offered", ("auto", "generate")),
    "runner": _Asks("models generate text; embeddings, scores and classes are not offered", ("generate",)),
    "convert": _Asks("models generate text; embeddings, scores and classes are not offered", ("none",)),
    "model_impl": _Asks("models are this project's", ("vllm",)),
    "quantization": _Asks("the checkpoint's config says how it is quantized (docs/quantization.md)"),
    "swap_space": _Asks("nothing is swapped out: a request that loses its pages is computed again", (0, 4, 0.0, 4.0)),
    "cpu_offload_gb": _Asks("weights stay where they are computed with; use more ranks", (0, 0.0)),
    "max_seq_len_to_capture": _Asks("graphs are captured by requests, not by length; use max_cudagraph_capture_size"),
    "num_gpu_blocks_override": _Asks("use kv_cache_memory, in bytes"),
    "pipeline_parallel_size": _Asks("use tensor_parallel_size or data_parallel_size"),
    "distributed_executor_backend": _Asks(
        "LLM starts its ranks by itself: call the script once, without a launcher; data_parallel_size and "
        "tensor_parallel_size say how many",
        ("mp", "uni"),
    ),
    "data_parallel_backend": _Asks("ranks are processes of this machine, or of several with nnodes"),
    "worker_cls": _WORKERS,
    "worker_extension_cls": _WORKERS,
    "scheduler_cls": _Asks("the scheduler is this project's; see scheduling_policy"),
    "compilation_config": _Asks("nothing is compiled; use cudagraph_mode and cudagraph_capture_sizes", ({},)),
    "structured_outputs_config": _Asks(
        "grammars are llguidance's; SamplingParams(structured_outputs=...) says what form an output has",
        ({}, {"backend": "auto"}, {"backend": "guidance"}),
    ),
    "reasoning_parser": _Asks("an output has its whole text, reasoning too; split it at the model's marker"),
    "logprobs_mode": _Asks("log-probabilities are the model's own, before temperature and penalties"),
    "logits_processors": _Asks("no code runs on logits; use logit_bias, allowed_token_ids or bad_words", ([], ())),
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "enable_prompt_embeds": _Asks("prompts are text or token ids"),
    "limit_mm_per_prompt": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "allowed_local_media_path": _TEXT_ONLY,
    "pooler_config": _Asks("models generate text; embeddings, scores and classes are not offered"),
    "enable_sleep_mode": _Asks("an LLM keeps its memory until it is closed"),
    "kv_transfer_config": _ELSEWHERE,
    "kv_events_config": _ELSEWHERE,
    "stream_interval": _Asks("it is per request: SamplingParams(stream_interval=...)"),
    "additional_config": _Asks("no platform's plug-in would read it", ({},)),
    "model_loader_extra_config": _Asks("checkpoints are safetensors files", ({},)),
}
"""Options of vLLM that are refused, unless their value asks for nothing."""
_DONE = frozenset(
    {"skip_tokenizer_init", "seed", "max_logprobs", "generation_config", "override_generation_config"}
    | {"speculative_config", "profiler_config", "kv_cache_memory_bytes", "async_scheduling"}
)
"""Options of vLLM that are no settings of `ubatch serve` by these names."""
_SAME = {"kv_cache_memory_bytes": "kv_cache_memory", "async_scheduling": "overlap_schedule"}
"""vLLM's option -> the setting."""


def resolve_options(model: str | Path, options: Mapping[str, Any]) -> tuple[Settings, FrontOptions]:
    """Settings and the other options, from the keyword arguments of `LLM`.

    Raises:
        ConfigError: an unknown option, a wrong value, a contradiction, or an option that is not offered.
    """
    if os.environ.get(_RANKS, "1") != "1":
        raise ConfigError(
            f"{_RANKS} is set, as by a script that starts its data-parallel ranks, but an LLM starts them by itself. "
            "Make one LLM(data_parallel_size=...) in place of one per rank."
        )
    for name in sorted(set(options) & _OF_SERVER):
        raise ConfigError(f"{name} is for `ubatch serve`, and LLM has no server. Remove it.")
    known = {name: value for name, value in options.items() if name in EngineArgs.__dataclass_fields__}
    unknown = {name: value for name, value in options.items() if name not in known}
    given = EngineArgs(model, **known).given()
    for name, rule in REFUSED.items():
        _check_refused(name, given.pop(name, None), rule, model)
    front = _front({name: given[name] for name in _DONE if name in given})
    given |= _renamed(given)
    if "dtype" in given:
        name = str(given["dtype"]).removeprefix("torch.")
        given["dtype"] = _DTYPES.get(name, name)
    settings = {name: value for name, value in given.items() if name not in _DONE and name != "model"}
    idle = _without_gpu(settings)
    resolved = resolve_keywords(model, {"log_level": "warning", **settings, **unknown})
    return replace(resolved, notes=(*resolved.notes, *idle)), front


def _without_gpu(settings: dict[str, Any]) -> list[str]:
    """Take out `gpu_memory_utilization`, which most of vLLM's scripts set, where ranks run on a CPU; a note says so."""
    name = "gpu_memory_utilization"
    if name not in settings or (settings.get("device") != "cpu" and count_gpus()):
        return []
    read_keywords({name: settings[name]})
    return [f"{name} ({settings.pop(name)}) has no effect: the ranks run on a CPU. kv_cache_memory sizes their cache"]


def _check_refused(name: str, value: Any, rule: _Asks, model: str | Path) -> None:
    if value is None or (name == "tokenizer" and str(value) == str(model)):
        return
    if not any(type(value) is type(each) and value == each for each in rule.neutral):
        raise ConfigError(f"{name} is not supported: {rule.why}. Remove {name}={shown(value)}.")


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that vLLM's options stand for.

    Raises:
        ConfigError: a setting is given in both ways.
    """
    made = {_SAME[name]: given[name] for name in _SAME if name in given}
    if "speculative_config" in given:
        made |= _speculation(given["speculative_config"])
    for name in made.keys() & given.keys():
        raise ConfigError(f"{name} is given twice, by its own name and by vLLM's. Remove one.")
    return made


_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of data types."""
_METHODS = {"ngram": "ngram", "eagle": "eagle", "mtp": "mtp", "draft_model": "draft_model", "deepseek_mtp": "mtp"}
_DRAFTS = {
    "num_speculative_tokens": "speculative_num_draft_tokens",
    "model": "speculative_draft_model_path",
    "prompt_lookup_max": "speculative_ngram_max",
    "prompt_lookup_min": "speculative_ngram_min",
}
_NO_DRAFTS = {"draft_tensor_parallel_size": (1,), "spec_token_tree": (), "disable_padded_drafter_batch": (False,)}


def _speculation(given: Any) -> dict[str, Any]:
    """Settings of `speculative_config`."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config is a dict with method and num_speculative_tokens, not {shown(given)}.")
    method = given.get("method") or ("draft_model" if given.get("model") else None)
    if method not in _METHODS:
        raise ConfigError(f"speculative_config: method is one of {', '.join(_METHODS)}, not {shown(method)}.")
    made = {"speculative_algorithm": _METHODS[method]}
    for name, value in given.items():
        if name == "method" or value is None or value in _NO_DRAFTS.get(name, ()):
            continue
        if name not in _DRAFTS:
            known = ", ".join(("method", *_DRAFTS))
            raise ConfigError(f"speculative_config has {shown(name)}, which is not supported; it may have {known}.")
        made[_DRAFTS[name]] = value
    return made


def _front(given: Mapping[str, Any]) -> FrontOptions:
    """The options that no engine sees, checked."""
    values: dict[str, Any] = {name: given[name] for name in FrontOptions.__dataclass_fields__ if name in given}
    front = FrontOptions(**values, profile_folder=_profile_folder(given.get("profiler_config")))
    if not isinstance(front.skip_tokenizer_init, bool):
        raise ConfigError(f"skip_tokenizer_init must be True or False, not {shown(front.skip_tokenizer_init)}.")
    seed: object = front.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ConfigError(f"seed must be an integer, or None for fresh ones, not {shown(seed)}.")
    most: object = front.max_logprobs
    if isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= MAX_TOP_LOGPROBS:
        raise ConfigError(
            f"max_logprobs must be an integer from 0 to {MAX_TOP_LOGPROBS}, the most there are, not {shown(most)}."
        )
    if not isinstance(front.generation_config, str | Path):
        raise ConfigError(f"generation_config must be auto, vllm or a folder, not {shown(front.generation_config)}.")
    if not isinstance(front.override_generation_config, Mapping):
        raise ConfigError(f"override_generation_config must be a dict, not {shown(front.override_generation_config)}.")
    return front


def _profile_folder(given: Any) -> Path | None:
    if given is None:
        found = os.environ.get(PROFILE_FOLDER)
        return Path(found) if found else None
    folder = given.get("torch_profiler_dir") if isinstance(given, Mapping) else None
    if not isinstance(folder, str | Path) or given.keys() - {"profiler", "torch_profiler_dir"}:
        message = "profiler_config may have torch_profiler_dir, the folder for profiles, and profiler"
        raise ConfigError(f"{message}, not {shown(given)}.")
    return Path(folder)
