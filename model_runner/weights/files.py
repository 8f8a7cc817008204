"""A checkpoint's files: JSON that is read and checked, the file of every tensor, and the end-of-sequence token.

The token is the one that the checkpoint's tokenizer names. A fine-tune often changes it only there: `config.json` still
has the base model's, which the model no longer writes. It is read from the files alone, because every rank needs it,
and ranks load no tokenizer.

`config.json` is read with typed access (`HFConfig`): errors name the missing or invalid entry and the file.

A config is believed only within bounds that no published model comes near: a size or a factor beyond them is a mistake
or an attack, and would end in the allocator, or in numbers that are not finite. What files store bounds most sizes
further (`model_runner.models.registry`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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


_REQUIRED: Any = object()
LONGEST_CONTEXT = 1 << 23
"""Most tokens of a sequence that a config may name."""
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_nextn_predict_layers"), 1 << 10),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), LONGEST_CONTEXT),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim"), 1 << 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 1 << 20),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 1 << 20),
}
_MOST_OF_OTHERS = 1 << 24
"""Largest integers; files or arithmetic bound the others below that."""
_SIZE = re.compile(r"^(num|n)_|_(size|dim|rank|heads|experts|multiplier)$")
_EPSILONS, _THETAS = (1e-20, 1.0), (1.5, 1e15)
_RANGES = {"rms_norm_eps": _EPSILONS, "layernorm_epsilon": _EPSILONS, "rope_theta": _THETAS, "swa_rope_theta": _THETAS}
_RANGE_OF_OTHERS = (1e-6, 1e6)
"""Smallest and largest numbers: factors, shares, limits."""


class HFConfig:
    """A Hugging Face `config.json`."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def integer(self, *names: str, default: int = _REQUIRED, at_least: int = 1) -> int:
        """The first entry of `names` that exists.

        Raises:
            CheckpointError: none exists and there is no default, or the value is not an integer of at least `at_least`
                and at most what a model can have.
        """
        name, value = self._get(names, default)
        most = _MOST.get(name, _MOST_OF_OTHERS)
        if type(value) is not int or value < at_least:
            raise self.wrong(name, value, f"an integer of at least {at_least}")
        if value > most:
            raise self.wrong(name, value, f"an integer of at most {most}")
        return value

    def number(self, name: str, default: float = _REQUIRED, *, or_zero: bool = False) -> float:
        """A positive number within the entry's range, or zero where that is allowed; errors as `integer`."""
        _, value = self._get((name,), default)
        least, most = _RANGES.get(name, _RANGE_OF_OTHERS)
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not (least <= value <= most or (or_zero and value == 0)):  # NaN is in no range
            kind = "0 or a positive number" if or_zero else "a positive number"
            raise self.wrong(name, value, f"{kind}, from {least:g} to {most:g}")
        return float(value)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """As `integer`; None where the entry is null, and the default where it is absent."""
        value = self.values.get(name, default)
        return None if value is None else self.integer(name, default=value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; errors as `integer`."""
        _, value = self._get((name,), default)
        if type(value) is not bool:
            raise self.wrong(name, value, "true or false")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, a single one, or nothing (null or absent); errors as `integer`."""
        value = self.values.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(item) is not int for item in items):
            raise self.wrong(name, value, "a list of integers")
        return tuple(items)

    def words(self, name: str) -> list[str] | None:
        """A list of names, or None where the entry is null or absent; errors as `integer`."""
        value = self.values.get(name)
        if value is not None and (not isinstance(value, list) or any(not isinstance(item, str) for item in value)):
            raise self.wrong(name, value, "a list of names")
        return value

    def sizes_at_fault(self, got: Sequence[int], expected: Sequence[int]) -> list[str]:
        """The entries, with values, that may be why a tensor is `expected` to have another shape than it has.

        They are sizes and numbers of things: those that are what is expected, or else those that divide it, and not
        what is there.
        """
        text = self.values.get("text_config")
        entries = {**(text if isinstance(text, dict) else {}), **self.values}
        of_sizes = {name: value for name, value in entries.items() if type(value) is int and _SIZE.search(name)}
        pairs = [(had, wanted) for had, wanted in zip(got, expected, strict=False) if had != wanted]
        equal = {name: value for name, value in of_sizes.items() if any(value == wanted for _, wanted in pairs)}
        dividing = {
            name: value
            for name, value in of_sizes.items()
            if value > 1 and any(wanted % value == 0 and had % value for had, wanted in pairs)
        }
        return [f"{name} is {value}" for name, value in (equal or dividing).items()]

    def wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        """The error for an invalid entry; a long value is cut."""
        return CheckpointError(f"{self.path}: {name} is {shown(value)}; this architecture needs {wanted}.")

    def _get(self, names: tuple[str, ...], default: object) -> tuple[str, Any]:
        """The name of the entry that counts, and its value."""
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is _REQUIRED:
            raise CheckpointError(f"{self.path} has no {' or '.join(map(repr, names))}, which this architecture needs.")
        return names[0], default
