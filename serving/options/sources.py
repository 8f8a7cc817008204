"""Sources of settings, and which one wins: command line over environment over file over default.

Several commands may share a file: settings that only other commands have are ignored, and `Settings.notes` names them.
The error for a wrong word, key or value is one line that says what to write instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from moe import ExpertPlacement
from serving.arguments.fields import Group, WrongValue, nearest_alone
from serving.arguments.parser import nearest_flag, parse
from serving.engine.options import AUTO_DTYPE
from serving.hub import Located
from serving.options.flags.foreign import foreign_hint
from serving.options.flags.server_flags import ALIASES
from serving.options.flags.tables import COMMANDS, SERVE, Own, Table
from ubatch import ConfigError, nearest
from ubatch.errors import cut, shown
from ubatch.process import read_yaml

API_KEY_VARIABLE = "UBATCH_API_KEY"
ALL2ALL_VARIABLE = "VLLM_ALL2ALL_BACKEND"
"""vLLM's environment variable for the transport."""
_VARIABLES = {"api_key": API_KEY_VARIABLE, "all2all_backend": ALL2ALL_VARIABLE}
SECRETS = frozenset({"api_key"})
"""Settings whose values are never shown."""
_NO_CHECKPOINT = {
    "split_dims": "the model's arguments are known here",
    "output_dims": "the model's outputs are known here",
    "require_overlap": "every run has steps that are too small, and they must not be refused",
}
"""Keys of a `UBatchConfig` file that only wrapped modules use, and why they are refused here."""


class Source(StrEnum):
    """The source of a setting's value; the weakest first."""

    DEFAULT = "default"
    DERIVED = "derived"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"
    KEYWORD = "keyword"

    def weaker_than(self, other: Source) -> bool:
        """Whether the other source wins if both set a value."""
        order = list(Source)
        return order.index(self) < order.index(other)


@dataclass(frozen=True)
class Setting:
    """A value, and where it came from.

    Attributes:
        value: the value, in its flag's type.
        source: where it came from.
        spelled: the setting's name as the user wrote it, or would write it; for messages.
        detail: the file, or what the value was derived from.
    """

    value: Any
    source: Source
    spelled: str
    detail: str = ""

    @property
    def given(self) -> bool:
        """Whether the user gave it: the value is neither a default nor derived."""
        return self.source not in (Source.DEFAULT, Source.DERIVED)


Layer = Mapping[str, Setting]
"""The settings of one source, by name."""


@dataclass(frozen=True)
class Settings:
    """Every setting by name. Settings that a command does not have get the default of `ubatch serve`.

    Attributes:
        all: the settings, in the order of `--help`.
        table: the command's settings.
        notes: settings that were given but have no effect, one sentence each.
        located: setting that names a checkpoint -> where that checkpoint is on this machine.
        placement: what the file of `init_expert_location` says; None without one.
    """

    all: Mapping[str, Setting]
    table: Table = SERVE
    notes: tuple[str, ...] = ()
    located: Mapping[str, Located] = field(default_factory=dict)
    placement: ExpertPlacement | None = None

    @property
    def folders(self) -> Mapping[str, Path]:
        """The folders of the checkpoints."""
        return {name: each.folder for name, each in self.located.items()}

    def __getitem__(self, name: str) -> Any:
        """The value in force."""
        return self.all[name].value

    def given(self, name: str) -> bool:
        """Whether the user gave the setting."""
        return self.all[name].given

    def spell(self, name: str) -> str:
        """The setting's name for messages, as the user wrote it."""
        return self.all[name].spelled

    def derive(self, name: str, value: Any, why: str = "") -> Settings:
        """A copy with a value that nobody gave: derived for the reason `why`, or without a reason the default."""
        setting = Setting(value, Source.DERIVED if why else Source.DEFAULT, spelled_flag(name), why)
        return replace(self, all={**self.all, name: setting})

    def fill(self, name: str, value: Any, why: str = "") -> Settings:
        """A copy in which a setting without a value has this one; see `derive`."""
        return self if self[name] is not None else self.derive(name, value, why)

    def without_effect(self, name: str, why: str) -> Settings:
        """A copy with the default in place of a value that has no effect; adds a note."""
        note = f"{self.spell(name)} ({_shown(name, self[name])}) has no effect: {why}"
        return replace(self.derive(name, _default(name, self.table)), notes=(*self.notes, note))


