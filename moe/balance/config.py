"""How the load of experts is balanced, as the user asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ubatch import ConfigError
from ubatch.errors import check_type, named_values


@dataclass(frozen=True)
class EplbConfig:
    """Settings of expert load balancing; the names are vLLM's.

    Attributes:
        num_redundant_experts: replicas of a layer, over all ranks: slots beyond one for each expert.

    Raises:
        ConfigError: at construction, if a value is out of range.
    """

    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        check_type("num_redundant_experts", self.num_redundant_experts, int)
        if self.num_redundant_experts < 0:
            raise ConfigError(f"num_redundant_experts must be at least 0, not {self.num_redundant_experts}.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EplbConfig:
        """From a mapping that a user wrote; keys in kebab or snake case.

        Raises:
            ConfigError: a key is unknown, or a value is wrong.
        """
        return cls(**named_values(values, [each.name for each in fields(cls)]))
