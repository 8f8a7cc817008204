"""A table lists the settings that a command takes on its command line and in its file.

A setting that two commands share has the same name, type, default and help in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, create_model
from pydantic.fields import FieldInfo

from serving.arguments.fields import Flag, Group
from serving.options.flags.model_flags import Model, Turns
from serving.options.flags.server_flags import (
    ALIASES,
    Attention,
    Cache,
    Experts,
    Graphs,
    Overlap,
    Parallelism,
    PerMode,
    Restarts,
    Scheduling,
    Server,
    Speculation,
)

_FLAG_NAMES = {"named_model": "model"}
"""Flag -> setting, where their names differ."""


class Own(Group):
    """Flags that are no settings."""

    config: Annotated[Path | None, Flag(metavar="FILE", default="none")] = Field(
        None, description="YAML file of settings, named as the flags without dashes in front; flags beat it"
    )
    print_config: Annotated[bool, Flag(default="", has_off=False)] = Field(
        False, description="print the settings in force and where each came from, and exit"
    )


@dataclass(frozen=True)
class Table:
    """The settings of a command.

    Attributes:
        program: the command, as in `ubatch serve`.
        groups: title in `--help` -> group of settings, in the order of `--help`.
        file_only: a group of settings without flags; None for none.
        implied: fixed values of settings that the command has no flag for.
    """

    program: str
    groups: Mapping[str, type[Group]]
    file_only: type[Group] | None = None
    implied: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def owners(self) -> Mapping[str, type[Group]]:
        """Setting -> the group that checks its values."""
        groups = (*self.groups.values(), *(() if self.file_only is None else (self.file_only,)))
        return {name: group for group in groups for name in group.model_fields}

    @cached_property
    def settings(self) -> Mapping[str, FieldInfo]:
        """Every setting by name, aliases left out, in the order of `--help`."""
        fields = {name: group.model_fields[name] for name, group in self.owners.items()}
        return {name: field for name, field in fields.items() if name not in ALIASES}

    @cached_property
    def flags(self) -> Mapping[str, str]:
        """Flag, in snake case and without dashes -> the setting or alias that it sets."""
        names = [name for group in self.groups.values() for name in group.model_fields if name != "model"]
        return {_FLAG_NAMES.get(name, name): name for name in names}

    def setting(self, key: str) -> str | None:
        """The setting that a key of a file or of Python names; None if there is none."""
        name = ALIASES.get(key, key)
        return name if name in self.settings and key not in _FLAG_NAMES else None

    def is_switch(self, name: str) -> bool:
        """Whether the setting is a switch, with one flag for true and one for false."""
        return self.owners[name].model_fields[name].annotation is bool


def pick(group: type[Group], *names: str) -> type[Group]:
    """A group with only the named settings of `group`."""
    known = group.model_fields
    fields: dict[str, Any] = {name: (known[name].annotation, known[name]) for name in names}
    return create_model(group.__name__, __base__=Group, __doc__=group.__doc__, **fields)


SERVE = Table(
    "ubatch serve",
    {
        "model": Model,
        "parallelism": Parallelism,
        "overlap": Overlap,
        "cache": Cache,
        "scheduling": Scheduling,
        "attention": Attention,
        "graphs": Graphs,
        "experts": Experts,
        "restarts": Restarts,
        "server": Server,
        "turns": Turns,
        "speculation": Speculation,
    },
    file_only=PerMode,
)
