"""The settings of an engine and its server: one table, read from the command line, a file, or keywords.

flags     the table: names, types, defaults, help
sources   command line over environment over file over default, and where each value came from
checks    what contradicts what
resolve   all of it, up to `EngineOptions`
"""

from serving.options.checks import Machine, notes
from serving.options.resolve import (
    ServeCommand,
    describe_settings,
    read_serve_command,
    resolve_keywords,
    resolve_settings,
    to_engine_options,
)
from serving.options.sources import Setting, Settings, Source

__all__ = [
    "Machine",
    "ServeCommand",
    "Setting",
    "Settings",
    "Source",
    "describe_settings",
    "notes",
    "read_serve_command",
    "resolve_keywords",
    "resolve_settings",
    "to_engine_options",
]
