"""How a model is spread over ranks.

tensor_parallel    attention and dense MLPs: which rank has which heads and rows
expert_parallel    experts: choice of the all-to-all back end, the schedules it supports, and which rank holds which
"""

from model_runner.parallel.expert_parallel import (
    AUTO,
    LOCAL,
    check_schedules_by_name,
    choose_all2all,
    make_placement,
    most_chunks,
    most_lanes,
    read_placement,
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
