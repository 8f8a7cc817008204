"""Loads of experts that are skewed, and what their skew costs: the busiest rank's load over the mean."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe import ExpertPlacement
from moe.balance import Floats, mean_balancedness


def zipf_loads(layers: int, experts: int, exponent: npt.ArrayLike, seed: int = 0) -> Floats:
    """`[L, E]`: each expert's share of its layer's tokens: the n-th most popular one's is proportional to
    `n ** -exponent`. Which experts are popular is random, and differs by layer.

    Args:
        exponent: of all layers, or `[L]`.
    """
    exponents = np.broadcast_to(np.asarray(exponent, dtype=np.float64), layers)
    shares = np.arange(1, experts + 1) ** -exponents[:, None]
    return np.random.default_rng(seed).permuted(shares / shares.sum(axis=1, keepdims=True), axis=1)


def layer_skews(placement: ExpertPlacement, loads: Floats) -> tuple[float, ...]:
    """For every MoE layer, the busiest rank's load over the mean.

    Args:
        placement: of the experts.
        loads: `[L, E]`, or `[steps, L, E]`; each step waits for the rank that is the busiest in it, so this is the mean
            over the steps, weighted by their tokens. A layer without tokens is balanced.
    """
    steps = loads.reshape(-1, *loads.shape[-2:])
    return tuple((1 / mean_balancedness(placement, steps)).tolist())
