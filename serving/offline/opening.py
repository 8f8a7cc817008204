"""What `LLM` and `AsyncLLM` do before engines start: options become settings, their notes are logged, the tokenizer and
the checkpoint's files are read. vLLM's options are done, take another name here, or are refused with a sentence.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeVar

from model_runner import MAX_TOP_LOGPROBS
from serving.engine.launch import refuse_unguarded_main
from serving.engine.options import EngineOptions
from serving.engine.rank.build import count_gpus
from serving.engine.rank.tracing import TEMPORARY
from serving.logs import log_event
from serving.offline.engine_args import EngineArgs
from serving.offline.front import Front, FrontOptions
from serving.offline.not_offered import refusals
from serving.options import (
    GENERATE,
    SERVE,
    Settings,
    chosen_dtype,
    fetch_checkpoints,
    notes,
    resolve_keywords,
    to_engine_options,
)
from serving.options.sources import read_keywords
from serving.text.tokenizer import load_tokenizer
from ubatch import ConfigError
from ubatch.errors import shown

_logger = logging.getLogger(__name__)
_Owner = TypeVar("_Owner")

_PROFILE_FOLDER = "VLLM_TORCH_PROFILER_DIR"
"""vLLM's environment variable for the folder that profiles are written to."""
_RANKS = "VLLM_DP_SIZE"
_OF_SERVER = SERVE.settings.keys() - GENERATE.settings.keys() - EngineArgs.__dataclass_fields__.keys()


_SAME = {"kv_cache_memory_bytes": "kv_cache_memory", "async_scheduling": "overlap_schedule"}
"""vLLM's option -> the setting."""
_DONE = {*FrontOptions.__dataclass_fields__, *_SAME, "speculative_config", "profiler_config"} - {"profile_folder"}
"""Options of vLLM that are no settings of `ubatch serve` by these names."""


@dataclass(frozen=True)
class Opened:
    """All that engines and their callers need.

    Attributes:
        profile_folder: where profiles are written if nobody says; None for a new folder.
    """

    options: EngineOptions
    front: Front
    profile_folder: Path | None


def opened(model: str | Path, **options: Any) -> Opened:
    """From a caller's options; notes are logged.

    Raises:
        ConfigError, CheckpointError: see `LLM`.
        SystemExit: this process is a rank that still imports the caller's script.
    """
    refuse_unguarded_main()
    settings, front = resolve_options(model, options)
    for note in notes(settings):
        log_event(_logger, note, level=logging.WARNING)
    for choice in chosen_dtype(settings):
        log_event(_logger, choice)
    return opened_settings(settings, front)


def opened_settings(settings: Settings, front: FrontOptions) -> Opened:
    """From settings whose notes were told."""
    options = to_engine_options(settings)
    if options.node_rank > 0:
        raise ConfigError("LLM runs on machine 0. On the others call `ubatch generate` with the same settings.")
    tokenizer = None if front.skip_tokenizer_init else load_tokenizer(options.model)
    made = Front(options.model, tokenizer, front, priorities=settings["scheduling_policy"] == "priority")
    fetch_checkpoints(settings)
    return Opened(options, made, front.profile_folder)


def close_when_forgotten(owner: _Owner, close: Callable[[], object]) -> weakref.finalize[[], _Owner]:
    """Close an engine once nobody has its owner any more, as scripts write `del llm`; or earlier, by a call."""
    closing = weakref.finalize(owner, close)
    closing.atexit = False
    return closing


def profile_path(folder: str | Path | None) -> Path:
    """The folder that a profile is written to: this one, or a new temporary one."""
    return Path(mkdtemp(prefix=TEMPORARY) if folder is None else folder)


# -- from options to settings ----------------------------------------------------------------------------------------


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
    if str(given.get("tokenizer")) == str(model):
        given.pop("tokenizer", None)
    for name, rule in refusals(EngineArgs).items():
        if rule.matters(value := given.pop(name, None)):
            raise ConfigError(f"{name} is not supported: {rule.why}. Remove {name}={shown(value)}.")
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
        found = os.environ.get(_PROFILE_FOLDER)
        return Path(found) if found else None
    folder = given.get("torch_profiler_dir") if isinstance(given, Mapping) else None
    if not isinstance(folder, str | Path) or given.keys() - {"profiler", "torch_profiler_dir"}:
        message = "profiler_config may have torch_profiler_dir, the folder for profiles, and profiler"
        raise ConfigError(f"{message}, not {shown(given)}.")
    return Path(folder)
