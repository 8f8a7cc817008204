"""The settings of load balancing: vLLM's keys are known, and what is not offered is refused by name."""

from __future__ import annotations

import pytest

from moe.balance import EplbConfig
from ubatch import ConfigError

VLLM = {
    "window_size": 1000,
    "step_interval": 3000,
    "num_redundant_experts": 0,
    "log_balancedness": False,
    "log_balancedness_interval": 1,
    "use_async": True,
    "policy": "default",
    "communicator": None,
}
"""vLLM's `EPLBConfig`, with its defaults."""


def test_vllms_keys_and_defaults() -> None:
    assert EplbConfig.of(VLLM) == EplbConfig()
    assert EplbConfig.of({"communicator": "torch_gloo"}).communicator == "torch_gloo"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"use_async": False}, "use_async false is not offered"),
        ({"policy": "greedy"}, "policy 'greedy' is not offered"),
        ({"communicator": "torch_nccl"}, "communicator 'torch_nccl' is not offered: NCCL beside"),
        ({"window_size": 0}, "window_size must be at least 1"),
        ({"step_interval": 0}, "step_interval must be at least 1"),
        ({"balancedness_fall": 1.0}, "balancedness_fall must be at least 0 and below 1"),
        ({"move_bytes_per_step": 0}, "move_bytes_per_step must be at least 1"),
        ({"step_intervall": 3}, "step_intervall"),
    ],
)
def test_what_is_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EplbConfig.of(values)


def test_all_experts_can_move_within_half_of_an_interval() -> None:
    assert EplbConfig(step_interval=1000).bytes_per_step(10**9) * 500 >= 10**9
    assert EplbConfig(step_interval=1000).bytes_per_step(1) == 64 << 10
    assert EplbConfig(move_bytes_per_step=7).bytes_per_step(10**9) == 7
