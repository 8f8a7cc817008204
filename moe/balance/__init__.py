"""How evenly the ranks' experts are used, and which placement would be better.

decision     whether a new placement pays for its move, and when to look earlier
planner      a placement for given loads
packing      how many replicas each expert gets, and a set of experts for every rank; better sets by few changes
movement     what a new placement moves, and the order of ranks that moves least
loads        load of every expert over the last steps
load_files   the same, as files
config       the user's settings
"""

from moe.balance.config import EplbConfig
from moe.balance.decision import Decision, MoveCosts, Verdict, decide, has_fallen, mean_balancedness, with_layers
from moe.balance.load_files import LOAD_SUFFIXES, check_load_suffix, read_loads, write_loads
from moe.balance.loads import PARTS, WINDOW_SIZE, LoadKind, LoadWindows, WindowLoads, part_steps
from moe.balance.movement import arrivals
from moe.balance.planner import is_hierarchical, plan_placement
from moe.placement import Floats, Ints

__all__ = [
    "LOAD_SUFFIXES",
    "PARTS",
    "WINDOW_SIZE",
    "Decision",
    "EplbConfig",
    "Floats",
    "Ints",
    "LoadKind",
    "LoadWindows",
    "MoveCosts",
    "Verdict",
    "WindowLoads",
    "arrivals",
    "check_load_suffix",
    "decide",
    "has_fallen",
    "is_hierarchical",
    "mean_balancedness",
    "part_steps",
    "plan_placement",
    "read_loads",
    "with_layers",
    "write_loads",
]
