"""Expected number of ranks or nodes that hold a token's experts, and how chunks raise it; routing is uniform."""

from __future__ import annotations

from math import comb

from serving.workbench.planning.shapes import ModelShape


def expected_destinations(model: ModelShape, places: int, chunks: int = 1) -> float:
    """Expected transfers of one token: it travels once to each place (rank or node) that holds one of its experts.

    With chunks, it travels once to each chunk of a place that holds one of its experts, so there are more transfers
    (x1.48 for 2 places, 32 experts, top 4; x1.06 for 32 places, 256 experts, top 8). Each place has an equal share of
    the experts, and each chunk is assumed to hold an even mix of its place's groups.
    """
    here = model.experts / places  # experts of one place
    spanned = max(1, round(model.groups / places))  # groups that a place's experts belong to
    pool = model.experts * model.top_groups // model.groups
    missed = 0.0
    for chosen in range(min(spanned, model.top_groups) + 1):
        ways = comb(spanned, chosen) * comb(model.groups - spanned, model.top_groups - chosen)
        eligible = here / chunks * chosen / spanned
        missed += ways / comb(model.groups, model.top_groups) * _none_of(pool, eligible, model.top_k)
    return places * chunks * (1.0 - missed)


def _none_of(pool: int, some: float, drawn: int) -> float:
    """Probability that `drawn` items from `pool` include none of `some` items; `some` need not be whole."""
    probability = 1.0
    for taken in range(drawn):
        probability *= max(0.0, pool - some - taken) / (pool - taken)
    return probability
