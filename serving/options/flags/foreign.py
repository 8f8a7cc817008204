"""Hints about flags of vLLM and SGLang that are not here, from `foreign.yaml`. A test walks vLLM's list."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from ubatch.process import read_yaml

Spell = Callable[[str, bool], str]
"""Spells a flag, given without dashes and without `no-`; the second argument says whether it had `no-`."""


@cache
def foreign_flags() -> Mapping[str, Mapping[str, str]]:
    """What `foreign.yaml` says of each flag, in its three groups: FOREIGN, NOT_NEEDED, NOT_OFFERED."""
    groups = read_yaml(Path(__file__).with_name("foreign.yaml"))
    return {
        name: {flag: why for why, flags in group.items() for flag in flags.split()} for name, group in groups.items()
    }


_HINTS = {"FOREIGN": "; use {}.", "NOT_NEEDED": ": leave it out, {}.", "NOT_OFFERED": ": it is not offered, {}."}


def foreign_hint(name: str, spell: Spell | None = None) -> str:
    """What to do about another system's flag: the end of a sentence that begins with the flag; "" if it is none.

    A switch may begin with `no_`. What is behind a point belongs to the value: `speculative_config.method`, `O.level`.

    Args:
        name: in snake case and without dashes.
        spell: spells the flags in the hint, for a file or Python.
    """
    name = re.sub(r"^o[0-3]$", "o", name.partition(".")[0].lower())
    for known in dict.fromkeys((name, name.removeprefix("no_"))):
        for group, flags in foreign_flags().items():
            if known not in flags:
                continue
            hint = _HINTS[group].format(flags[known] if known == name else _turned(flags[known]))
            if spell is None:
                return hint
            return re.sub(r"--(no-)?([a-z][a-z0-9-]*)", lambda match: spell(match[2], match[1] is not None), hint)
    return ""


def _turned(text: str) -> str:
    """A hint for the `no-` form of a flag: the other form of the switch that the hint names, if it names one alone."""
    if text in _SWITCHES:
        return f"--no-{text.removeprefix('--')}"
    return f"--{text.removeprefix('--no-')}" if text.startswith("--no-") else text


_SWITCHES = ("--overlap-schedule", "--enforce-eager", "--profile-ranges")
"""What stands alone in `FOREIGN` and has a `no-` form."""
