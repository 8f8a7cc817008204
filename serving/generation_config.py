"""The sampling parameters that requests leave out: what a checkpoint recommends in its `generation_config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_runner import CheckpointError, RequestError, SamplingParams
from model_runner.weights import read_json
from ubatch import ConfigError
from ubatch.errors import shown

DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters for which a checkpoint may have its own default; besides `max_tokens`, which it calls `max_new_tokens`."""
FILE = "generation_config.json"
_FLAGS = ("--generation-config", "--override-generation-config")


def request_defaults(
    model: Path, source: str = "auto", override: Mapping[str, Any] | None = None, *, names: tuple[str, str] = _FLAGS
) -> dict[str, Any]:
    """The sampling parameters of requests that leave them out.

    Args:
        model: folder of the checkpoint.
        source: `auto` for the checkpoint's, `vllm` for none, or another folder.
        override: entries as in `generation_config.json` that go before those.
        names: how errors name `source` and `override`.

    Raises:
        ConfigError: a file cannot be read, is not there, or has a value that cannot work; or so has the override.
    """
    found: dict[str, Any] = {}
    if source == "auto":
        found = checkpoint_defaults(model)
    elif source != "vllm":
        if not (Path(source) / FILE).is_file():
            raise ConfigError(f"{names[0]} {shown(source)}: there is no {FILE}. Give auto, vllm or a folder.")
        found = checkpoint_defaults(Path(source))
    given = override or {}
    if unknown := sorted(given.keys() - {*DEFAULTED, "max_new_tokens"}):
        known = ", ".join((*DEFAULTED, "max_new_tokens"))
        raise ConfigError(f"{names[1]} has {shown(unknown[0])}; it may have {known}.")
    return found | _sampling_defaults(given, names[1])


def checkpoint_defaults(model: Path) -> dict[str, Any]:
    """The sampling parameters in the folder's `generation_config.json`, read as vLLM does (`do_sample` is ignored).

    Raises:
        ConfigError: the file cannot be read, or has a value that cannot work.
    """
    file = model / FILE
    if not file.is_file():
        return {}
    try:
        return _sampling_defaults(read_json(file), str(file))
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def _sampling_defaults(found: Mapping[str, Any], where: str) -> dict[str, Any]:
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
