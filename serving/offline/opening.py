"""What `LLM` and `AsyncLLM` do before engines start: settings, their notes, the tokenizer, the checkpoint's files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.engine.launch import refuse_unguarded_main
from serving.engine.options import EngineOptions
from serving.logs import log_event
from serving.offline.front import Front
from serving.offline.options import FrontOptions, resolve_options
from serving.options import Settings, chosen_dtype, fetch_checkpoints, notes, to_engine_options
from serving.text.tokenizer import load_tokenizer
from ubatch import ConfigError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """All that engines and their callers need.

    Attributes:
        tokenizer: None with `skip_tokenizer_init`.
        profile_folder: where profiles are written if nobody says; None for a new folder.
    """

    options: EngineOptions
    tokenizer: Any
    front: Front
    profile_folder: Path | None


def opened(model: str | Path, options: Mapping[str, Any]) -> Opened:
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
        raise ConfigError(
            "LLM runs on machine 0. On the others call `ubatch serve` or `ubatch generate` with the same settings."
        )
    tokenizer = None if front.skip_tokenizer_init else load_tokenizer(options.model)
    made = Front(options.model, tokenizer, front, priorities=settings["scheduling_policy"] == "priority")
    fetch_checkpoints(settings)
    return Opened(options, tokenizer, made, front.profile_folder)
