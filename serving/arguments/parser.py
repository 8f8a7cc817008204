"""Build a command's argparse flags from pydantic models: each field is a flag with its name, type, default and help."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from textwrap import fill, wrap
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from serving.arguments.fields import Flag, Group, WrongValue, nearest_alone
from ubatch.errors import ConfigError, cut, shown

_HELP_AT, _WIDTH = 26, 80
_Options = TypeVar("_Options", bound=Group)


@dataclass(frozen=True)
class Given:
    """A value from the command line.

    Attributes:
        value: the value, in its field's type.
        spelled: the flag as the user wrote it.
    """

    value: Any
    spelled: str


def parse_options(kind: type[_Options], program: str, description: str, words: Sequence[str]) -> _Options:
    """The options of a command that reads nothing but its command line.

    Raises:
        ConfigError: an unknown flag, a wrong value or a missing one; one line.
        SystemExit: after `--help`.
    """
    given = parse({"": kind}, program, description, words)
    for each in _fields_of({"": kind}):
        if each.field.is_required() and each.name not in given:
            raise ConfigError(f"{each.label} is missing; see --help.")
    return kind(**{name: each.value for name, each in given.items()})


def parse(
    groups: Mapping[str, type[Group]],
    program: str,
    description: str,
    words: Sequence[str],
    unknown: Callable[[str], str] | None = None,
) -> dict[str, Given]:
    """Parse the given flags: field name -> value. Each value is checked by itself.

    Args:
        groups: title in `--help` -> fields; field names are unique over all groups.
        program, description: the start of `--help`.
        words: the words after the command.
        unknown: returns the hint for an unknown flag, given without dashes and in snake case.

    Raises:
        ConfigError: an unknown flag, or a wrong value; one line.
        SystemExit: after `--help`.
    """
    fields = _fields_of(groups)
    parser = _make_parser(groups, program, description)
    try:
        found, rest = parser.parse_known_args(_without_dots(fields, [in_kebab_case(word) for word in words]))
    except argparse.ArgumentError as error:
        raise ConfigError(_wrong_count(parser, error)) from None
    if found.help:
        print(_make_parser(groups, program, description, positionals=True).format_help(), end="")
        sys.exit(0)
    known = [each.flag.name or each.name for each in fields]
    given: dict[str, Given] = found.given
    unknown = unknown or (lambda flag: nearest_flag(flag, known))
    adding = [each.label for each in fields if each.flag.adds and each.name in given]
    given |= _read_positionals(fields, [*found.rest, *rest], unknown, adding)
    by_name = {each.name: each for each in fields}
    return {name: Given(by_name[name].check(each.value), each.spelled) for name, each in given.items()}


def nearest_flag(unknown: str, known: Iterable[str]) -> str:
    """The hint for an unknown flag, given in snake case and without dashes."""
    hint = nearest_alone(unknown, known)
    return hint.replace(" '", " --").replace("'?", "?").replace("_", "-") or "; see --help."


def in_kebab_case(word: str) -> str:
    """A word of the command line; if it is a flag in snake case, that flag in kebab case."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") and " " not in flag else word


def _without_dots(fields: Sequence[_Field], words: Sequence[str]) -> list[str]:
    """`--flag.key value` and `--flag.key=value` as `--flag {"key": value}`; a value that is no JSON is text.

    Raises:
        ConfigError: a value is missing.
    """
    flags = {each.label for each in fields if each.flag.dotted}
    found, rest = [], iter(words)
    for word in rest:
        flag, dot, entry = word.partition(".")
        if not dot or flag not in flags:
            found.append(word)
            continue
        key, equals, text = entry.partition("=")
        value = text if equals else next(rest, "--")
        if value.startswith("--"):
            raise ConfigError(f"{flag}.{key} needs a value.")
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
        found += [flag, json.dumps({key: value})]
    return found


def _wrong_count(parser: argparse.ArgumentParser, error: argparse.ArgumentError) -> str:
    """The message for a flag with the wrong number of values, the only error that argparse raises here."""
    (action,) = (each for each in parser._actions if "/".join(each.option_strings) == error.argument_name)
    flag, *off = action.option_strings
    if action.nargs == 0:
        return f"{flag} takes no value{f': {flag} turns it on, {off[0]} off' if off else ''}."
    return f"{flag} needs {'a value' if action.nargs is None else action.metavar}."


def _read_positionals(
    fields: Sequence[_Field], words: Sequence[str], unknown: Callable[[str], str], adding: Sequence[str]
) -> dict[str, Given]:
    """Assign the words that are no flags to positional fields; argparse would not accept them after a flag.

    Args:
        adding: the given flags that take one value each time.
    """
    end = words.index("--") if "--" in words else len(words)
    for word in words[:end]:
        if word.startswith("-") and word != "-":
            flag = word.partition("=")[0]
            raise ConfigError(f"unknown flag {cut(flag)}{unknown(flag.lstrip('-').replace('-', '_'))}")
    places = [each for each in fields if each.flag.positional]
    given = [*words[:end], *words[end + 1 :]]
    if len(given) > len(places):
        hint = "".join(f" {flag} takes one value; give it again for another." for flag in adding)
        raise ConfigError(f"unexpected argument {cut(given[len(places)])}; see --help.{hint}")
    return {each.name: Given(word, each.label) for each, word in zip(places, given, strict=False)}


