"""Files: written so that a reader gets the old content or the new, never a part of it; and YAML files of settings, read
within bounds: neither a file without end, nor one whose aliases stand for more than memory holds, takes longer than a
moment. `yaml` is imported only where there is such a file.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ubatch.errors import ConfigError, cut, shown


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write a file atomically: on an error, such as a full disk, the old file is kept and no partial file is left.

    Args:
        content: text, which is written as UTF-8, or bytes.
        new: replace no file.

    Raises:
        OSError: it cannot be written, or is there although it must be `new`.
    """
    # Others may write the same file: threads, or machines with a shared folder, where a process may have this one's id.
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:  # follows no link
            file.write(content.encode() if isinstance(content, str) else content)
        if new:
            os.link(part, path)
            part.unlink()
        else:
            part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


_MOST_BYTES = 2**20
_MOST_VALUES = 10_000
_MOST_DIGITS = 1000


def read_yaml(path: Path, most_values: int = _MOST_VALUES) -> Mapping[Any, Any]:
    """The mapping in a YAML file; an empty one if the file is empty.

    Args:
        most_values: most values of the file, those that an alias repeats included.

    Raises:
        ConfigError: the file cannot be read, is not YAML, has a key twice, is too large, or is no mapping.
    """
    import yaml

    try:
        values = _loader()(_read(path), most_values).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where} is not valid YAML: {cut(str(error.problem))}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {cut(' '.join(str(error).split()))}") from error
    except RecursionError:
        raise ConfigError(f"{path} is not valid YAML for settings: it is nested too deeply.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold one mapping of settings, not {type(values).__name__}.")
    return values


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than {_MOST_BYTES} bytes; that is no file of settings.")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {cut(str(path), 300)}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text ({error.reason}).") from error


@cache
def _loader() -> type[Any]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A YAML loader with bounds that refuses a key given twice; plain YAML would silently take the last."""

        def __init__(self, stream: str, most_values: int) -> None:
            super().__init__(stream)
            self._count, self._most = 0, most_values
            self._sizes: dict[int, int] = {}  # node -> its values, once it is complete

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            alias = self.check_event(yaml.AliasEvent)
            place, before = self.peek_event().start_mark, self._count
            node = super().compose_node(parent, index)
            self._count += self._sizes.get(id(node), 1) if alias else 1  # without a size it contains the alias itself
            self._sizes.setdefault(id(node), self._count - before)
            if self._count > self._most:
                why = f"the file has more than {self._most} values, those that aliases repeat included"
                raise yaml.MarkedYAMLError(problem=why, problem_mark=place)
            return node

        def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # not a setting's name: its reader refuses it
                if before := lines.get((key.tag, key.value)):
                    why = f"{shown(key.value)} is there twice, first in line {before}. Remove one"
                    raise yaml.MarkedYAMLError(problem=why, problem_mark=key.start_mark)
                lines[key.tag, key.value] = key.start_mark.line + 1
            return node

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
            if number and len(node.value) > _MOST_DIGITS:
                why = f"a number of {len(node.value)} characters, more than {_MOST_DIGITS}"
                raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark)
            try:
                return super().construct_object(node, deep)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                # What yaml does not catch of a date that does not exist, or of a tag that does not fit its value.
                why = f"{shown(node.value)} cannot be read as {node.tag.removeprefix('tag:yaml.org,2002:')}"
                raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark) from error

    return Loader
