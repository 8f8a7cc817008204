"""What `LLM` and `AsyncLLM` do before engines start: settings, their notes, the tokenizer, the checkpoint's files."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Protocol, TypeVar

from serving.engine.launch import refuse_unguarded_main
from serving.engine.options import EngineOptions
from serving.engine.rank.tracing import TEMPORARY
from serving.logs import log_event
from serving.offline.engine_args import EngineArgs
from serving.offline.front import Front
from serving.offline.options import FrontOptions, resolve_options
from serving.options import Settings, chosen_dtype, fetch_checkpoints, notes, to_engine_options
from serving.text.tokenizer import load_tokenizer
from ubatch import ConfigError

_logger = logging.getLogger(__name__)
_Owner = TypeVar("_Owner")


class _Closes(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Opened:
    """All that engines and their callers need.

    Attributes:
        profile_folder: where profiles are written if nobody says; None for a new folder.
    """

    options: EngineOptions
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


def opened_args(args: EngineArgs) -> Opened:
    """As `opened`."""
    options = dict(vars(args))
    return opened(options.pop("model"), options)


def opened_settings(settings: Settings, front: FrontOptions) -> Opened:
    """From settings whose notes were told."""
    options = to_engine_options(settings)
    if options.node_rank > 0:
        raise ConfigError("LLM runs on machine 0. On the others call `ubatch generate` with the same settings.")
    tokenizer = None if front.skip_tokenizer_init else load_tokenizer(options.model)
    made = Front(options.model, tokenizer, front, priorities=settings["scheduling_policy"] == "priority")
    fetch_checkpoints(settings)
    return Opened(options, made, front.profile_folder)


def close_when_forgotten(owner: _Owner, engine: _Closes) -> weakref.finalize[[], _Owner]:
    """Close the engine once nobody has its owner any more, as scripts write `del llm`; or earlier, by a call."""
    closing = weakref.finalize(owner, engine.close)
    closing.atexit = False
    return closing


def profile_path(folder: str | Path | None) -> Path:
    """The folder that a profile is written to: this one, or a new temporary one."""
    return Path(mkdtemp(prefix=TEMPORARY) if folder is None else folder)
