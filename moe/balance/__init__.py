"""How evenly the ranks' experts are used, and which placement would be better.

loads        load of every expert over the last steps
load_files   the same, as files
"""

from moe.balance.load_files import LOAD_SUFFIXES, check_load_suffix, read_loads, write_loads
from moe.balance.loads import PARTS, WINDOW_SIZE, LoadKind, LoadWindows, WindowLoads, part_steps
from moe.placement import Floats, Ints

__all__ = [
    "LOAD_SUFFIXES",
    "PARTS",
    "WINDOW_SIZE",
    "Floats",
    "Ints",
    "LoadKind",
    "LoadWindows",
    "WindowLoads",
    "check_load_suffix",
    "part_steps",
    "read_loads",
    "write_loads",
]
