"""Whether a new placement pays for its move, and when to look before it is time. Pure functions of loads."""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moe.balance.movement import arrivals
from moe.balance.planner import check_loads, plan_placement
from moe.placement import ExpertPlacement, Floats, Ints
from ubatch import ConfigError

_DOUBTS = 2.0
"""Standard errors, over windows, by which a gain is taken lower than measured when it is weighed."""


@dataclass(frozen=True, kw_only=True)
class MoveCosts:
    """What a move is weighed by.

    Attributes:
        expert_bytes: weights of one expert of one layer, bytes.
        step_s: a step, seconds.
        expert_share: share of a step in which the busiest rank computes experts.
        link_bytes_per_s: rate at which a rank receives weights. What steps need of the link is not to be counted in.
        horizon_steps: steps in which a move has to pay for itself, such as the steps until the next plan.
    """

    expert_bytes: int
    step_s: float
    expert_share: float = 0.5
    link_bytes_per_s: float = 10e9
    horizon_steps: int = 3000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be a positive number, not {value}.")
        if self.expert_share > 1:
            raise ConfigError(f"expert_share must be at most 1, not {self.expert_share}.")


class Verdict(StrEnum):
    """What a decision says, and why."""

    MOVE = "move"
    NO_TOKENS = "no tokens"
    BALANCED = "balanced"
    """no better placement was found"""
    DOES_NOT_PAY = "does not pay"
    """what is gained within the horizon is less than the move takes"""


@dataclass(frozen=True)
class Decision:
    """Where to move, or to stay.

    Attributes:
        verdict: whether to move, and why not.
        placement: the one to move to; the one in force if `verdict` is not MOVE.
        layers: the MoE layers that change, those that gain most per byte first.
        before: `[L]`: `mean_balancedness` of the placement in force.
        after: `[L]`: that of `placement`, as expected. Both are of loads that it was not planned for, if there was more
            than one window.
        moved_experts: experts that travel to another rank, over all layers.
        saved_s: expected to be saved per step, seconds.
        move_s: the move at the link's full rate, seconds.
    """

    verdict: Verdict
    placement: ExpertPlacement
    layers: tuple[int, ...]
    before: Floats
    after: Floats
    moved_experts: int
    saved_s: float
    move_s: float


def decide(
    windows: npt.NDArray[np.generic], in_force: ExpertPlacement, costs: MoveCosts, *, nodes: int = 1, groups: int = 1
) -> Decision:
    """Plan for the loads of the last windows; move the layers in which that pays for the move within the horizon.

    With two windows or more, what is gained is taken from the later half, with a placement that was planned for the
    earlier half, and two standard errors lower than measured: what only fits the noise of the past gains nothing. The
    placement to move to is planned for all windows.

    Args:
        windows: `[W, L, E]`: tokens per window, MoE layer and expert, in the order of time.
        in_force: the placement that experts have now.
        costs: what a move is weighed by.
        nodes, groups: as in `plan_placement`.

    Raises:
        ConfigError: as `plan_placement`.
    """
    tokens = check_loads(windows, in_force)
    if tokens.ndim != 3:
        raise ConfigError(f"windows of loads are [windows, layers, experts], not {list(tokens.shape)}.")
    earlier, later = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    planned = plan_placement(tokens, in_force, nodes=nodes, groups=groups)
    tried = plan_placement(earlier, in_force, nodes=nodes, groups=groups) if earlier.any() else planned
    now, then = (each.rank_loads(later).max(axis=2) for each in (in_force, tried))  # [W, L]
    mean = later.sum(axis=(0, 2)) / in_force.num_ranks
    before, after = (_ratio(mean, each.sum(axis=0)) for each in (now, then))
    if not now.any():
        return Decision(Verdict.NO_TOKENS, in_force, (), before, before, 0, 0.0, 0.0)
    # The busiest rank of each layer takes its part of the step, and takes as much less time as it has fewer tokens.
    a_token_s = costs.step_s * costs.expert_share / now.sum()
    fewer = now - then
    saved = fewer.sum(axis=0) * a_token_s
    doubt = fewer.std(axis=0, ddof=1) * math.sqrt(len(later)) * a_token_s if len(later) > 1 else 0.0
    arriving = arrivals(in_force, planned).reshape(in_force.num_layers, in_force.num_ranks, -1).sum(axis=2)
    takes = arriving.max(axis=1) * costs.expert_bytes / costs.link_bytes_per_s
    changes = (planned.experts != in_force.experts).any(axis=1)
    chosen = np.flatnonzero(changes & ((saved - _DOUBTS * doubt) * costs.horizon_steps > takes))
    if not len(chosen):
        verdict = Verdict.DOES_NOT_PAY if (changes & (saved > 0)).any() else Verdict.BALANCED
        return Decision(verdict, in_force, (), before, before, 0, 0.0, 0.0)
    best_first = chosen[np.argsort(-_ratio(saved, takes)[chosen], kind="stable")]
    return Decision(
        verdict=Verdict.MOVE,
        placement=with_layers(in_force, planned, chosen),
        layers=tuple(best_first.tolist()),
        before=before,
        after=np.where(np.isin(np.arange(len(before)), chosen), after, before),
        moved_experts=int(arriving[chosen].sum()),
        saved_s=float(saved[chosen].sum()),
        move_s=float(takes[chosen].sum()),
    )


def mean_balancedness(placement: ExpertPlacement, windows: npt.NDArray[np.generic]) -> Floats:
    """`[L]`: mean / max over ranks, of `[W, L, E]` windows together: tokens of a mean rank over those of the busiest
    one, both summed over windows."""
    ranks = placement.rank_loads(windows)
    return _ratio(ranks.mean(axis=2).sum(axis=0), ranks.max(axis=2).sum(axis=0))


def _ratio(one: Floats, other: Floats) -> Floats:
    """`one / other`; 1 where both are 0."""
    return np.divide(one, other, out=np.ones_like(one), where=other > 0)


def with_layers(placement: ExpertPlacement, other: ExpertPlacement, layers: Ints) -> ExpertPlacement:
    """`placement`, with `layers` as in `other`."""
    experts = placement.experts.copy()
    experts[layers] = other.experts[layers]
    return ExpertPlacement(experts, placement.num_experts, placement.num_ranks)


def has_fallen(
    window: npt.NDArray[np.generic], in_force: ExpertPlacement, expected: Floats, *, fall: float = 0.1
) -> bool:
    """Whether a window is so much less balanced than expected that it is worth planning before it is time.

    Few tokens fall unevenly by chance. What chance explains is not counted: with m tokens per rank on average, the
    busiest of R ranks has about `sqrt(2 m ln R)` more.

    Args:
        window: `[L, E]`: tokens of the last window.
        in_force: the placement that they were computed with.
        expected: `[L]`: balancedness that `decide` expected (`Decision.after`), or that was measured when the placement
            was new.
        fall: how much less counts, as a share of what was expected, on average over layers.
    """
    tokens = check_loads(window, in_force)
    mean = tokens.sum(axis=1) / in_force.num_ranks
    some = mean > 0
    if not some.any():
        return False
    by_chance = 1.0 / (1.0 + np.sqrt(2.0 * np.log(in_force.num_ranks) / mean[some]))
    reached = in_force.balancedness(tokens)[some]
    return bool(reached.mean() < (1.0 - fall) * (expected[some] * by_chance).mean())
