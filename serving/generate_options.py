"""What `ubatch generate` was asked to do: its flags, file and environment, and what follows before any rank starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_runner import DEFAULT_KV_CACHE_MEMORY
from serving.engine.options import EngineOptions
from serving.hub import looks_like_name
from serving.options import (
    GENERATE,
    Layer,
    Machine,
    Settings,
    Source,
    Table,
    merge,
    notes,
    read_layers,
    resolve_settings,
    to_engine_options,
)
from serving.text.tokenizer_files import TOKENIZER, read_tokenizer
from ubatch import ConfigError

__all__ = ["GenerateCommand", "Prompts", "load_tokenizer", "read", "resolve_offline"]

_MOST_PROMPTS_AT_ONCE = 256


@dataclass(frozen=True)
class Prompts:
    """What to generate from, and how tokens are chosen; names are the flags'."""

    prompt: tuple[str, ...]
    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True)
class GenerateCommand:
    """What to run.

    Attributes:
        settings: all of them, in force and without contradictions.
        prompts: what to generate from.
        engine: what the ranks are made from.
        print_config: print the settings and exit.
        notes: what is allowed but may not be what was meant.
    """

    settings: Settings
    prompts: Prompts
    engine: EngineOptions
    print_config: bool = False
    notes: tuple[str, ...] = ()


def read(program: str, description: str, words: Sequence[str]) -> GenerateCommand:
    """The command line, with the file it names and the environment.

    Raises:
        ConfigError: anything that cannot work, in one line.
        SystemExit: after `--help`.
    """
    layers, print_config = read_layers(GENERATE, program, description, words)
    return resolve_offline(layers, GENERATE, print_config=print_config)


def resolve_offline(layers: Sequence[Layer], table: Table, *, print_config: bool = False) -> GenerateCommand:
    """What to run, of a command that generates from prompts.

    Args:
        layers: from the weakest to the strongest.
        table: of the command.
        print_config: see `GenerateCommand`.

    Raises:
        ConfigError: settings that contradict each other, the checkpoint or the machine; no prompt, or no tokenizer.
    """
    if not merge(*layers, table=table)["prompt"] and not print_config:
        raise ConfigError("--prompt is missing: give one or more prompts to generate from.")
    _check_model(layers, table)
    settings = resolve_settings(*layers, table=table, first=_derive)
    load_tokenizer(settings.folders["model"])
    prompts = Prompts(**{name: settings[name] for name in Prompts.__dataclass_fields__})
    told = list(notes(settings))
    greedy = [settings.spell(name) for name in ("top_k", "top_p", "seed") if settings.given(name)]
    if greedy and prompts.temperature == 0:
        told.append(f"{', '.join(greedy)} without --temperature: the likeliest token is taken")
    return GenerateCommand(settings, prompts, to_engine_options(settings), print_config, tuple(told))


def _check_model(layers: Sequence[Layer], table: Table) -> None:
    """See whether the list of prompts has taken MODEL.

    Raises:
        ConfigError: it has.
    """
    settings = merge(*layers, table=table)
    prompts = settings.all["prompt"]
    if settings["model"] is not None or prompts.source is not Source.COMMAND_LINE or len(prompts.value) < 2:
        return
    last = prompts.value[-1]
    if ("/" in last and looks_like_name(last)) or (last and Path(last).is_dir()):
        raise ConfigError(
            f"MODEL is missing: {prompts.spelled} takes all words that follow, and so {last!r}. Put MODEL first, or "
            f"write --model {last}."
        )


def _derive(s: Settings, machine: Machine) -> Settings:
    """What a run has otherwise than a server: several ranks run on a CPU, and as many prompts at once as it is given.

    Raises:
        ConfigError: several ranks would need a GPU each.
    """
    processes = s["data_parallel_size"] * s["tensor_parallel_size"]
    if s["device"] == "cuda" and processes > 1:
        flag = "data_parallel_size" if s["data_parallel_size"] > 1 else "tensor_parallel_size"
        raise ConfigError(
            f"{s.spell('device')} cuda with {s.spell(flag)}: use `ubatch serve` for ranks with a GPU each."
        )
    if s["device"] == "auto" and processes > 1:
        s = s.derive("device", "cpu", "several ranks")
    if s["kv_cache_memory"] is None and s["gpu_memory_utilization"] is None:
        s = s.derive("kv_cache_memory", DEFAULT_KV_CACHE_MEMORY, "as much as on a CPU")
    if s["max_num_seqs"] is None:
        most = min(_MOST_PROMPTS_AT_ONCE, s["max_num_batched_tokens"] or _MOST_PROMPTS_AT_ONCE)
        prompts = -(-len(s["prompt"]) // s["data_parallel_size"])
        s = s.derive("max_num_seqs", max(1, min(most, prompts)), "the prompts of a rank")
    return s


def load_tokenizer(model: Path) -> Any:
    """The checkpoint's own tokenizer.

    Raises:
        ConfigError: the folder has no `tokenizer.json`, or a broken or empty one.
    """
    file = model / TOKENIZER
    if not file.is_file():
        raise ConfigError(f"{file} does not exist. `model` must be the folder of a checkpoint with its tokenizer.")
    return read_tokenizer(file)
