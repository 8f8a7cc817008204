"""Read a command's words, and the file and the environment behind them.

The error for a wrong word is one line that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serving.arguments.fields import Group
from serving.arguments.parser import nearest_flag, parse
from serving.options.flags.commands import COMMANDS
from serving.options.flags.foreign import foreign_hint
from serving.options.flags.tables import Own, Table
from serving.options.sources import Layer, Source, make_layer, read_environment, read_file


def read_layers(table: Table, program: str, description: str, words: Sequence[str]) -> tuple[list[Layer], bool]:
    """Settings from file, environment and command line, the weakest first; and whether to only print them.

    Args:
        words: the words after the command.

    Raises:
        ConfigError: an unknown flag or key, a wrong value, or two names of a setting with different values; one line.
        SystemExit: after `--help`.
    """
    groups: Mapping[str, type[Group]] = {**table.groups, "other": Own}
    given = parse(groups, program, description, words, lambda flag: _hint(table, flag))
    own = Own(**{name: given.pop(name).value for name in Own.model_fields if name in given})
    items = [(name, each.value, each.spelled) for name, each in given.items()]
    line = make_layer(items, Source.COMMAND_LINE)
    file = {} if own.config is None else read_file(own.config, table)
    return [file, read_environment(table), line], own.print_config


def _hint(table: Table, flag: str) -> str:
    """The hint for an unknown flag: what to write instead."""
    if hint := foreign_hint(flag):
        return hint
    if (positive := flag.removeprefix("no_")) != flag and positive in table.flags:
        return f": --{positive.replace('_', '-')} takes a value, and has no other way to turn it off. Leave it out."
    others = [each.program for each in COMMANDS if flag.removeprefix("no_") in each.flags]
    if others:
        return f": it is one of `{others[0]}`, and has no effect on `{table.program}`."
    return nearest_flag(flag, [*table.flags, *Own.model_fields])
