"""A value for every setting of every command that is not its default, and what must be given with it to count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from repository import TINY_MOE

HEAD = TINY_MOE.parent / "tiny-moe-eagle"


@dataclass(frozen=True)
class Case:
    """How to set a setting; the table, `settings_table.yaml`, says what its fields are."""

    words: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    gpus: int = 0
    yaml: str = ""
    off: bool = False


EP = ("--data-parallel-size", "2", "--enable-expert-parallel")
WORDS = {
    "EP": EP,
    "DBO": (*EP, "--enable-dbo"),
    "NODES": ("--data-parallel-size", "2", "--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29500"),
    "NGRAM": ("--speculative-algorithm", "ngram"),
    "EAGLE": ("--speculative-algorithm", "eagle", "--speculative-draft-model-path", str(HEAD)),
    "CORS": ("--allowed-origins", "*"),
    "SAMPLED": ("--temperature", "0.7"),
    "MODEL": (str(TINY_MOE),),
    "HEAD": (str(HEAD),),
}
"""What words of the table stand for."""


def _case(fields: Mapping[str, Any]) -> Case:
    found = dict(fields)
    for name in {"words", "beside", "without"} & found.keys():
        told = found[name]
        words = told if isinstance(told, list) else str(told).split()
        found[name] = tuple(each for word in words for each in WORDS.get(word, (word,)))
    return Case(**found)


_TABLE = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
CASES: Mapping[str, Case] = {name: _case(fields) for name, fields in yaml.safe_load(_TABLE).items()}
