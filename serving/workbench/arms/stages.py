"""The time of every stage of a MoE layer, from traced steps, and the best schedules for it by simulation.

Lanes that run one after the other are measured at two numbers of lanes. The model of a stage is a fixed cost per lane
plus a cost per token, which gives its time for other numbers of lanes and chunks; each chunk adds the fixed cost of a
lane again, and the transport gives its bytes (`All2AllTraits.chunk_factors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import mean

from moe import All2AllTraits
from serving.workbench.arms.cells import Arm
from serving.workbench.arms.programs import Programs
from ubatch import ConfigError, Schedule
from ubatch.schedules.layer_program import LayerTimes, UnevenTimes
from ubatch.schedules.schedule import Point, SharedExpert
from ubatch.schedules.search import Candidate, search_schedules
from ubatch.schedules.simulate import Compute, Launch, Op, Pass, Wait, median_programs

__all__ = [
    "HANDOFF_S",
    "StageModel",
    "best_schedules",
    "layer_times",
    "nameless",
    "slowest_layer_times",
]

_SHARED_LEAST = 0.03
"""Below this share of the compute, a `shared` stage is overhead of the runtime, not a shared expert."""
_AFTER = {"attn_gather": "attn_prepare", "attn_scatter": "attn_core"}
"""Transfers of tensor-parallel attention, and the stage that waits for them."""
HANDOFF_S = 30e-6
"""Seconds of a hand-off of the baton with cold caches, see `ubatch bench handoff`."""


@dataclass(frozen=True)
class StageModel:
    """Stage times of one lane and layer: `fixed + whole / lanes` of each stage, in seconds. `fixed` every lane takes,
    independent of its tokens; of `whole` each lane takes its share."""

    fixed: LayerTimes
    whole: LayerTimes
    layers: int
    num_experts: int
    top_k: int
    traits: All2AllTraits

    @classmethod
    def fit(
        cls,
        few: tuple[int, LayerTimes],
        many: tuple[int, LayerTimes],
        layers: int,
        num_experts: int,
        top_k: int,
        traits: All2AllTraits,
    ) -> StageModel:
        """Fit the model to times of one lane at two numbers of lanes, the smaller number first.

        Raises:
            ConfigError: the numbers are not in order.
        """
        (a, times_a), (b, times_b) = few, many
        if not 1 <= a < b:
            raise ConfigError(f"stage times of {a} and {b} lanes: the smaller number must come first, and be smaller.")
        fixed, whole = {}, {}
        for field in fields(LayerTimes):
            at_a, at_b = getattr(times_a, field.name), getattr(times_b, field.name)
            slope = min(max(0.0, (at_a - at_b) / (1 / a - 1 / b)), at_a * a)
            whole[field.name] = slope
            fixed[field.name] = max(0.0, at_a - slope / a)
        return cls(LayerTimes(**fixed), LayerTimes(**whole), layers, num_experts, top_k, traits)

    def times(self, lanes: int, chunks: int, chunk_dispatch: bool) -> UnevenTimes:
        """Stage times of one lane in one layer, all chunks together; see `ubatch.schedules.search.TimesOf`."""
        cut = (self.num_experts, self.top_k, chunks)
        dispatch_bytes, combine_bytes = self.traits.chunk_factors(*cut, chunk_dispatch=chunk_dispatch)
        dispatch_shares, combine_shares = self.traits.chunk_shares(*cut, chunk_dispatch=chunk_dispatch)
        again = {
            "experts": (chunks, 1.0),
            "dispatch": (chunks if chunk_dispatch else 1, dispatch_bytes),
            "combine": (chunks, combine_bytes),
        }
        values = {}
        for field in fields(LayerTimes):
            count, factor = again.get(field.name, (1, 1.0))
            fixed, whole = getattr(self.fixed, field.name), getattr(self.whole, field.name)
            values[field.name] = count * fixed + factor * whole / lanes
        return UnevenTimes(**values, dispatch_shares=dispatch_shares, combine_shares=combine_shares)

    def search(self, *, max_lanes: int, max_chunks: int, keep: int) -> list[Candidate]:
        """The simulator's best schedules among those that the transport supports; see `search_schedules`."""
        return search_schedules(
            self.times,
            self.layers,
            max_lanes=max_lanes,
            max_chunks=min(max_chunks, self.traits.max_chunks),
            combine_chunks=self.traits.cuts_combine is not None,
            handoff_s=HANDOFF_S,
            keep=keep,
        )


