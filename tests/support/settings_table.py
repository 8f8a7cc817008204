"""A value for every setting of every command that is not its default, and what must be given with it to count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from calls import HEAD, words_of

__all__ = ["CASES", "HEAD", "Case"]


@dataclass(frozen=True)
class Case:
    """How to set a setting; the table, `settings_table.yaml`, says what its fields are."""

    words: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    gpus: int = 0
    yaml: str = ""
    off: bool = False


def _case(fields: Mapping[str, Any]) -> Case:
    found = dict(fields)
    for name in {"words", "beside", "without"} & found.keys():
        told = found[name]
        found[name] = tuple(told if isinstance(told, list) else words_of(str(told))[0])
    return Case(**found)


_TABLE = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
CASES: Mapping[str, Case] = {name: _case(fields) for name, fields in yaml.safe_load(_TABLE).items()}