def merge(*layers: Layer, table: Table = SERVE) -> Settings:
    """Merge layers over the defaults; the weakest layer comes first."""
    names = {**table.settings, **SERVE.settings}
    merged = {name: Setting(_default(name, table), Source.DEFAULT, spelled_flag(name)) for name in names}
    for name, value in table.implied.items():
        merged[name] = Setting(value, Source.DERIVED, table.program, "always")
    notes = []
    for layer in layers:
        merged |= {name: setting for name, setting in layer.items() if name in table.settings}
        idle = [each for name, each in layer.items() if name not in table.settings and each.value is not None]
        if idle:
            notes.append(f"without effect on `{table.program}`: {', '.join(each.spelled for each in idle)}")
    return Settings(merged, table, tuple(notes))


def _default(name: str, table: Table) -> Any:
    if name == "overlap_schedule":
        return None  # a switch whose default depends on other settings
    return (table.settings.get(name) or SERVE.settings[name]).get_default()


# -- command line, file, environment, keywords -----------------------------------------------------------------------


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


def read_file(path: Path, table: Table = SERVE) -> Layer:
    """Settings of a YAML file, those of other commands included; keys in kebab or snake case.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has an unknown key, a wrong type, or a key twice.
    """
    items = []
    for key, value in read_yaml(path).items():
        if not isinstance(key, str):
            raise ConfigError(f"{path}: {_json(key)} is no name of a setting{_KEYS}")
        name = key.replace("-", "_")
        if name in _NO_CHECKPOINT:
            raise ConfigError(f"{path}: {key} is for wrapped modules: {_NO_CHECKPOINT[name]}. Remove it.")
        owner = next((each for each in (table, *COMMANDS) if each.setting(name)), None)
        setting = None if owner is None else owner.setting(name)
        if owner is None or setting is None:
            known = {each.replace("_", "-") for each in _known(table)}
            hint = _other_name(name, table, _spell_key) or nearest_alone(name.replace("_", "-"), known)
            raise ConfigError(f"{path}: unknown key {shown(key)}{hint or _KEYS}")
        items.append((name, _checked(owner, setting, value, f"{path}: {key}"), f"{key} in {path}"))
    return make_layer(items, Source.FILE, str(path))


def read_environment(table: Table = SERVE) -> Layer:
    """Read the API key (other users can read a command line) and the transport (under vLLM's variable).

    `settle_environment` checks a value later, and only if it has an effect: a shell sets a variable for all commands.
    """
    layer: dict[str, Setting] = {}
    for name, variable in _VARIABLES.items():
        value = os.environ.get(variable)
        if name in table.settings and (value or (value == "" and name == "api_key")):
            layer[name] = Setting(value, Source.ENVIRONMENT, variable, variable)
    return layer


def settle_environment(s: Settings) -> Settings:
    """Check the values from the environment. Those without effect are dropped, with a note if it is the transport."""
    for name, setting in s.all.items():
        if setting.source is not Source.ENVIRONMENT:
            continue
        if name == "all2all_backend" and not s["enable_expert_parallel"]:
            s = s.without_effect(name, "the ranks share no experts (--enable-expert-parallel)")
        elif name == "api_key" and (s["node_rank"] > 0 or ("url" in s.table.settings and s["url"] is None)):
            s = s.derive(name, None)
        else:
            value = _checked(s.table, name, setting.value, setting.spelled)
            s = replace(s, all={**s.all, name: replace(setting, value=value)})
    return s


def read_keywords(keywords: Mapping[str, Any]) -> Layer:
    """Settings given from Python, in snake case."""
    items = []
    for name, value in keywords.items():
        setting = SERVE.setting(name)
        if setting is None:
            hint = _other_name(name, SERVE, _spell_keyword) or nearest(name, _known(SERVE))
            raise ConfigError(f"unknown option {shown(name)}{hint}")
        items.append((name, _checked(SERVE, setting, value, name), name))
    return make_layer(items, Source.KEYWORD)


