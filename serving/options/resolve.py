"""Turn a command line into an engine's options, in the order of `resolve_settings`.

read      words, a file, the environment, keywords    `sources`
merge     which source counts                          `sources`
check     what needs neither checkpoint nor machine    `checks`
locate    the checkpoints' folders, and their config
derive    what nobody gave                             here, `overlap`, `speculation`
check     against the checkpoint and the machine       `checks`
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from model_runner import DEFAULT_KV_CACHE_MEMORY, CheckpointError, ModelConfig, capture_sizes
from model_runner.parallel import AUTO, choose_all2all
from moe.balance import EplbConfig
from serving.engine.options import AUTO_DTYPE, EngineOptions, RestartLimits
from serving.engine.rank.build import choose_dtype, count_gpus, read_checkpoint
from serving.hub import fetch_weights, find_checkpoint
from serving.options.checks import check_alone, check_sizes, check_with_model, notes, place_experts
from serving.options.flags.server_flags import GPU_MEMORY_UTILIZATION, MAX_ENGINE_RESTARTS
from serving.options.flags.tables import SERVE, Table
from serving.options.overlap import derive_overlap, measured_kinds, overlap_config
from serving.options.sources import (
    Layer,
    Settings,
    merge,
    read_environment,
    read_keywords,
    read_layers,
    settle_environment,
)
from serving.options.speculation import check_draft_network, derive_speculation, speculation_config
from serving.scheduler import SchedulerConfig, SchedulingPolicy
from ubatch import ConfigError


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
    the keywords do not. Engines are not started again unless the keywords say so.

    Raises:
        ConfigError: anything that cannot work, in one line.
    """
    environment = {name: each for name, each in read_environment().items() if name != "api_key"}
    layers = environment, read_keywords({"model": model, **keywords})
    return resolve_settings(*layers, first=lambda settings, _: settings.fill("max_engine_restarts", 0))


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
    settings = place_experts(settings, model)
    settings = derive(settings, model, stored, gpus)
    check_with_model(settings, model, gpus)
    check_draft_network(settings, model)
    if fault is not None:
        raise ConfigError(str(fault)) from fault
    return settings


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
        "eplb_config": EplbConfig.of(s["eplb_config"] or {}),
        "placement": s.placement,
        "dbo": overlap_config(s),
        "dbo_kinds": measured_kinds(s),
        "scheduler": SchedulerConfig(**scheduler),
        "speculation": speculation_config(s),
        "profile_folder": s["profile_dir"],
        "restarts": RestartLimits(**_of_same_name(RestartLimits, s)),
    }
    return EngineOptions(**engine)


def _of_same_name(kind: type[SchedulerConfig | EngineOptions | RestartLimits], s: Settings) -> dict[str, Any]:
    """The settings that are called like a field of `kind`."""
    return {each.name: s[each.name] for each in fields(kind) if each.name in s.all}


# -- the checkpoints' folders on this machine -------------------------------------------------------------------------


def locate(s: Settings) -> Settings:
    """Settings with the checkpoints' folders; for checkpoints on the hub, downloads config and tokenizer.

    Raises:
        ModelNotFound, CheckpointError: a checkpoint cannot be found or downloaded, or a folder has no weights.
        ConfigError: `revision` or `download_dir` is given, but the checkpoints are folders here.
    """
    located = {
        name: find_checkpoint(s[name], s.spell(name), revision=revision, download_dir=s["download_dir"])
        for name, revision in (("model", s["revision"]), ("speculative_draft_model_path", None))
        if s[name] is not None
    }
    if located["model"].name is None and s["revision"] is not None:
        raise ConfigError(f"{s.spell('revision')} has no effect: {s['model']} is a folder here. Remove it.")
    if s["download_dir"] is not None and all(each.name is None for each in located.values()):
        raise ConfigError(f"{s.spell('download_dir')} has no effect: {s['model']} is a folder here. Remove it.")
    for name, each in located.items():
        if each.name is None and s["load_format"] != "dummy":
            fetch_weights(each, s.spell(name))
    return replace(s, located=located)


def fetch_checkpoints(s: Settings) -> None:
    """Download the weights that are missing, before any rank starts."""
    for name, each in s.located.items():
        if each.name is not None and s["load_format"] != "dummy":
            fetch_weights(each, s.spell(name))


# -- the settings that nobody gave, from those that were given, the checkpoint and the machine -------------------------


def derive(s: Settings, model: ModelConfig, stored: Sequence[str], gpus: int) -> Settings:
    """Derive the settings that nobody gave, each after those that it depends on.

    Args:
        stored: data types of the checkpoint; see `choose_dtype`.
    """
    s = _derive_device(s, gpus)
    if s["dtype"] == "auto":
        s = s.derive("dtype", *_chosen_dtype(s, model, stored))
    s = _derive_memory(s)
    s = _derive_transport(s)
    s = _derive_from_checkpoint(s, model)
    s = _derive_steps(s)
    s = _derive_graphs(s)
    s = derive_speculation(s)
    s = s.fill("max_engine_restarts", MAX_ENGINE_RESTARTS if s.table is SERVE else 0)
    return _derive_loop(s)


def _on_gpu(s: Settings) -> tuple[bool, str]:
    """Whether the ranks run on GPUs; also as words."""
    on_gpu = s["device"] == "cuda"
    return on_gpu, "on a GPU" if on_gpu else "on a CPU"


def _derive_device(s: Settings, gpus: int) -> Settings:
    if s["device"] != "auto":
        return s
    return s.derive("device", "cuda" if gpus else "cpu", f"{gpus or 'no'} GPU here")


def _derive_memory(s: Settings) -> Settings:
    on_gpu, where = _on_gpu(s)
    if not on_gpu:
        return s.fill("kv_cache_memory", DEFAULT_KV_CACHE_MEMORY, where)
    return s if s["kv_cache_memory"] is not None else s.fill("gpu_memory_utilization", GPU_MEMORY_UTILIZATION, where)


def _derive_transport(s: Settings) -> Settings:
    if s["all2all_backend"] not in (None, AUTO) or not s["enable_expert_parallel"]:
        return s
    return s.derive("all2all_backend", *choose_all2all(stream_ordered=_on_gpu(s)[0], one_machine=s["nnodes"] == 1))


def _derive_from_checkpoint(s: Settings, model: ModelConfig) -> Settings:
    s = s.fill("max_model_len", model.max_position_embeddings, "the checkpoint's")
    s = s.fill("served_model_name", str(s["model"]), "MODEL")
    if s.given("num_state_snapshots") and not model.linear_layers:
        note = f"{s.spell('num_state_snapshots')} has no effect: no layer of this model has linear attention"
        s = replace(s, notes=(*s.notes, note))
    return s


def _derive_loop(s: Settings) -> Settings:
    on_gpu, where = _on_gpu(s)
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
    tokens, why = SchedulerConfig.max_num_batched_tokens, ""
    if (s["max_num_seqs"] or 0) > tokens:
        tokens, why = s["max_num_seqs"], "one token for each of --max-num-seqs"
    if not s["enable_chunked_prefill"] and s["max_model_len"] > tokens:
        tokens, why = s["max_model_len"], "a whole prompt, as prompts are not chunked"
    s = s.fill("max_num_batched_tokens", tokens, why)
    limited = s["max_num_batched_tokens"] < SchedulerConfig.max_num_seqs
    most = s["max_num_batched_tokens"] if limited else SchedulerConfig.max_num_seqs
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
