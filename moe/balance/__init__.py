"""How evenly the ranks' experts are used, and which placement would be better.

decision     whether a new placement pays for its move, and when to look earlier
planner      a placement for given loads
packing      how many replicas each expert gets, and a set of experts for every rank
swaps        better sets by few changes
movement     what a new placement moves, and the order of ranks that moves least
assignment   the assignment of greatest benefit, for many problems at once
load_files   load of every expert, as files
"""

from moe.balance.decision import Decision, MoveCosts, Verdict, decide, has_fallen, mean_balancedness
from moe.balance.load_files import LOAD_SUFFIXES, check_load_suffix, read_loads, write_loads
from moe.balance.movement import arrivals
from moe.balance.planner import is_hierarchical, plan_placement

__all__ = [
    "LOAD_SUFFIXES",
    "Decision",
    "MoveCosts",
    "Verdict",
    "arrivals",
    "check_load_suffix",
    "decide",
    "has_fallen",
    "is_hierarchical",
    "mean_balancedness",
    "plan_placement",
    "read_loads",
    "write_loads",
]