_KEYS = "; keys are the flags that --help shows, without dashes in front."


def _known(table: Table) -> list[str]:
    return [name for name in (*table.settings, *ALIASES) if table.setting(name)]


def _other_name(name: str, table: Table, spell: Callable[[str, bool], str]) -> str:
    """The hint for an unknown key that is another system's flag, or a `no_` flag that turns a switch off."""
    name = name.lower()
    switch = table.setting(name.removeprefix("no_"))
    if name.startswith("no_") and switch and table.is_switch(switch):
        return f"; use {spell(switch.replace('_', '-'), True)}."
    return foreign_hint(name, spell)


def _spell_key(flag: str, off: bool) -> str:
    return f"{flag}: false" if off else flag


def _spell_keyword(flag: str, off: bool) -> str:
    return flag.replace("-", "_") + ("=False" if off else "")


def _checked(table: Table, name: str, value: Any, where: str) -> Any:
    """The value in the flag's type, without conversions: a number in quotes is no number."""
    group = table.owners[name]
    try:
        text = json.dumps({name: value}, default=_path_text)
        return getattr(group.model_validate_json(text, strict=True), name)
    except TypeError:
        raise ConfigError(f"{where}: {_told(name, value)} is no value for it ({type(value).__name__}).") from None
    except (ValueError, RecursionError):  # of json: a list or mapping within itself, or half a surrogate pair
        if isinstance(value, str):
            raise ConfigError(f"{where}: {_told(name, value)} is no Unicode text.") from None
        raise ConfigError(f"{where}: the value contains itself, or is nested too deeply.") from None
    except WrongValue as wrong:
        raise ConfigError(f"{where}: {wrong.sentence(_told(name, value))}") from None


def _told(name: str, value: object) -> str:
    return "what is there" if name in SECRETS else shown(value)


def _path_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError


# -- all of them -----------------------------------------------------------------------------------------------------


def make_layer(items: Iterable[tuple[str, Any, str]], source: Source, detail: str = "") -> Layer:
    """Make a layer from (name, value, spelling); resolves aliases, and refuses two values for one setting."""
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
    return "..." if name in SECRETS else _json(value)


def _json(value: object) -> str:
    return cut(json.dumps(value, default=str))


def spelled_flag(name: str) -> str:
    """The setting's flag on the command line."""
    return "MODEL" if name == "model" else f"--{name.replace('_', '-')}"


# -- what a user is shown of the settings in force -------------------------------------------------------------------


def chosen_dtype(settings: Settings) -> tuple[str, ...]:
    """What `--dtype auto` chose on a CPU, and why, in one line for the user; none if it had nothing to choose."""
    dtype = settings.all["dtype"]
    if dtype.source is not Source.DERIVED or settings["device"] != "cpu":
        return ()
    chosen = "" if dtype.value == AUTO_DTYPE else f" is {dtype.value}"
    return (f"--dtype auto{chosen}: {dtype.detail}",)


_OBEYED_IF_GIVEN = frozenset({"dbo_decode_token_threshold", "dbo_prefill_token_threshold"})


def describe_settings(settings: Settings) -> str:
    """The settings in force as a YAML file; a comment behind each names its source. Secrets are not shown; a
    threshold that nobody gave is a comment, since one in a file is obeyed."""
    rows = []
    for name, setting in settings.all.items():
        if name not in settings.table.settings:
            continue
        key, value = name.replace("_", "-"), json.dumps(setting.value, default=str)
        if name in SECRETS and setting.value is not None:
            key, value = f"# {key}", "(not shown)"
        if name in _OBEYED_IF_GIVEN and setting.source is Source.DEFAULT:
            key, value = f"# {key}", "(running steps decide)"
        rows.append((f"{key}: {value}", _came_from(setting)))
    width = max(len(text) for text, _ in rows)
    return "\n".join(f"{text:{width}}  # {came_from}" for text, came_from in rows)


def _came_from(setting: Setting) -> str:
    if setting.source in (Source.FILE, Source.ENVIRONMENT):
        return setting.detail
    return f"derived: {setting.detail}" if setting.source is Source.DERIVED else setting.source.value
