"""Logs: one line per decision that matters, as `key=value`, with the process it comes from.

2026-01-31 12:00:00.123 INFO  rank 1 engine ready kv_blocks=8192 memory="KV cache 256.0 MiB"
"""

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that is being answered; every line logged for that request ends with it."""

_OURS = ("ubatch", "moe", "attention", "model_runner", "serving")


def configure_logging(level: str, process: str, stream: TextIO | None = None) -> None:
    """Send this process's logs to one stream, line by line; every process calls this first.

    Libraries log from WARNING upwards, whatever the level.

    Args:
        level: `debug`, `info`, `warning` or `error`, for this project's own loggers.
        process: name of this process in every line, for example `api` or `rank 1`.
        stream: standard error by default.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_Lines(process))
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old.formatter, _Lines):  # left by an earlier call
            root.removeHandler(old)
    root.addHandler(handler)
    own = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(logging.WARNING, own))
    for name in _OURS:
        logging.getLogger(name).setLevel(own)


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event in a few words, with its fields.

    Args:
        logger: the logger of the module that decided.
        event: for example `request aborted`.
        level: a level of `logging`.
        fields: written as `key=value`; a value with spaces or quotes is quoted, None is left out.
    """
    if logger.isEnabledFor(level):
        known = [f"{name}={_text(value)}" for name, value in fields.items() if value is not None]
        logger.log(level, "%s", " ".join([event, *known]), stacklevel=2)


def _text(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(char in ' "=' for char in text)
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


class _Lines(logging.Formatter):
    """The time in UTC, the level, the process, the message; a traceback follows on lines of its own."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {process} %(message)s", "%Y-%m-%d %H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        own = request_id.get()
        line = super().formatMessage(record)
        return line if own is None else f"{line} request_id={_text(own)}"
