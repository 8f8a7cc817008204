"""The end-of-sequence token that a checkpoint's tokenizer names.

A fine-tune often changes it only there: `config.json` still has the base model's, which the model no longer writes. It
is read from the files alone, because every rank needs it, and ranks load no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model_runner.errors import CheckpointError
from model_runner.weights.files import read_json


def tokenizer_end_tokens(folder: Path) -> tuple[int, ...]:
    """Ids of `eos_token` in the folder's tokenizer files; empty if they name none. Who loads a tokenizer reports files
    that cannot be read; here they say nothing."""
    config = _read(folder / "tokenizer_config.json")
    named = (_content(each.get("eos_token")) for each in (config, _read(folder / "special_tokens_map.json")))
    names = dict.fromkeys(name for name in named if name is not None)
    found = (_find(name, folder, config) for name in names)
    return tuple(token for token in found if token is not None)


def _find(name: str, folder: Path, config: Mapping[str, Any]) -> int | None:
    """The id of a token; None if no file has it."""
    found = (known.get(name) for known in _vocabularies(folder, config))
    return next((token for token in found if type(token) is int), None)


def _vocabularies(folder: Path, config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Mappings from token to id; the small ones first, because a whole vocabulary takes tenths of a second to read."""
    added = _mapping(config.get("added_tokens_decoder"))
    yield {_content(token) or "": int(number) for number, token in added.items() if number.isdecimal()}
    yield _read(folder / "added_tokens.json")
    whole = _read(folder / "tokenizer.json")
    entries = whole.get("added_tokens")
    tokens = [_mapping(token) for token in entries] if isinstance(entries, list) else []
    yield {str(token.get("content")): token.get("id") for token in tokens}
    vocabulary = _mapping(whole.get("model")).get("vocab")
    if isinstance(vocabulary, list):  # unigram: a list of tokens and scores
        vocabulary = {piece[0]: place for place, piece in enumerate(vocabulary) if isinstance(piece, list) and piece}
    yield _mapping(vocabulary)
    yield _read(folder / "vocab.json")


def _content(token: object) -> str | None:
    """The text of a token, which is a string or an object with `content`."""
    token = _mapping(token).get("content", token)
    return token if isinstance(token, str) else None


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
