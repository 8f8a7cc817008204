"""Find the folders of the named checkpoints on this machine."""

from __future__ import annotations

from dataclasses import replace

from serving.hub import fetch_weights, find_checkpoint
from serving.options.sources import Settings
from ubatch import ConfigError


def locate(s: Settings) -> Settings:
    """Settings with the checkpoints' folders; for checkpoints on the hub, downloads config and tokenizer.

    Raises:
        ModelNotFound, CheckpointError: a checkpoint cannot be found or downloaded, or a folder has no weights.
        ConfigError: `revision` or `download_dir` is given, but the checkpoints are folders here.
    """
    located = {
        name: find_checkpoint(s[name], s.spell(name), revision=revision, download_dir=s["download_dir"])
        for name, revision in (("model", s["revision"]), ("speculative_draft_model_path", None))
        if s[name] is not None
    }
    if located["model"].name is None and s["revision"] is not None:
        raise ConfigError(f"{s.spell('revision')} has no effect: {s['model']} is a folder here. Remove it.")
    if s["download_dir"] is not None and all(each.name is None for each in located.values()):
        raise ConfigError(f"{s.spell('download_dir')} has no effect: {s['model']} is a folder here. Remove it.")
    for name, each in located.items():
        if each.name is None and s["load_format"] != "dummy":
            fetch_weights(each, s.spell(name))
    return replace(s, located=located)


def fetch_checkpoints(s: Settings) -> None:
    """Download the weights that are missing, before any rank starts."""
    for name, each in s.located.items():
        if each.name is not None and s["load_format"] != "dummy":
            fetch_weights(each, s.spell(name))
