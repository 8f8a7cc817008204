"""Turn a command line into an engine's options: read, merge, check, derive, check again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from model_runner import DEFAULT_KV_CACHE_MEMORY, CheckpointError, ModelConfig, capture_sizes
from model_runner.parallel.transport import AUTO, choose_all2all
from serving.engine.options import AUTO_DTYPE, EngineOptions
from serving.engine.rank.runner_setup import choose_dtype, count_gpus, read_checkpoint
from serving.options.checks import check_alone, check_sizes, check_with_model, notes
from serving.options.command_line import read_layers
from serving.options.flags.tables import SERVE, Table
from serving.options.folders import locate
from serving.options.overlap import derive_overlap, measured_kinds, overlap_config
from serving.options.sources import (
    SECRETS,
    Layer,
    Setting,
    Settings,
    Source,
    merge,
    read_environment,
    read_keywords,
    settle_environment,
)
from serving.options.speculation import check_draft_network, derive_speculation, speculation_config
from serving.scheduler import SchedulerConfig, SchedulingPolicy
from ubatch import ConfigError

_MAX_NUM_SEQS, _MAX_NUM_BATCHED_TOKENS = 256, 2048
_GPU_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True)
class Command:
    """A resolved command that runs engines.

    Attributes:
        settings: every setting in force, checked for contradictions.
        engine: the options of the engines.
        print_config: print the settings, and exit.
        notes: settings that are allowed but may be mistakes, one sentence each.
    """

    settings: Settings
    engine: EngineOptions
    print_config: bool
    notes: tuple[str, ...]


def read_serve_command(program: str, description: str, words: Sequence[str]) -> Command:
    """Read the command line, the settings file that it names, and the environment.

    Raises:
        ConfigError: anything that cannot work, in one line.
        SystemExit: after `--help`.
    """
    layers, print_config = read_layers(SERVE, program, description, words)
    settings = resolve_settings(*layers)
    return Command(settings, to_engine_options(settings), print_config, tuple(notes(settings)))


def resolve_keywords(model: str | Path, keywords: Mapping[str, Any]) -> Settings:
    """Settings from Python: the flags' names in snake case, without `config`. The environment sets the transport if
    the keywords do not.

    Raises:
        ConfigError: anything that cannot work, in one line.
    """
    environment = {name: each for name, each in read_environment().items() if name != "api_key"}
    return resolve_settings(environment, read_keywords({"model": model, **keywords}))


def resolve_settings(
    *layers: Layer,
    gpus: int | None = None,
    table: Table = SERVE,
    first: Callable[[Settings, int], Settings] | None = None,
) -> Settings:
    """The settings in force.

    Args:
        layers: settings by source, the weakest first.
        gpus: number of CUDA devices; those of this machine by default.
        first: derives what this command derives differently from the server, also from the number of GPUs; runs before
            the other derivations.

    Raises:
        ConfigError: settings contradict each other, the checkpoint or the machine, or there is no checkpoint.
    """
    settings = derive_overlap(settle_environment(merge(*layers, table=table)))
    check_alone(settings)
    try:
        settings = locate(settings)
        model, stored, fault = read_checkpoint(settings.folders["model"], settings["load_format"])
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    gpus = count_gpus() if gpus is None else gpus
    if first is not None:
        settings = first(settings, gpus)
    check_sizes(settings, model)
    settings = _derive(settings, model, stored, gpus)
    check_with_model(settings, model, gpus)
    check_draft_network(settings, model)
    if fault is not None:
        raise ConfigError(str(fault)) from fault
    return settings


def _derive(s: Settings, model: ModelConfig, stored: Sequence[str], gpus: int) -> Settings:
    """Derive the settings that nobody gave, each after the settings that it depends on."""
    if s["device"] == "auto":
        s = s.derive("device", "cuda" if gpus else "cpu", f"{gpus or 'no'} GPU here")
    on_gpu = s["device"] == "cuda"
    where = "on a GPU" if on_gpu else "on a CPU"
    if s["dtype"] == "auto":
        s = s.derive("dtype", *_chosen_dtype(s, model, stored))
    if not on_gpu:
        s = s.fill("kv_cache_memory", DEFAULT_KV_CACHE_MEMORY, where)
    elif s["kv_cache_memory"] is None:
        s = s.fill("gpu_memory_utilization", _GPU_MEMORY_UTILIZATION, where)
    if s["all2all_backend"] in (None, AUTO) and s["enable_expert_parallel"]:
        s = s.derive("all2all_backend", *choose_all2all(stream_ordered=on_gpu, one_machine=s["nnodes"] == 1))
    s = s.fill("max_model_len", model.max_position_embeddings, "the checkpoint's")
    s = s.fill("served_model_name", str(s["model"]), "MODEL")
    if s.given("num_state_snapshots") and not model.linear_layers:
        note = f"{s.spell('num_state_snapshots')} has no effect: no layer of this model has linear attention"
        s = replace(s, notes=(*s.notes, note))
    s = derive_speculation(_derive_graphs(_derive_steps(s)))
    speculates = s["speculative_algorithm"] is not None
    why = "speculation needs the step before" if speculates else where
    return s.fill("overlap_schedule", on_gpu and not speculates, why)


def _chosen_dtype(s: Settings, model: ModelConfig, stored: Sequence[str]) -> tuple[str, str]:
    """The dtype for `auto`, and why."""
    if s["device"] == "cpu" and s["node_rank"] > 0:  # processors may differ, but all ranks must compute alike
        return AUTO_DTYPE, "machine 0 chooses"
    size = s["tensor_parallel_size"]
    threads = 1 if s["data_parallel_size"] * size // s["nnodes"] > 1 else None  # see `pin_rank`
    return choose_dtype(s["device"], stored, model, s["moe_backend"], threads, size)


def _derive_steps(s: Settings) -> Settings:
    tokens, why = _MAX_NUM_BATCHED_TOKENS, ""
    if (s["max_num_seqs"] or 0) > tokens:
        tokens, why = s["max_num_seqs"], "one token for each of --max-num-seqs"
    if not s["enable_chunked_prefill"] and s["max_model_len"] > tokens:
        tokens, why = s["max_model_len"], "a whole prompt, as prompts are not chunked"
    s = s.fill("max_num_batched_tokens", tokens, why)
    limited = s["max_num_batched_tokens"] < _MAX_NUM_SEQS
    most = s["max_num_batched_tokens"] if limited else _MAX_NUM_SEQS
    return s.fill("max_num_seqs", most, "as many as a step has tokens" if limited else "")


def _derive_graphs(s: Settings) -> Settings:
    """Derive the CUDA graph settings. Mode `auto` may remain: then the ranks capture if all their back ends can."""
    if s["cudagraph_mode"] == "auto" and (s["device"] == "cpu" or s["enforce_eager"]):
        why = "on a CPU" if s["device"] == "cpu" else s.spell("enforce_eager")
        s = s.derive("cudagraph_mode", "none", why)
    if s["cudagraph_mode"] == "none" or s["device"] == "cpu":
        return s
    sizes = capture_sizes(s["max_num_seqs"], None, s["max_cudagraph_capture_size"])
    s = s.fill("cudagraph_capture_sizes", sizes, "usual ones")
    return s.fill("max_cudagraph_capture_size", max(s["cudagraph_capture_sizes"]), "largest that is captured")


def to_engine_options(s: Settings) -> EngineOptions:
    """Make the engines' options from the settings."""
    mixed = s["max_prefill_tokens_per_mixed_step"]
    scheduler = {
        **_of_same_name(SchedulerConfig, s),
        "max_prefill_tokens_per_mixed_step": None if mixed == "off" else mixed,
        "policy": SchedulingPolicy(s["scheduling_policy"]),
    }
    engine = {
        **_of_same_name(EngineOptions, s),
        "model": s.folders["model"],
        "dbo": overlap_config(s),
        "dbo_kinds": measured_kinds(s),
        "scheduler": SchedulerConfig(**scheduler),
        "speculation": speculation_config(s),
        "profile_folder": s["profile_dir"],
    }
    return EngineOptions(**engine)


