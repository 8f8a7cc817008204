"""When a move pays, when it does not, when to look earlier, and the settings: vLLM's keys, what is refused by name."""

import numpy as np
import pytest

from moe.balance import EplbConfig, MoveCosts, Verdict, arrivals, decide, has_fallen, plan_placement
from moe.placement import ExpertPlacement, Floats
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


LAYERS, EXPERTS, RANKS = 4, 32, 8
COSTS = MoveCosts(expert_bytes=10**7, step_s=0.03)
IN_FORCE, EVEN = (ExpertPlacement.default(LAYERS, EXPERTS, RANKS, redundant) for redundant in (8, 0))


def loads(windows: int, skew: float = 1.0, noise: float = 0.02, seed: int = 0) -> Floats:
    chance = np.random.default_rng(seed)
    popularity = 1000 * chance.lognormal(0.0, skew, (LAYERS, EXPERTS))
    return chance.poisson(popularity * chance.lognormal(0.0, noise, (windows, LAYERS, EXPERTS))).astype(np.float64)


def test_a_move_that_pays_is_made() -> None:
    windows = loads(4)
    decision = decide(windows, IN_FORCE, COSTS)
    assert decision.verdict is Verdict.MOVE
    assert sorted(decision.layers) == list(range(LAYERS))
    assert decision.moved_experts == arrivals(IN_FORCE, decision.placement).sum() > 0
    later = loads(8)[4:]
    assert (decision.placement.balancedness(later.sum(0)) > decision.before).all()
    assert decision.placement.balancedness(later.sum(0)) == pytest.approx(decision.after, abs=0.05)
    busiest = IN_FORCE.rank_loads(windows[2:].sum(0)).max(1)
    gained = busiest * (1 - decision.before / decision.after)
    assert decision.saved_s == pytest.approx(COSTS.step_s * COSTS.expert_share * gained.sum() / busiest.sum())


def test_what_was_moved_to_is_kept() -> None:
    moved = decide(loads(4), IN_FORCE, COSTS).placement
    again = decide(loads(8)[4:], moved, COSTS)
    assert again.verdict in (Verdict.BALANCED, Verdict.DOES_NOT_PAY) or again.moved_experts < 20


@pytest.mark.parametrize(
    "dear", [{"expert_bytes": 10**13}, {"link_bytes_per_s": 1e3}, {"step_s": 1e-9}, {"horizon_steps": 0.001}]
)
def test_a_move_that_does_not_pay_is_not_made(dear: dict[str, float]) -> None:
    decision = decide(loads(4), IN_FORCE, MoveCosts(**{**vars(COSTS), **dear}))
    assert decision.verdict is Verdict.DOES_NOT_PAY
    assert decision.placement == IN_FORCE
    assert (decision.layers, decision.moved_experts, decision.saved_s, decision.move_s) == ((), 0, 0.0, 0.0)
    assert (decision.after == decision.before).all()


def test_only_layers_that_pay_are_moved_and_the_best_come_first() -> None:
    windows = loads(4)
    windows[:, 1] = 0.0  # nothing to gain
    windows[:, 2, :4] *= 5.0
    decision = decide(windows, IN_FORCE, COSTS)
    assert sorted(decision.layers) == [0, 2, 3]
    gained = (windows.sum(axis=0).sum(axis=1) / RANKS) * (1 / decision.before - 1 / decision.after)
    moved = arrivals(IN_FORCE, decision.placement).reshape(LAYERS, RANKS, -1).sum(axis=2).max(axis=1)
    assert decision.layers[0] == max((0, 2, 3), key=lambda layer: gained[layer] / moved[layer])
    assert (decision.placement.experts[1] == IN_FORCE.experts[1]).all()
    assert set(np.flatnonzero(decision.after != decision.before)) <= set(decision.layers)


def test_what_only_fits_the_noise_is_not_moved_for() -> None:
    """Few tokens, all experts alike: a plan for the past looks better than the placement in force, and is not."""
    windows = np.random.default_rng(0).poisson(20.0, (8, LAYERS, EXPERTS)).astype(np.float64)
    planned = plan_placement(windows.sum(0), EVEN)
    assert (planned.balancedness(windows.sum(0)) > EVEN.balancedness(windows.sum(0))).all()
    dear = MoveCosts(expert_bytes=10**8, step_s=0.03)
    assert decide(windows.sum(0, keepdims=True), EVEN, dear).verdict is Verdict.MOVE
    assert decide(windows, EVEN, dear).verdict is not Verdict.MOVE


def test_without_tokens_nothing_is_decided() -> None:
    assert decide(np.zeros((2, LAYERS, EXPERTS)), IN_FORCE, COSTS).verdict is Verdict.NO_TOKENS


def test_an_even_load_stays() -> None:
    assert decide(np.full((2, LAYERS, EXPERTS), 10), EVEN, COSTS).verdict is Verdict.BALANCED


def test_one_rank_has_nothing_to_balance() -> None:
    one = ExpertPlacement.default(LAYERS, EXPERTS, 1)
    assert decide(loads(2), one, COSTS).verdict is Verdict.BALANCED
    assert not has_fallen(loads(1)[0], one, np.ones(LAYERS))


def test_loads_without_windows_and_wrong_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[windows, layers, experts\]"):
        decide(loads(1)[0], IN_FORCE, COSTS)
    with pytest.raises(ConfigError, match="step_s must be a positive number, not 0"):
        MoveCosts(expert_bytes=1, step_s=0)
    with pytest.raises(ConfigError, match="expert_share must be at most 1"):
        MoveCosts(expert_bytes=1, step_s=1.0, expert_share=1.1)


def test_balancedness_falls_when_the_skew_goes_to_other_experts() -> None:
    decision = decide(loads(4), IN_FORCE, COSTS)
    assert not has_fallen(loads(5)[4], decision.placement, decision.after)
    assert has_fallen(loads(1, seed=1)[0], decision.placement, decision.after)
    assert not has_fallen(loads(1, seed=1)[0], decision.placement, decision.after, fall=0.9)


def test_chance_among_few_tokens_is_no_fall() -> None:
    chance = np.random.default_rng(0)
    few = [chance.poisson(0.5, (LAYERS, EXPERTS)) for _ in range(100)]
    assert np.mean([EVEN.balancedness(each).mean() for each in few]) < 0.6
    assert sum(has_fallen(each, EVEN, np.ones(LAYERS)) for each in few) <= 5
    assert not has_fallen(np.zeros((LAYERS, EXPERTS)), EVEN, np.ones(LAYERS))
