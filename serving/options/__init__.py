"""The settings of the commands: tables, read from the command line, a file, the environment, or keywords.

flags, model_flags      the settings: names, types, defaults, help
tables, commands        each command's settings, shared and its own
foreign, not_offered    other systems' names for them, and what is not offered of theirs
sources, command_line   command line over environment over file over default, and where each value came from
folders                 find the folders of the named checkpoints
checks                  contradictions between settings; `speculation` has those about drafts
derived                 what follows from the rest; `overlap` and `speculation` have their own
resolve                 all of these steps, up to `EngineOptions`
shown                   the settings in force, as `--print-config` shows them
"""

from serving.options.checks import notes
from serving.options.command_line import read_layers
from serving.options.flags.commands import GENERATE, TRACE, TUNE
from serving.options.flags.tables import SERVE, Table
from serving.options.folders import fetch_checkpoints
from serving.options.resolve import Command, read_serve_command, resolve_keywords, resolve_settings, to_engine_options
from serving.options.shown import chosen_dtype, describe_settings
from serving.options.sources import Layer, Setting, Settings, Source, merge

__all__ = [
    "GENERATE",
    "SERVE",
    "TRACE",
    "TUNE",
    "Command",
    "Layer",
    "Setting",
    "Settings",
    "Source",
    "Table",
    "chosen_dtype",
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
