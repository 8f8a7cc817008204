"""The sampling parameters that a checkpoint recommends, in its `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_runner import CheckpointError, RequestError, SamplingParams
from model_runner.weights import read_json
from ubatch import ConfigError

DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters for which a checkpoint may have its own default; besides `max_tokens`, which it calls `max_new_tokens`."""
FILE = "generation_config.json"


def checkpoint_defaults(model: Path) -> dict[str, Any]:
    """The sampling parameters in the folder's `generation_config.json`, read as vLLM does (`do_sample` is ignored).

    Raises:
        ConfigError: the file cannot be read, or has a value that cannot work.
    """
    file = model / FILE
    if not file.is_file():
        return {}
    try:
        return sampling_defaults(read_json(file), str(file))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def sampling_defaults(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The sampling parameters among the values of a generation config, which is from `where`.

    Raises:
        ConfigError: a value cannot work.
    """
    own = {name: found[name] for name in DEFAULTED if found.get(name) is not None}
    if found.get("max_new_tokens") is not None:
        own["max_tokens"] = found["max_new_tokens"]
    try:
        SamplingParams(**own)
    except RequestError as error:
        reason = str(error).replace("max_tokens", "max_new_tokens")  # its name in the file
        raise ConfigError(f"{where} cannot be used: {reason}") from error
    return own