def _of_same_name(kind: type[SchedulerConfig | EngineOptions], s: Settings) -> dict[str, Any]:
    """The settings that are called like a field of `kind`."""
    return {each.name: s[each.name] for each in fields(kind) if each.name in s.all}


def chosen_dtype(settings: Settings) -> tuple[str, ...]:
    """What `--dtype auto` chose on a CPU, and why, in one line for the user; none if it had nothing to choose."""
    dtype = settings.all["dtype"]
    if dtype.source is not Source.DERIVED or settings["device"] != "cpu":
        return ()
    chosen = "" if dtype.value == AUTO_DTYPE else f" is {dtype.value}"
    return (f"--dtype auto{chosen}: {dtype.detail}",)


_OBEYED_IF_GIVEN = frozenset({"dbo_decode_token_threshold", "dbo_prefill_token_threshold"})


def describe_settings(settings: Settings) -> str:
    """The settings in force as a YAML file; a comment behind each names its source. Secrets are not shown; a
    threshold that nobody gave is a comment, since one in a file is obeyed."""
    rows = []
    for name, setting in settings.all.items():
        if name not in settings.table.settings:
            continue
        key, value = name.replace("_", "-"), json.dumps(setting.value, default=str)
        if name in SECRETS and setting.value is not None:
            key, value = f"# {key}", "(not shown)"
        if name in _OBEYED_IF_GIVEN and setting.source is Source.DEFAULT:
            key, value = f"# {key}", "(running steps decide)"
        rows.append((f"{key}: {value}", _came_from(setting)))
    width = max(len(text) for text, _ in rows)
    return "\n".join(f"{text:{width}}  # {came_from}" for text, came_from in rows)


def _came_from(setting: Setting) -> str:
    if setting.source in (Source.FILE, Source.ENVIRONMENT):
        return setting.detail
    return f"derived: {setting.detail}" if setting.source is Source.DERIVED else setting.source.value
