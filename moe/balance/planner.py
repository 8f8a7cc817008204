"""A placement for given loads: how many replicas each expert gets, and which rank holds which.

    groups to nodes    (only where groups of experts and nodes divide) each group of experts to a node, by load
    replicate          one slot after the other to the expert with the most tokens per replica
    stay               from the placement in force: other replicas where they are needed, and swaps between ranks
    pack               where that is not as good: replicas to ranks, those with the most tokens first, each to the rank
                       with the fewest so far; and swaps
    least movement     sets of experts to ranks and slots, so that the most stay where they are

Groups, replicas and packing are DeepSeek's algorithm (`packing`). A replica gets an equal share of its expert's tokens,
by the rule of dispatch (`ExpertPlacement.dispatch_table`). All layers are planned together.
"""

import math

import numpy as np
import numpy.typing as npt

from moe.balance.movement import least_movement
from moe.balance.packing import change_replicas, pack, replicate, separate, swap
from moe.placement import IDLE, ExpertPlacement, Floats, Ints
from ubatch import ConfigError

_SWAPS_PER_RANK = 2
"""The most swaps of a layer, per rank."""
_MENDABLE, _AS_GOOD = 1.5, 1.005
"""The busiest rank's tokens over those of a layer packed anew, up to which mending is tried, and is kept."""
_NODE_AS_GOOD = 1.02
"""The busiest node's tokens over those with groups packed anew, up to which groups stay on their nodes."""
_ELSEWHERE = -2
_MOST_WINDOWS = 16
"""More windows than these are put together."""


def plan_placement(
    loads: npt.NDArray[np.generic], in_force: ExpertPlacement, *, nodes: int = 1, groups: int = 1
) -> ExpertPlacement:
    """The placement that balances `loads` best, or nearly so if that moves much less from `in_force`.

    Every rank holds as many experts as in `in_force`, and no expert twice unless it must.

    Args:
        loads: `[L, E]` or `[W, L, E]`: tokens per MoE layer and expert, in each of several windows.
        in_force: the placement to start from; it says how many slots there are, and how many of a rank are idle.
        nodes: nodes that the ranks lie on, in order, equally many on each.
        groups: groups of experts, for a router that chooses groups first. Where they divide by the nodes, a group's
            experts stay on one node (`is_hierarchical`); where they do not, any expert may go to any rank.

    Raises:
        ConfigError: the loads are not of the placement's layers and experts, or are negative or not finite; or ranks do
            not divide by nodes, or experts by groups.
    """
    windows = _few_windows(check_loads(loads, in_force))
    nodes = nodes if is_hierarchical(in_force, nodes, groups) else 1
    experts = _experts_of_nodes(windows.sum(axis=0), in_force, nodes, groups)
    layers, _, each = experts.shape
    rows = layers * nodes
    by_node = np.take_along_axis(windows, experts.reshape(1, layers, -1), axis=2).reshape(-1, rows, each)
    tokens, old = by_node.sum(axis=0), _within_nodes(in_force, experts)
    room = (in_force.experts != IDLE).reshape(*old.shape[:2], -1).sum(axis=2)
    replicas = replicate(tokens, room)
    # The mean counts as much as all windows do: how experts of few windows go together is partly chance.
    vectors = np.concatenate([by_node, tokens[None] / math.sqrt(len(windows))])
    sets = _sets(old, replicas, np.moveaxis(vectors / replicas, 0, -1), room)
    named = np.take_along_axis(experts.reshape(rows, -1), np.maximum(sets, 0).reshape(rows, -1), axis=1)
    planned = np.where(sets == IDLE, IDLE, named.reshape(sets.shape)).reshape(layers, in_force.num_ranks, -1)
    return least_movement(planned, in_force, nodes)


def _sets(old: Ints, replicas: Ints, shares: Floats, room: Ints) -> Ints:
    """`[X, R, S]`: the experts of every rank; the old ones with few changes, where that is as good as packing anew.

    Args:
        old: `[X, R, S]`: those in force; `_ELSEWHERE` for an expert that has to go to another node.
        replicas: `[X, E]`: replicas that each expert should get.
        shares: `[X, E, V]`: tokens of each of its replicas, in each window, and on average.
        room: `[X, R]`: experts that each rank holds.
    """
    share, most = shares[..., -1], _SWAPS_PER_RANK * room.shape[1]
    packed = pack(share, replicas, room, old.shape[2])
    busiest = _busiest(packed, shares)
    stay = np.flatnonzero((old != _ELSEWHERE).all(axis=(1, 2)))
    kept = change_replicas(old[stay], share[stay], replicas[stay])
    separate(kept, share[stay])
    mend = _busiest(kept, shares[stay]) <= _MENDABLE * busiest[stay]
    stay, sets = stay[mend], packed.copy()
    sets[stay] = kept[mend]
    swap(sets, shares, most)
    worse = stay[_busiest(sets[stay], shares[stay]) > _AS_GOOD * busiest[stay]]
    again = packed[worse]
    swap(again, shares[worse], most)
    sets[worse] = again
    return sets


