"""Where settings come from, and which one counts: command line over environment over file over default."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import tyro
import yaml

from serving.options.fields import WrongValue
from serving.options.flags import ALIASES, FILE_ONLY, GROUPS, SETTINGS, SHORT, Options
from ubatch import ConfigError, nearest

__all__ = [
    "API_KEY_VARIABLE",
    "SECRETS",
    "CommandLine",
    "Layer",
    "Setting",
    "Settings",
    "Source",
    "merge",
    "read_command_line",
    "read_environment",
    "read_file",
    "read_keywords",
]

API_KEY_VARIABLE = "UBATCH_API_KEY"
SECRETS = frozenset({"api_key"})
"""Settings whose values nobody is told."""
_NO_SERVER = {
    "split_dims": "the model's arguments are known here",
    "output_dims": "the model's outputs are known here",
    "require_overlap": "a server cannot refuse the steps that are too small",
}
"""Keys of a `UBatchConfig` file that are for wrapped modules, and why not here."""
_TYRO_FLAGS = ("help", "tyro_print_completion", "tyro_write_completion")


class Source(StrEnum):
    """What decided a setting."""

    DEFAULT = "default"
    DERIVED = "derived"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"
    KEYWORD = "keyword"


@dataclass(frozen=True)
class Setting:
    """A value, and where it came from.

    Attributes:
        value: as its flag's type has it.
        source: what decided it.
        spelled: how the user wrote it, or would, for messages.
        detail: the file, or what it was derived from.
    """

    value: Any
    source: Source
    spelled: str
    detail: str = ""

    @property
    def given(self) -> bool:
        """Somebody asked for it."""
        return self.source not in (Source.DEFAULT, Source.DERIVED)


Layer = Mapping[str, Setting]
"""What one source says."""


@dataclass(frozen=True)
class Settings:
    """Every setting by name.

    Attributes:
        all: in the order of `--help`.
    """

    all: Mapping[str, Setting]

    def __getitem__(self, name: str) -> Any:
        """The value in force."""
        return self.all[name].value

    def given(self, name: str) -> bool:
        """Whether somebody asked for it."""
        return self.all[name].given

    def spell(self, name: str) -> str:
        """How to name it in a message to whoever set it."""
        return self.all[name].spelled

    def derive(self, name: str, value: Any, why: str = "") -> Settings:
        """With a value that nobody gave: it follows from the others, or without a reason is just the default."""
        setting = Setting(value, Source.DERIVED if why else Source.DEFAULT, _flag(name), why)
        return Settings({**self.all, name: setting})


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


def merge(*layers: Layer) -> Settings:
    """Settings from the weakest layer to the strongest, over the defaults."""
    merged = {
        name: Setting(None if name == "overlap_schedule" else field.get_default(), Source.DEFAULT, _flag(name))
        for name, field in SETTINGS.items()
        if name not in ALIASES
    }
    for layer in layers:
        merged.update(layer)
    return Settings(merged)


# -- command line ----------------------------------------------------------------------------------------------------


def read_command_line(program: str, description: str, words: Sequence[str]) -> CommandLine:
    """Parse the words after the command.

    Raises:
        ConfigError: an unknown flag, a wrong value, or two names of a setting with different values; one line.
        SystemExit: after `--help`.
    """
    given = _flags_given(words)
    options = _parse(program, description, words)
    items = []
    for group in GROUPS:
        values = getattr(options, group, None)
        if values is None:  # in a file only
            continue
        for name in type(values).model_fields:
            if name in given:
                items.append((name, getattr(values, name), given[name]))
    if options.model.model is not None:
        items.append(("model", options.model.model, "MODEL"))
    return CommandLine(_layer(items, Source.COMMAND_LINE), options.config, options.print_config)


def _flags_given(words: Sequence[str]) -> dict[str, str]:
    """Setting -> flag as it was written; tyro knows no abbreviations, and no value begins with two dashes."""
    own = {"config", "print_config", *_TYRO_FLAGS}
    flags = [name for name in SETTINGS if name != "model" and name not in FILE_ONLY]
    short = {flag: name for name, flags in SHORT.items() for flag in flags}
    given = {}
    for word in words:
        if word == "--":
            break
        written = word.partition("=")[0]
        if written in short:
            given[short[written]] = written
        if not word.startswith("--"):
            continue
        name = written[2:].replace("-", "_")
        setting = name.removeprefix("no_") if name not in flags else name
        if setting in flags and (setting == name or SETTINGS[setting].annotation is bool):
            given[setting] = written.replace("_", "-")
        elif name not in own:
            raise ConfigError(f"unknown flag {written}{_nearest_flag(name, [*flags, 'config', 'print_config'])}")
    return given


def _nearest_flag(name: str, known: Iterable[str]) -> str:
    hint = _nearest_alone(name, known)
    return hint.replace(" '", " --").replace("'?", "?").replace("_", "-") or "; see --help."


def _nearest_alone(name: str, known: Iterable[str]) -> str:
    """The hint, if there is one: the whole list is what `--help` is for."""
    hint = nearest(name, known).partition(" Known: ")[0]
    return hint if "?" in hint else ""


def _parse(program: str, description: str, words: Sequence[str]) -> Options:
    console = io.StringIO()
    try:
        with contextlib.redirect_stderr(console):
            return tyro.cli(
                Options, prog=program, description=description, args=list(words), config=(tyro.conf.OmitArgPrefixes,)
            )
    except WrongValue as wrong:
        raise ConfigError(f"{_flag(wrong.name)} {wrong.value}: {wrong.why}.") from None
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


# -- file, environment, keywords -------------------------------------------------------------------------------------


def read_file(path: Path) -> Layer:
    """Settings of a YAML file; keys in kebab or snake case.

    Raises:
        ConfigError: it cannot be read, is no mapping, or has an unknown key, a wrong type, or a key twice.
    """
    items = []
    for key, value in _read_yaml(path).items():
        name = str(key).replace("-", "_")
        setting = ALIASES.get(name, name)
        if name in _NO_SERVER:
            raise ConfigError(f"{path}: {key} has no meaning for a server: {_NO_SERVER[name]}. Remove it.")
        if setting not in SETTINGS:
            known = {each.replace("_", "-") for each in (*SETTINGS, *ALIASES)}
            hint = _nearest_alone(name, known) or "; keys are the flags that --help shows, without dashes in front."
            raise ConfigError(f"{path}: unknown key {key!r}{hint}")
        items.append((name, _checked(setting, value, f"{path}: {key}"), f"{key} in {path}"))
    return _layer(items, Source.FILE, str(path))


def read_environment(environment: Mapping[str, str] | None = None) -> Layer:
    """The API key, where the environment has one: others may read a command line.

    Raises:
        ConfigError: it is empty.
    """
    key = (os.environ if environment is None else environment).get(API_KEY_VARIABLE)
    if key is None:
        return {}
    items = [("api_key", _checked("api_key", key, API_KEY_VARIABLE), API_KEY_VARIABLE)]
    return _layer(items, Source.ENVIRONMENT, API_KEY_VARIABLE)


def read_keywords(keywords: Mapping[str, Any]) -> Layer:
    """Settings given from Python, in snake case.

    Raises:
        ConfigError: an unknown name, or a wrong type or value.
    """
    items = []
    for name, value in keywords.items():
        setting = ALIASES.get(name, name)
        if setting not in SETTINGS:
            raise ConfigError(f"unknown option {name!r}{nearest(name, {*SETTINGS, *ALIASES})}")
        items.append((name, _checked(setting, value, name), name))
    return _layer(items, Source.KEYWORD)


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text ({error.reason}).") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where} is not valid YAML: {error.problem}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one mapping of settings, not {type(values).__name__}.")
    return values


def _checked(name: str, value: Any, where: str) -> Any:
    """The value as the flag's type; no guessing: a number in quotes is no number."""
    group = next(group for group in GROUPS.values() if name in group.model_fields)
    try:
        text = json.dumps({name: value}, default=_path_text)
        return getattr(group.model_validate_json(text, strict=True), name)
    except TypeError:
        raise ConfigError(f"{where}: {_told(name, value)} is no value for it ({type(value).__name__}).") from None
    except WrongValue as wrong:
        raise ConfigError(f"{where}: {wrong.why}, not {_told(name, value)}.") from None


def _told(name: str, value: object) -> str:
    return "what is there" if name in SECRETS else repr(value)


def _path_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError


# -- both ------------------------------------------------------------------------------------------------------------


def _layer(items: Iterable[tuple[str, Any, str]], source: Source, detail: str = "") -> Layer:
    """One setting per name, aliases resolved; (name, value, spelling) of each."""
    layer: dict[str, Setting] = {}
    for name, value, spelled in items:
        setting = Setting(value, source, spelled, detail)
        before = layer.setdefault(ALIASES.get(name, name), setting)
        if before.value != value:
            raise ConfigError(
                f"{before.spelled} ({_shown(name, before.value)}) and {spelled} ({_shown(name, value)}) are one "
                f"setting with two values. Remove one."
            )
    return layer


def _shown(name: str, value: object) -> str:
    return "..." if name in SECRETS else json.dumps(value, default=str)


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
