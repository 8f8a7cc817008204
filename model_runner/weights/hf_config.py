"""Reads `config.json` with typed access: errors name the missing or invalid entry and the file.

A config is believed only within bounds that no published model comes near: a size or a factor beyond them is a mistake
or an attack, and would end in the allocator, or in numbers that are not finite. What files store bounds most sizes
further (`model_runner.models.registry`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_runner.errors import CheckpointError
from ubatch.errors import shown

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
