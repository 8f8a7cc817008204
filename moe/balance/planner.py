"""A placement for given loads: how many replicas each expert gets, and which rank holds which.

    groups to nodes    (only where groups of experts and nodes divide) each group of experts to a node, by load
    replicate          one slot after the other to the expert with the most tokens per replica
    pack               replicas to ranks, those with the most tokens first, each to the rank with the fewest so far
    refine             the busiest rank swaps with one of the least busy, as long as that makes it less busy
    least movement     sets of experts to ranks and slots, so that the most stay where they are

The first three are DeepSeek's algorithm (https://github.com/deepseek-ai/EPLB), which knows neither ranks with different
room nor a placement in force. A replica gets an equal share of its expert's tokens, by the rule of dispatch
(`ExpertPlacement.dispatch_table`). All layers are planned together: loops are over replicas, not over layers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe.balance.movement import least_movement
from moe.placement import IDLE, ExpertPlacement, Floats, Ints
from ubatch import ConfigError

_SWAPS_PER_RANK = 4
"""The most swaps of a layer, per rank."""
_PARTNERS = 8
"""The least busy ranks that the busiest one may swap with."""
_ENOUGH = 1.001
"""A busiest rank's load over the mean that is not refined further."""


def plan_placement(
    loads: npt.NDArray[np.generic], in_force: ExpertPlacement, *, nodes: int = 1, groups: int = 1, refined: bool = True
) -> ExpertPlacement:
    """The placement that balances `loads` best, and of those like it the one that moves least from `in_force`.

    Every rank holds as many experts as in `in_force`, and no expert twice unless it must.

    Args:
        loads: `[L, E]`: tokens per MoE layer and expert.
        in_force: the placement to start from; it says how many slots there are, and how many of a rank are idle.
        nodes: nodes that the ranks lie on, in order, equally many on each.
        groups: groups of experts, for a router that chooses groups first. Where they divide by the nodes, a group's
            experts stay on one node (`is_hierarchical`); where they do not, any expert may go to any rank.
        refined: swap after packing.

    Raises:
        ConfigError: the loads are not of the placement's layers and experts, or are negative or not finite; or ranks do
            not divide by nodes, or experts by groups.
    """
    tokens = check_loads(loads, in_force)
    room = (in_force.experts != IDLE).reshape(in_force.num_layers, in_force.num_ranks, -1).sum(axis=2)
    if not is_hierarchical(in_force, nodes, groups):
        nodes = 1
    layers, each = in_force.num_layers, in_force.num_experts // nodes
    experts = _experts_of_nodes(tokens, nodes, groups) if nodes > 1 else np.tile(np.arange(each), (layers, 1, 1))
    experts = experts.reshape(layers * nodes, each)
    tokens = np.take_along_axis(tokens, experts.reshape(layers, -1), axis=1).reshape(experts.shape)
    room = room.reshape(layers * nodes, -1)
    replicas = _replicate(tokens, room)
    sets = _pack(tokens / replicas, replicas, room, in_force.slots_per_rank)
    if refined:
        _refine(sets, tokens / replicas)
    named = np.take_along_axis(experts, np.maximum(sets, 0).reshape(len(sets), -1), axis=1).reshape(sets.shape)
    planned = np.where(sets == IDLE, IDLE, named).reshape(layers, in_force.num_ranks, -1)
    return least_movement(planned, in_force, nodes)


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


