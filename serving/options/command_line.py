"""What the words of a command say. A wrong one is one line, which names what to write."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from serving.options.flags.commands import COMMANDS
from serving.options.flags.fields import WrongValue
from serving.options.flags.foreign import FOREIGN
from serving.options.flags.server_flags import SHORT
from serving.options.flags.tables import Table
from serving.options.sources import Layer, Source, make_layer, nearest_alone, spelled_flag
from ubatch import ConfigError

__all__ = ["CommandLine", "read_command_line"]

_OWN = frozenset(("config", "print_config", "help", "tyro_print_completion", "tyro_write_completion"))


@dataclass(frozen=True)
class CommandLine:
    """What the words of a command say.

    Attributes:
        settings: those that were given.
        config: the file.
        print_config: print and exit.
    """

    settings: Layer
    config: Path | None
    print_config: bool


def read_command_line(table: Table, program: str, description: str, words: Sequence[str]) -> CommandLine:
    """Parse the words after the command.

    Args:
        table: of the command.
        program, description: what `--help` begins with.
        words: after the command.

    Raises:
        ConfigError: an unknown flag, a wrong value, or two names of a setting with different values; one line.
        SystemExit: after `--help`.
    """
    given = _flags_given(table, words)
    options = _parse(table, program, description, words)
    items = []
    for title in table.groups:
        values = getattr(options, title)
        items += [(name, getattr(values, name), given[name]) for name in type(values).model_fields if name in given]
        if getattr(values, "model", None) is not None:
            items.append(("model", values.model, "MODEL"))
    return CommandLine(make_layer(items, Source.COMMAND_LINE), options.config, options.print_config)


def _flags_given(table: Table, words: Sequence[str]) -> dict[str, str]:
    """Setting or alias -> flag as it was written; tyro knows no abbreviations, and no value begins with two dashes."""
    short = {flag: name for name, flags in SHORT.items() if name in table.settings for flag in flags}
    given = {}
    for word in words:
        if word == "--":
            break
        written = word.partition("=")[0]
        if written in short:
            given[short[written]] = written
        if not word.startswith("--"):
            continue
        flag = written[2:].replace("-", "_")
        positive = flag if flag in table.flags else flag.removeprefix("no_")
        name = table.flags.get(positive)
        if name is not None and (positive == flag or table.is_switch(name)):
            given[name] = written.replace("_", "-")
            if "=" in word and table.is_switch(name):
                flag = positive.replace("_", "-")
                raise ConfigError(f"{written} takes no value: --{flag} turns it on, --no-{flag} off.")
        elif flag not in _OWN:
            raise ConfigError(f"unknown flag {written}{_hint(table, flag)}")
    return given


def _hint(table: Table, flag: str) -> str:
    """What to write in place of a flag that there is not."""
    if flag in FOREIGN:
        return f"; use {FOREIGN[flag]}."
    if (positive := flag.removeprefix("no_")) != flag and positive in table.flags:
        return f": --{positive.replace('_', '-')} takes a value, and has no other way to turn it off. Leave it out."
    others = [each.program for each in COMMANDS if flag.removeprefix("no_") in each.flags]
    if others:
        return f": it is one of `{others[0]}`, and has no effect on `{table.program}`."
    hint = nearest_alone(flag, [*table.flags, "config", "print_config"])
    return hint.replace(" '", " --").replace("'?", "?").replace("_", "-") or "; see --help."


def _parse(table: Table, program: str, description: str, words: Sequence[str]) -> Any:
    console = io.StringIO()
    try:
        with contextlib.redirect_stderr(console):
            return tyro.cli(
                table.options,
                prog=program,
                description=description,
                args=list(words),
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except WrongValue as wrong:
        raise ConfigError(f"{spelled_flag(wrong.name)} {wrong.value}: {wrong.why}.") from None
    except SystemExit as ended:
        if ended.code in (0, None):
            raise
        raise ConfigError(_one_line(console.getvalue())) from None


def _one_line(box: str) -> str:
    """What tyro says is wrong: title, message and help are parted by rules, in a frame if the terminal has one."""
    parts: list[list[str]] = [[]]
    framed = box.startswith("╭")
    for line in box.splitlines():
        text = line.strip("│ ")
        if text and not text.strip("─-"):
            parts.append([])
        elif text and text[0] not in "╭╰":
            parts[-1].append(text)
    message = " ".join(parts[0] if framed or len(parts) == 1 else parts[1])
    for pattern, plain in _PLAINER:
        message = re.sub(pattern, plain, message)
    return message


_PLAINER = (
    ("^Error parsing ", ""),
    (r" Got errors: .*", ""),
    (r"^Unrecognized options: (.+)", r"unexpected argument \1; see --help."),
    (r"^Missing value for argument '(.+)'\. Expected 1 values\.$", r"\1 needs a value."),
    (r"\{FLOAT FLOAT\}", "two numbers"),
    (r"\{\[INT \[INT \.\.\.\]\]\}", "integers"),
    (r"no type matching (?:\{None\}\|)?(.+) could be instantiated from \[(.*)\]\.", r"expected \1, not \2."),
    (r"invalid literal for int\(\) with base 10: ('.*')$", r"expected an integer, not \1."),
    (r"could not convert string to float: ('.*')$", r"expected a number, not \1."),
)
