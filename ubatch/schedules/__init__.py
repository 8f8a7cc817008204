"""Schedules, splits and votes, as data and pure functions: no device and no threads are needed.

schedule         lanes, chunks, active points, lead; the named schedules
ring             which lane runs next
modes            settings per mode: decode, prefill and verify steps
forward_context  data of a step beyond the model's arguments
split            where a batch is cut: fixed, balanced, in two chunks
split_cost       where a batch is cut, by the cost of its requests; where a batch of decodes and prefills is cut
vote             the ranks' decision whether to overlap a step
lane_program     the operations of a lane in MoE layers, for the simulator
simulator        runs a schedule on an ideal machine
search           the best schedule for given stage times
"""

from ubatch.schedules.lane_program import LayerTimes, RankLoad, UnevenTimes, layer_program, rank_loads
from ubatch.schedules.modes import MODE_KEYS, mode_key
from ubatch.schedules.schedule import LINEAR_ATTENTION, SERIAL
from ubatch.schedules.search import Candidate, search_schedules
from ubatch.schedules.simulator import (
    Compute,
    Launch,
    Op,
    Pass,
    Timeline,
    Wait,
    median_programs,
    programs_of,
    simulate,
    simulate_ranks,
)
from ubatch.schedules.split_cost import split_mixed
from ubatch.schedules.vote import MAX_LANES

__all__ = [
    "LINEAR_ATTENTION",
    "MAX_LANES",
    "MODE_KEYS",
    "SERIAL",
    "Candidate",
    "Compute",
    "Launch",
    "LayerTimes",
    "Op",
    "Pass",
    "RankLoad",
    "Timeline",
    "UnevenTimes",
    "Wait",
    "layer_program",
    "median_programs",
    "mode_key",
    "programs_of",
    "rank_loads",
    "search_schedules",
    "simulate",
    "simulate_ranks",
    "split_mixed",
]
