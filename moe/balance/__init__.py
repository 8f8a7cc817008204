"""How evenly the ranks' experts are used, and which placement would be better.

load_files   load of every expert, as files
"""

from moe.balance.load_files import LOAD_SUFFIXES, check_load_suffix, read_loads, write_loads

__all__ = [
    "LOAD_SUFFIXES",
    "check_load_suffix",
    "read_loads",
    "write_loads",
]
