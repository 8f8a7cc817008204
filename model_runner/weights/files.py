"""A checkpoint's files: JSON that is read and checked, the file of every tensor, and the end-of-sequence token.

The token is the one that the checkpoint's tokenizer names. A fine-tune often changes it only there: `config.json` still
has the base model's, which the model no longer writes. It is read from the files alone, because every rank needs it,
and ranks load no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from model_runner.errors import CheckpointError, CheckpointFileMissing
from ubatch.errors import shown

SINGLE_FILE = "model.safetensors"
"""The file of a checkpoint without shards."""
_INDEX = "model.safetensors.index.json"
_LONGEST_PATH = 255
"""Most bytes of a shard's path: those that a file system allows for a name."""


def indexed_files(folder: Path) -> dict[str, str] | None:
    """The file of every tensor by the folder's index; None if there is none, and all tensors are in `SINGLE_FILE`.

    Raises:
        CheckpointFileMissing: a file that the index names is missing, or there is neither an index nor a single file.
        CheckpointError: the index is invalid.
    """
    index = folder / _INDEX
    if not index.exists():
        if (folder / SINGLE_FILE).exists():
            return None
        raise _no_weights(folder)
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{index} has no 'weight_map'; it is not an index of safetensors shards.")
    for tensor, file in mapping.items():
        if not _is_shard(file):
            raise CheckpointError(
                f"{index} says that {shown(tensor)} is in {shown(file)}, which is no safetensors file of that folder."
            )
    for file in sorted(set(mapping.values())):
        if not (folder / file).is_file():
            raise CheckpointFileMissing(f"{folder / file} is missing, but {index.name} names it.")
    return mapping


def _no_weights(folder: Path) -> CheckpointFileMissing:
    """The error for a folder with neither an index nor a single file."""
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if not files:
        return CheckpointFileMissing(
            f"{folder} has neither {SINGLE_FILE} nor {_INDEX}; only safetensors checkpoints can be loaded."
        )
    number = "a safetensors file" if len(files) == 1 else f"{len(files)} safetensors files"
    return CheckpointFileMissing(
        f"{folder} has {number}, such as {shown(files[0])}, but no {_INDEX}, which says what file a tensor is in. Copy "
        f"it from where the files are from; weights in a single file must be named {SINGLE_FILE}."
    )


def _is_shard(file: object) -> bool:
    """Whether an index may name this file: a safetensors file in the checkpoint's folder, or below it."""
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        return False
    path, length = PurePosixPath(file), len(file.encode(errors="replace"))
    return length <= _LONGEST_PATH and "\0" not in file and not path.is_absolute() and ".." not in path.parts


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        CheckpointFileMissing: there is no such file.
        CheckpointError: it cannot be read, or is no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointFileMissing(f"{path} is missing; every Hugging Face checkpoint has one.") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("; use sys.")[0]  # Python's advice about numbers of thousands of digits
        raise CheckpointError(f"{path} is not valid JSON: {reason}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold one JSON object, not a {type(values).__name__}.")
    return values


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
