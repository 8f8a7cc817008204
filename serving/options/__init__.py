"""The settings of the commands: tables, read from the command line, a file, the environment, or keywords.

flags                   the settings: names, types, defaults, help
tables                  each command's settings, shared and its own
foreign                 other systems' names for them, and what is not offered of theirs
sources                 command line over environment over file over default, and where each value came from
checks                  contradictions between settings; `speculation` has those about drafts
overlap, speculation    what follows from the settings of overlap and of drafts
resolve                 all of these steps, the folders of checkpoints, and what follows from the rest: `EngineOptions`
"""

from serving.options.checks import notes
from serving.options.flags.tables import GENERATE, SERVE, TRACE, TUNE, Table
from serving.options.resolve import (
    Command,
    fetch_checkpoints,
    read_serve_command,
    resolve_keywords,
    resolve_settings,
    to_engine_options,
)
from serving.options.sources import (
    Layer,
    Setting,
    Settings,
    Source,
    chosen_dtype,
    describe_settings,
    merge,
    read_layers,
)

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
