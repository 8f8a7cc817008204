"""What a user is shown of the settings in force: `--print-config`, and what `--dtype auto` chose."""

from __future__ import annotations

import json

from serving.engine.options import AUTO_DTYPE
from serving.options.sources import SECRETS, Setting, Settings, Source


def chosen_dtype(settings: Settings) -> tuple[str, ...]:
    """What `--dtype auto` chose on a CPU, and why, in one line for the user; none if it had nothing to choose."""
    dtype = settings.all["dtype"]
    if dtype.source is not Source.DERIVED or settings["device"] != "cpu":
        return ()
    chosen = "" if dtype.value == AUTO_DTYPE else f" is {dtype.value}"
    return (f"--dtype auto{chosen}: {dtype.detail}",)


_OBEYED_IF_GIVEN = frozenset({"dbo_decode_token_threshold", "dbo_prefill_token_threshold"})


def describe_settings(settings: Settings) -> str:
    """The settings in force as a YAML file; a comment behind each names its source. Secrets are not shown; a
    threshold that nobody gave is a comment, since one in a file is obeyed."""
    rows = []
    for name, setting in settings.all.items():
        if name not in settings.table.settings:
            continue
        key, value = name.replace("_", "-"), json.dumps(setting.value, default=str)
        if name in SECRETS and setting.value is not None:
            key, value = f"# {key}", "(not shown)"
        if name in _OBEYED_IF_GIVEN and setting.source is Source.DEFAULT:
            key, value = f"# {key}", "(running steps decide)"
        rows.append((f"{key}: {value}", _came_from(setting)))
    width = max(len(text) for text, _ in rows)
    return "\n".join(f"{text:{width}}  # {came_from}" for text, came_from in rows)


def _came_from(setting: Setting) -> str:
    if setting.source in (Source.FILE, Source.ENVIRONMENT):
        return setting.detail
    return f"derived: {setting.detail}" if setting.source is Source.DERIVED else setting.source.value
