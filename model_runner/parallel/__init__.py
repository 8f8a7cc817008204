"""How a model is spread over ranks.

tensor_parallel    attention and dense MLPs: which rank has which heads and rows
transport          experts: choice of the all-to-all back end, and the schedules it supports
placement          experts: which rank holds which
"""

from model_runner.parallel.placement import make_placement, read_placement
from model_runner.parallel.transport import (
    AUTO,
    LOCAL,
    check_schedules_by_name,
    choose_all2all,
    most_chunks,
    most_lanes,
    traits_in_lanes,
)

__all__ = [
    "AUTO",
    "LOCAL",
    "check_schedules_by_name",
    "choose_all2all",
    "make_placement",
    "most_chunks",
    "most_lanes",
    "read_placement",
    "traits_in_lanes",
]
