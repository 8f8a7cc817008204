"""The planner beside the published algorithm, on loads that neither was planned for.

`PYTHONPATH=. python tests/support/compare_planners.py` prints the table of `docs/expert-balance.md`. Every few steps
both plan for those that have passed, each from its own placement in force, and are scored on the steps until the next
plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from repository import ROOT

from moe.balance import arrivals, mean_balancedness, plan_placement, read_loads
from moe.balance.packing import pack, replicate
from moe.placement import ExpertPlacement, Floats
from serving.workbench.planning.gates import published_placement

EXAMPLES = ROOT / "examples" / "expert_loads"
RANKS = (16, 32, 64)


@dataclass(frozen=True)
class Row:
    """Balancedness in the order of ids, by the published algorithm, by packing alone (which puts no expert on a rank
    twice), and by the planner; the share of slots that the published one and the planner fill anew with every plan."""

    loads: str
    ranks: int
    by_id: float
    published: float
    packed: float
    planned: float
    published_moves: float
    planned_moves: float

    def __str__(self) -> str:
        scores = f"{self.by_id:.3f} | {self.published:.3f} | {self.packed:.3f} | {self.planned:.3f}"
        return f"| {self.loads} | {self.ranks} | {scores} | {self.published_moves:.0%} | {self.planned_moves:.0%} |"


HEAD = """\
| loads | ranks | in the order of ids | published | packed | planned | published moves | planned moves |
|---|---|---|---|---|---|---|---|"""


def skewed(steps: int, layers: int, experts: int, exponent: float) -> Floats:
    """`[steps, layers, experts]`: Zipf's law, other experts in each layer; popularity drifts by 5% a step."""
    chance = np.random.default_rng(0)
    popularity = chance.permuted(np.tile(np.arange(1, experts + 1.0) ** -exponent, (layers, 1)), axis=1)
    loads = []
    for _ in range(steps):
        popularity *= chance.lognormal(0.0, 0.05, popularity.shape)
        loads.append(chance.multinomial(100_000, popularity / popularity.sum(axis=1, keepdims=True)))
    return np.array(loads, dtype=np.float64)


def bursts(steps: int, layers: int, experts: int, topics: int = 8) -> Floats:
    """`[steps, layers, experts]`: every expert belongs to a topic; each step some topics have five times the tokens."""
    chance = np.random.default_rng(0)
    popularity = chance.lognormal(0.0, 0.5, (layers, experts))
    topic = chance.integers(0, topics, (layers, experts))
    busy = np.where(chance.random((steps, topics)) < 0.25, 5.0, 1.0)
    return chance.poisson(500 * popularity * busy[:, topic]).astype(np.float64)


def all_loads() -> dict[str, Floats]:
    return {
        "tiny-moe over source text, 8 experts": read_loads(EXAMPLES / "tiny-moe.npy"),
        "random router over source text, 128 experts": read_loads(EXAMPLES / "128-experts.npy"),
        "Zipf 0.5, 256 experts": skewed(40, 8, 256, 0.5),
        "Zipf 1.0, 128 experts": skewed(40, 16, 128, 1.0),
        "bursts of topics, 128 experts": bursts(40, 16, 128),
    }


def compare(name: str, loads: Floats, ranks: int, every: int) -> Row:
    """Plan every so many steps, with a redundant expert for each rank at least."""
    steps, layers, experts = loads.shape
    slots = -(-(experts + ranks) // ranks) * ranks
    by_id = ExpertPlacement.default(layers, experts, ranks, slots - experts)
    published = planned = by_id
    scores, moves = [], []
    for now in range(every, steps - every + 1, every):
        past, future = loads[now - every : now], loads[now : now + every]
        new = published_placement(past.sum(axis=0), slots, ranks), plan_placement(past, planned)
        moves.append([arrivals(*each).mean() for each in zip((published, planned), new, strict=True)])
        published, planned = new
        placements = by_id, published, packed(past.sum(axis=0), by_id), planned
        scores.append([mean_balancedness(each, future).mean() for each in placements])
    return Row(name, ranks, *np.mean(scores, axis=0).tolist(), *np.mean(moves[1:], axis=0).tolist())


def packed(loads: Floats, like: ExpertPlacement) -> ExpertPlacement:
    """The planner's replicas and packing, without swaps."""
    room = np.full((like.num_layers, like.num_ranks), like.slots_per_rank)
    replicas = replicate(loads, room)
    sets = pack(loads / replicas, replicas, room, like.slots_per_rank)
    return ExpertPlacement(sets.reshape(like.num_layers, -1), like.num_experts, like.num_ranks)


def rows() -> Iterator[Row]:
    for name, loads in all_loads().items():
        for ranks in RANKS:
            yield compare(name, loads, ranks, every=8)


if __name__ == "__main__":
    print(HEAD)
    for row in rows():
        print(row, flush=True)