def _busiest(sets: Ints, shares: Floats) -> Floats:
    """`[X]`: tokens of the busiest rank in every window, summed."""
    padded = np.pad(shares[..., :-1], ((0, 0), (0, 1), (0, 0)))
    load = padded[np.arange(len(sets))[:, None, None], sets].sum(axis=2)
    return np.asarray(load.max(axis=1).sum(axis=1))


def _within_nodes(placement: ExpertPlacement, experts: Ints) -> Ints:
    """`[L * N, R / N, S]`: the experts of every rank, by their place among their node's (`[L, N, E / N]`)."""
    layers, nodes, each = experts.shape
    place = np.full((layers, nodes * each + 1), IDLE)  # of an idle slot: the last one
    np.put_along_axis(place, experts.reshape(layers, -1), np.arange(nodes * each)[None], axis=1)
    place = np.take_along_axis(place, placement.experts, axis=1).reshape(layers, nodes, -1)
    here = place // each == np.arange(nodes)[:, None]
    own = np.where(place == IDLE, IDLE, np.where(here, place % each, _ELSEWHERE))
    return own.reshape(layers * nodes, placement.num_ranks // nodes, -1)


def check_loads(loads: npt.NDArray[np.generic], placement: ExpertPlacement) -> Floats:
    """`[..., L, E]` loads as float64.

    Raises:
        ConfigError: they are not of the placement's layers and experts, or are negative or not finite.
    """
    tokens: Floats = np.asarray(loads, dtype=np.float64)
    expected = (placement.num_layers, placement.num_experts)
    if tokens.shape[-2:] != expected or not tokens.size:
        raise ConfigError(
            f"the loads are {list(tokens.shape)}, but the placement has {expected[0]} MoE layers of {expected[1]} "
            "experts."
        )
    if not np.isfinite(tokens).all() or tokens.min() < 0:
        raise ConfigError("a load is negative or not finite; loads are counts of tokens.")
    return tokens


def is_hierarchical(placement: ExpertPlacement, nodes: int, groups: int) -> bool:
    """Whether groups of experts are kept on one node: groups divide by nodes, and every node has room for its share.

    Raises:
        ConfigError: ranks do not divide by nodes, or experts by groups.
    """
    if nodes < 1 or placement.num_ranks % nodes:
        raise ConfigError(f"{placement.num_ranks} ranks do not divide by {nodes} nodes.")
    if groups < 1 or placement.num_experts % groups:
        raise ConfigError(f"{placement.num_experts} experts do not divide by {groups} groups.")
    room = (placement.experts != IDLE).reshape(placement.num_layers, nodes, -1).sum(axis=2)
    return groups > 1 and nodes > 1 and groups % nodes == 0 and int(room.min()) >= placement.num_experts // nodes


def _experts_of_nodes(tokens: Floats, in_force: ExpertPlacement, nodes: int, groups: int) -> Ints:
    """`[L, N, E / N]`: the experts of every node, equally many whole groups; those in force where that is as good.

    Args:
        tokens: `[L, E]`.
    """
    layers, experts = tokens.shape
    if nodes == 1:
        return np.tile(np.arange(experts), (layers, 1, 1))
    size = experts // groups
    of_groups = tokens.reshape(layers, groups, size).sum(axis=2)
    each = np.full((layers, nodes), groups // nodes)
    chosen = pack(of_groups, np.ones_like(of_groups, dtype=np.int64), each, groups // nodes)
    held = np.zeros((layers, nodes, groups), dtype=bool)
    of_nodes = in_force.experts.reshape(layers, nodes, -1)
    np.put_along_axis(held, np.where(of_nodes == IDLE, of_nodes[..., :1], of_nodes) // size, True, axis=2)
    whole = (held.sum(axis=2) == groups // nodes).all(axis=1)
    old = np.argsort(~held, axis=2, kind="stable")[..., : groups // nodes]
    busiest, now = (
        np.take_along_axis(of_groups[:, None], each, axis=2).sum(axis=2).max(axis=1) for each in (chosen, old)
    )
    chosen = np.where((whole & (now <= _NODE_AS_GOOD * busiest))[:, None, None], old, chosen)
    return (chosen[..., None] * size + np.arange(size)).reshape(layers, nodes, -1)


def _few_windows(loads: Floats) -> Floats:
    """`[W, L, E]`, with at most `_MOST_WINDOWS`."""
    windows = loads.reshape(-1, *loads.shape[-2:])
    starts = np.unique(np.linspace(0, len(windows), _MOST_WINDOWS, endpoint=False).astype(np.int64))
    return np.add.reduceat(windows, starts, axis=0)
