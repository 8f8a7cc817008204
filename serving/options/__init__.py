"""The settings of the commands: tables, read from the command line, a file, the environment, or keywords.

flags, model_flags      the settings: names, types, defaults, help
tables, commands        which of them a command has, and what only it has; `foreign` is what others call them
sources, command_line   command line over environment over file over default, and where each value came from
folders                 where the checkpoints lie that they name
checks                  what contradicts what; `speculation` where it is about drafts
resolve                 all of it, up to `EngineOptions`
"""

from serving.options.checks import Machine, notes
from serving.options.flags.commands import GENERATE, TRACE, TUNE
from serving.options.flags.tables import SERVE, Table
from serving.options.folders import fetch_checkpoints
from serving.options.resolve import (
    ServeCommand,
    describe_settings,
    read_layers,
    read_serve_command,
    resolve_keywords,
    resolve_settings,
    to_engine_options,
)
from serving.options.sources import Layer, Setting, Settings, Source, merge

__all__ = [
    "GENERATE",
    "SERVE",
    "TRACE",
    "TUNE",
    "Layer",
    "Machine",
    "ServeCommand",
    "Setting",
    "Settings",
    "Source",
    "Table",
    "describe_settings",
    "fetch_checkpoints",
    "merge",
    "notes",
    "read_layers",
    "read_serve_command",
    "resolve_keywords",
    "resolve_settings",
    "to_engine_options",
]
