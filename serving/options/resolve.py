"""Turn a command line into an engine's options, in the order of `resolve_settings`.

read      words, a file, the environment, keywords    `command_line`, `sources`
merge     which source counts                          `sources`
check     what needs neither checkpoint nor machine    `checks`
locate    the checkpoints' folders, and their config   `folders`
derive    what nobody gave                             `derived`, `overlap`, `speculation`
check     against the checkpoint and the machine       `checks`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from model_runner import CheckpointError
from moe.balance import EplbConfig
from serving.engine.options import EngineOptions, RestartLimits
from serving.engine.rank.runner_setup import count_gpus, read_checkpoint
from serving.options.checks import check_alone, check_sizes, check_with_model, notes, place_experts
from serving.options.command_line import read_layers
from serving.options.derived import derive
from serving.options.flags.tables import SERVE, Table
from serving.options.folders import locate
from serving.options.overlap import derive_overlap, measured_kinds, overlap_config
from serving.options.sources import Layer, Settings, merge, read_environment, read_keywords, settle_environment
from serving.options.speculation import check_draft_network, speculation_config
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