def layer_times(program: Sequence[Op]) -> tuple[LayerTimes, int]:
    """Mean stage times of the MoE layers of one lane's program, and the number of these layers.

    The transport's own compute counts for the stage before its launch.

    Raises:
        ConfigError: the program has no MoE layer.
    """
    sums = dict.fromkeys((field.name for field in fields(LayerTimes)), 0.0)
    layers, stage, before_launch, launched = 0, "attn_prepare", "attn_core", False
    for op in program:
        match op:
            case Compute(seconds):
                sums[before_launch if launched else stage] += seconds
                launched = False
            case Launch(key):
                way = _transfer(key)
                sums[way] += max(op.seconds, op.receive_s or 0.0)
                layers += way == "combine"
                before_launch, launched = stage if stage != "shared" else before_launch, True
                stage = stage if way in _AFTER or key.startswith("dispatch_counts") else "shared"
            case Wait(key):
                if _transfer(key) in _AFTER:
                    stage = _AFTER[_transfer(key)]
                elif not key.startswith("dispatch_counts"):
                    stage = "experts" if key.startswith("dispatch") else "attn_prepare"
            case Pass(point):
                if point == Point.ATTN_PREPARE:
                    stage = "attn_core"
                elif point in (Point.OUTPUT, Point.LAYER):
                    stage = "attn_prepare"
    if not layers:
        raise ConfigError("the traced step has no MoE layer whose tokens travel; there is nothing to schedule.")
    compute = sum(seconds for name, seconds in sums.items() if name not in ("dispatch", "combine", *_AFTER))
    if sums["shared"] < _SHARED_LEAST * compute:
        sums["experts"] += sums["shared"]
        sums["shared"] = 0.0
    return LayerTimes(**{name: seconds / layers for name, seconds in sums.items()}), layers


def _transfer(key: str) -> str:
    """The field of `LayerTimes` for a transfer. Gathers and scatters of dense layers count as those of attention."""
    if key.startswith(("combine", "dispatch")):
        return "combine" if key.startswith("combine") else "dispatch"
    return "attn_scatter" if "_scatter" in key else "attn_gather"


def slowest_layer_times(steps: Sequence[Sequence[Programs]]) -> tuple[LayerTimes, int]:
    """`layer_times` of the slowest rank: the mean over each rank's lanes, then the maximum over ranks, stage by stage,
    from the medians over the steps (step -> rank -> programs)."""
    found = [[layer_times(program) for program in median_programs(samples)] for samples in zip(*steps, strict=True)]
    names = [field.name for field in fields(LayerTimes)]
    slowest = {name: max(mean(getattr(times, name) for times, _ in lanes) for lanes in found) for name in names}
    return LayerTimes(**slowest), found[0][0][1]


def best_schedules(
    model: StageModel, mode: str, known: Sequence[Arm], *, max_lanes: int, max_chunks: int, keep: int
) -> list[Arm]:
    """The fastest schedules for `mode` by simulation, as arms, without `known` ones and those that overlap nothing."""
    if keep == 0:
        return []
    found = model.search(max_lanes=max_lanes, max_chunks=max_chunks, keep=keep + len(known) + len(SharedExpert))
    taken = {nameless(arm.schedule) for arm in known}
    fresh = [each.schedule for each in found if each.schedule.overlaps and nameless(each.schedule) not in taken][:keep]
    names = [f"searched_{mode}_{place}" for place in range(1, len(fresh) + 1)]
    return [Arm(name, replace(schedule, name=name)) for name, schedule in zip(names, fresh, strict=True)]


def nameless(schedule: Schedule) -> Schedule:
    """The schedule without its name and without settings that have no effect, to compare what schedules do."""
    if schedule.chunks == 1:
        schedule = replace(schedule, chunk_dispatch=True)
    if schedule.lanes == 1:
        schedule = replace(schedule, points_off=frozenset(), lead=0)
    return replace(schedule, name="")