def _experts_of_nodes(tokens: Floats, nodes: int, groups: int) -> Ints:
    """`[L, N, E / N]`: the experts of every node: equally many whole groups."""
    layers, experts = tokens.shape
    of_groups = tokens.reshape(layers, groups, -1).sum(axis=2)
    room = np.full((layers, nodes), groups // nodes)
    chosen = _pack(of_groups, np.ones_like(of_groups, dtype=np.int64), room, groups // nodes)
    each = experts // groups
    return (chosen[..., None] * each + np.arange(each)).reshape(layers, nodes, -1)


def _replicate(tokens: Floats, room: Ints) -> Ints:
    """`[X, E]`: replicas of each expert; all together fill the room.

    Args:
        tokens: `[X, E]` in each of X problems.
        room: `[X, R]`: experts that each rank holds.
    """
    problems, experts = tokens.shape
    rows = np.arange(problems)
    slots = room.sum(axis=1)
    most = np.maximum(room.shape[1], -(-slots // experts))  # more are twice on a rank
    # Experts without tokens share what is left over, rather than all of it going to the first one.
    weight = tokens + np.maximum(tokens.sum(axis=1, keepdims=True), 1.0) * 1e-9
    replicas, share = np.ones((problems, experts), dtype=np.int64), weight.copy()
    for given in range(experts, int(slots.max(initial=0))):
        expert = share.argmax(axis=1)
        replicas[rows, expert] += given < slots
        count = replicas[rows, expert]
        share[rows, expert] = np.where(count < most, weight[rows, expert] / count, 0.0)
    return replicas


def _pack(share: Floats, replicas: Ints, room: Ints, width: int) -> Ints:
    """`[X, R, width]`: the experts of every rank, `IDLE` behind them.

    Args:
        share: `[X, E]`: tokens of each of an expert's replicas.
        replicas: `[X, E]`.
        room: `[X, R]`: experts that each rank holds; in all as many as there are replicas.
    """
    problems, ranks = room.shape
    rows = np.arange(problems)
    order = np.argsort(-share, axis=1, kind="stable")
    counts = np.take_along_axis(replicas, order, axis=1)
    slots = counts.sum(axis=1)
    queue = np.full((problems, int(slots.max())), IDLE)
    queue[np.arange(queue.shape[1]) < slots[:, None]] = np.repeat(order.ravel(), counts.ravel())
    weights = np.where(queue == IDLE, 0.0, np.take_along_axis(share, np.maximum(queue, 0), axis=1))
    sets = np.full((problems, ranks, width + 1), IDLE)  # one column more: where a full rank writes what is not there
    used, full = np.zeros((problems, ranks), dtype=np.int64), np.where(room > 0, 0.0, np.inf)
    load = np.zeros((problems, ranks))
    twice = share.sum() + 1.0  # dearer than any load, cheaper than a full rank
    has_it = np.zeros((problems, ranks))
    for turn in range(queue.shape[1]):
        expert, weight = queue[:, turn], weights[:, turn]
        if turn:
            has_it *= (expert == queue[:, turn - 1])[:, None]
        rank = (load + full + has_it).argmin(axis=1)
        sets[rows, rank, used[rows, rank]] = expert
        used[rows, rank] += expert != IDLE
        load[rows, rank] += weight
        has_it[rows, rank] = twice
        full[rows, rank] = np.where(used[rows, rank] < room[rows, rank], 0.0, np.inf)
    _separate(sets, share)
    return sets[..., :width]


def _separate(sets: Ints, share: Floats) -> None:
    """Swap experts that a rank has twice, because only it had room left, for others of nearly the same load."""
    ordered = np.sort(sets, axis=2)
    twice = ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != IDLE)).any(axis=2)
    for row, rank in np.argwhere(twice):
        _separate_rank(sets[row], share[row], rank)


def _separate_rank(sets: Ints, share: Floats, rank: int) -> None:
    """The same for one rank of one problem. `sets` is `[R, S]`, `share` `[E]`."""
    own = sets[rank]
    for slot in range(1, len(own)):
        expert = own[slot]
        if expert == IDLE or expert not in own[:slot]:
            continue
        without = ~(sets == expert).any(axis=1)
        partners = without[:, None] & (sets != IDLE) & ~np.isin(sets, own)
        if partners.any():
            cost = np.where(partners, np.abs(share[np.maximum(sets, 0)] - share[expert]), np.inf)
            other = np.unravel_index(cost.argmin(), cost.shape)
            own[slot], sets[other] = sets[other], expert


def _refine(sets: Ints, share: Floats) -> None:
    """Swap experts of each problem's busiest rank with those of less busy ones while that makes it less busy.

    Args:
        sets: `[X, R, S]`; changed in place.
        share: `[X, E]`: tokens of each of an expert's replicas.
    """
    problems, ranks, _ = sets.shape
    weights = np.take_along_axis(share, np.maximum(sets, 0).reshape(problems, -1), axis=1).reshape(sets.shape)
    weights[sets == IDLE] = 0.0
    load = weights.sum(axis=2)
    present = np.zeros((problems, ranks, share.shape[1] + 1), dtype=bool)
    np.put_along_axis(present, sets, True, axis=2)
    present[..., IDLE] = True  # nothing is swapped with an idle slot
    partners = min(_PARTNERS, ranks - 1)
    going = np.arange(problems if partners else 0)
    for _ in range(_SWAPS_PER_RANK * ranks):
        going = going[load[going].max(axis=1) > _ENOUGH * load[going].mean(axis=1)]
        if not len(going):
            return
        of = going[:, None]
        busy = load[going].argmax(axis=1)
        light = np.argpartition(load[going], partners - 1, axis=1)[:, :partners]
        mine, theirs = sets[going, busy][:, None, :], sets[of, light]  # [G, 1, S] and [G, P, S]
        moved = weights[going, busy][:, None, :, None] - weights[of, light][:, :, None, :]  # [G, P, S, S]
        most = load[going, busy]
        after = np.maximum(most[:, None, None, None] - moved, load[of, light][:, :, None, None] + moved)
        mine_there = present[of[..., None], light[..., None], mine]
        theirs_here = present[of[..., None], busy[:, None, None], theirs]
        after[mine_there[..., None] | theirs_here[:, :, None, :]] = np.inf
        best = (np.arange(len(going)), *np.unravel_index(after.reshape(len(going), -1).argmin(axis=1), after.shape[1:]))
        better = after[best] < most
        going, busy, most = going[better], busy[better], moved[best][better]
        index, partner, slot, other = (each[better] for each in best)
        rank = light[index, partner]
        for at, gone in ((busy, slot), (rank, other)):
            present[going, at, sets[going, at, gone]] = False
        for each in (sets, weights):
            each[going, busy, slot], each[going, rank, other] = each[going, rank, other], each[going, busy, slot]
        for at in (busy, rank):
            present[going[:, None], at[:, None], sets[going, at]] = True
        load[going, busy] -= most
        load[going, rank] += most
