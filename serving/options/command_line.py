"""Parse a command's words. The error for a wrong word is one line that says what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from serving.arguments.fields import Group
from serving.arguments.parser import nearest_flag, parse
from serving.options.flags.commands import COMMANDS
from serving.options.flags.foreign import FOREIGN
from serving.options.flags.tables import Own, Table
from serving.options.sources import Layer, Source, make_layer

__all__ = ["CommandLine", "read_command_line"]


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        config: the settings file; None without `--config`.
    """

    settings: Layer
    config: Path | None
    print_config: bool


def read_command_line(table: Table, program: str, description: str, words: Sequence[str]) -> CommandLine:
    """Parse the words after the command.

    Raises:
        ConfigError: an unknown flag, a wrong value, or two names of a setting with different values; one line.
        SystemExit: after `--help`.
    """
    groups: Mapping[str, type[Group]] = {**table.groups, "other": Own}
    given = parse(groups, program, description, words, lambda flag: _hint(table, flag))
    own = Own(**{name: given.pop(name).value for name in Own.model_fields if name in given})
    items = [(name, each.value, each.spelled) for name, each in given.items()]
    return CommandLine(make_layer(items, Source.COMMAND_LINE), own.config, own.print_config)


def _hint(table: Table, flag: str) -> str:
    """The hint for an unknown flag: what to write instead."""
    if flag in FOREIGN:
        return f"; use {FOREIGN[flag]}."
    if (positive := flag.removeprefix("no_")) != flag and positive in table.flags:
        return f": --{positive.replace('_', '-')} takes a value, and has no other way to turn it off. Leave it out."
    others = [each.program for each in COMMANDS if flag.removeprefix("no_") in each.flags]
    if others:
        return f": it is one of `{others[0]}`, and has no effect on `{table.program}`."
    return nearest_flag(flag, [*table.flags, *Own.model_fields])
