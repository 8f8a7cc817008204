"""The settings of an engine and its server: one table, read from the command line, a file, or keywords.

flags     the table: names, types, defaults, help
sources   command line over environment over file over default, and where each value came from
checks    what contradicts what; `speculation` where it is about drafts
resolve   all of it, up to `EngineOptions`
"""

from serving.options.checks import Machine, notes
from serving.options.flags import Speculation
from serving.options.resolve import (
    ServeCommand,
    describe_settings,
    read_serve_command,
    resolve_keywords,
    resolve_settings,
    to_engine_options,
)
from serving.options.sources import Setting, Settings, Source
from serving.options.speculation import read_speculation

__all__ = [
    "Machine",
    "ServeCommand",
    "Setting",
    "Settings",
    "Source",
    "Speculation",
    "describe_settings",
    "notes",
    "read_serve_command",
    "read_speculation",
    "resolve_keywords",
    "resolve_settings",
    "to_engine_options",
]
