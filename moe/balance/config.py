"""How the load of experts is balanced, as the user asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moe.balance.loads import WINDOW_SIZE
from ubatch import ConfigError
from ubatch.errors import check_type, named_values

_POLICY = "default"
_COMMUNICATORS = (None, "torch_gloo")
_LEAST_BYTES = 64 << 10


@dataclass(frozen=True)
class EplbConfig:
    """Settings of expert load balancing; the names are vLLM's, but for the last three.

    Attributes:
        num_redundant_experts: replicas of a layer, over all ranks: slots beyond one for each expert.
        window_size: steps whose load is looked at.
        step_interval: steps from one plan to the next.
        use_async: experts move beside the steps; there is no other way.
        policy: `default`; there is no other one.
        communicator: what moves weights between ranks: `torch_gloo`, over the host, which is None's choice.
        log_balancedness: log how evenly the ranks share the load.
        log_balancedness_interval: steps from one such line to the next, at least; ranks tell their loads every tenth of
            a window.
        balancedness_fall: plan before it is time, though no more than once in a window, if balancedness has fallen by
            this share of what was expected; 0 never does.
        move_bytes_per_step: most bytes of weights that a rank sends, and receives, in a step; None: what moves all
            experts within half of `step_interval`.
        move_checksums: check every expert that has moved.

    Raises:
        ConfigError: at construction, if a value is out of range, or not offered.
    """

    num_redundant_experts: int = 0
    window_size: int = WINDOW_SIZE
    step_interval: int = 3000
    use_async: bool = True
    policy: str = _POLICY
    communicator: str | None = None
    log_balancedness: bool = False
    log_balancedness_interval: int = 1
    balancedness_fall: float = 0.1
    move_bytes_per_step: int | None = None
    move_checksums: bool = True

    def __post_init__(self) -> None:
        least = {"num_redundant_experts": 0, "window_size": 1, "step_interval": 1, "log_balancedness_interval": 1}
        if self.move_bytes_per_step is not None:
            least["move_bytes_per_step"] = 1
        for name, bound in least.items():
            value = getattr(self, name)
            check_type(name, value, int)
            if value < bound:
                raise ConfigError(f"{name} must be at least {bound}, not {value}.")
        for name in ("use_async", "log_balancedness", "move_checksums"):
            check_type(name, getattr(self, name), bool)
        check_type("balancedness_fall", self.balancedness_fall, float)
        if not 0 <= self.balancedness_fall < 1:
            raise ConfigError(f"balancedness_fall must be at least 0 and below 1, not {self.balancedness_fall}.")
        if not self.use_async:
            raise ConfigError("use_async false is not offered: experts move beside the steps, which never wait.")
        if self.policy != _POLICY:
            raise ConfigError(f"policy {self.policy!r} is not offered. There is one policy, {_POLICY!r}.")
        if self.communicator not in _COMMUNICATORS:
            raise ConfigError(
                f"communicator {self.communicator!r} is not offered: NCCL beside the NCCL or DeepEP of the steps may "
                "hang, so weights move over the host. Use 'torch_gloo', or leave it out."
            )

    def bytes_per_step(self, total: int, steps: int = 1) -> int:
        """Most bytes that a rank sends at once.

        Args:
            total: bytes of all of a rank's experts.
            steps: steps from one time to the next.
        """
        if self.move_bytes_per_step is not None:
            return self.move_bytes_per_step
        return max(_LEAST_BYTES, -(-2 * steps * total // self.step_interval))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EplbConfig:
        """From a mapping that a user wrote; keys in kebab or snake case.

        Raises:
            ConfigError: a key is unknown, or a value is wrong.
        """
        return cls(**named_values(values, [each.name for each in fields(cls)]))