# -- the parser, from the fields -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Field:
    """A field of a group."""

    group: type[Group]
    name: str
    field: FieldInfo
    flag: Flag

    @property
    def label(self) -> str:
        """The name that the user sees: the flag, or the metavar of a positional."""
        name = self.flag.name or self.name
        return (self.flag.metavar or name.upper()) if self.flag.positional else f"--{name.replace('_', '-')}"

    @property
    def help(self) -> str:
        """The help text: description and default."""
        default = self.flag.default
        if default is None and not self.field.is_required() and self.field.default not in (None, ()):
            value = self.field.default
            default = ("on" if value else "off") if self.field.annotation is bool else _as_words(value)
        return f"{self.field.description or ''} {f'(default: {default})' if default else ''}".strip().replace("%", "%%")

    def check(self, value: Any) -> Any:
        """Convert the words to the field's type."""
        if value in ("None", ["None"]) and type(None) in get_args(self.field.annotation):
            return None
        try:
            return getattr(self.group.model_validate({self.name: value}), self.name)
        except WrongValue as wrong:
            if wrong.missing:
                return value  # another field of the group is missing, not this one; the caller checks them together
            if wrong.unreadable:
                why = f"{self.label}: {wrong.sentence(shown(wrong.value))}"
            else:
                given = "" if self.flag.secret else f" {cut(_as_words(wrong.value))}"
                why = f"{self.label}{given}: {wrong.why}."
            raise ConfigError(why) from None


def _fields_of(groups: Mapping[str, type[Group]]) -> list[_Field]:
    return [
        _Field(group, name, field, next((each for each in field.metadata if isinstance(each, Flag)), Flag()))
        for group in groups.values()
        for name, field in group.model_fields.items()
    ]


def _as_words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _make_parser(
    groups: Mapping[str, type[Group]], program: str, description: str, *, positionals: bool = False
) -> argparse.ArgumentParser:
    """Make the parser. Positionals are added for `--help` only, see `_read_positionals`."""
    places = [each.label for each in _fields_of(groups) if each.flag.positional]
    parser = argparse.ArgumentParser(
        prog=program,
        usage=" ".join(("%(prog)s", *places, "[flags]")),
        description=description,
        formatter_class=_Formatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.set_defaults(given={}, rest=[])
    for title, group in groups.items():
        section = parser.add_argument_group(f"{title} options".strip(), " ".join((group.__doc__ or "").split()))
        for each in _fields_of({title: group}):
            if not each.flag.positional:
                _add_flag(section, each)
            elif positionals:
                section.add_argument(each.name, metavar=each.label, help=each.help)
    parser.add_argument("-h", "--help", action="store_true", help="show this, and exit")
    return parser


def _add_flag(section: argparse._ArgumentGroup, each: _Field) -> None:
    nargs, metavar = _words_of(each.field.annotation)
    names = [each.label, *filter(None, [each.flag.alias])]
    if nargs == 0 and each.flag.has_off:
        names.append(f"--no-{each.label[2:]}")
    section.add_argument(
        *names,
        action=_Add if each.flag.adds else _Store,
        dest=each.name,
        nargs="*" if each.flag.many else nargs,
        metavar=each.flag.metavar or metavar,
        help=each.help,
        default=argparse.SUPPRESS,
    )


def _words_of(annotation: Any) -> tuple[int | str | None, str]:
    """argparse's `nargs` and metavar for a type; with `nargs` "+", the flag takes as many words as the metavar has."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is bool:
        return 0, ""
    if origin is Annotated:
        return _words_of(parts[0])
    if origin in (Union, UnionType):
        each = [_words_of(part) for part in parts if part is not type(None)]
        return each[0][0], "|".join(dict.fromkeys(metavar for _, metavar in each))
    if origin is Literal:
        return None, f"{{{','.join(map(str, parts))}}}"
    if origin is tuple and parts[-1] is ...:
        metavar = _words_of(parts[0])[1]
        return "*", f"{metavar} ..." if metavar.startswith("{") else f"{metavar} [{metavar} ...]"
    if origin is tuple:
        return "+", " ".join(_words_of(part)[1] for part in parts)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return None, f"{{{','.join(annotation)}}}"
    return None, {int: "INT", float: "FLOAT", Path: "PATH"}.get(annotation, "STR")


class _Store(argparse.Action):
    """Keep a flag's words and its spelling. With a fixed number of values, further words count as positionals."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        flag = flag or ""
        if self.nargs == 0:
            values = not flag.startswith("--no-")
        elif self.nargs == "+":
            count = 1 if values[0] == "None" else len(str(self.metavar).split())
            namespace.rest = [*namespace.rest, *values[count:]]
            values = values[:count]
            if len(values) < count:
                raise argparse.ArgumentError(self, "too few")
        namespace.given = {**namespace.given, self.dest: Given(values, flag)}


class _Add(_Store):
    """Keep the word of each time that a flag is given."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        before = namespace.given.get(self.dest)
        super().__call__(parser, namespace, [*(before.value if before else []), values], flag)


class _Formatter(argparse.HelpFormatter):
    """Help text of at most 80 columns, with metavars unchanged."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_AT)
        self._width = min(self._width, _WIDTH - 2)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)  # a flag stays whole

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = super()._format_action_invocation(action)
        return names if len(names) + 2 <= self._width else names.replace(", ", ",\n  ")

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar or "")
