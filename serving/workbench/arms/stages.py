"""Steps of a batch in a given arm; the time of every stage of a MoE layer, from traced steps, and the best schedules
for it by simulation.

Lanes that run one after the other are measured at two numbers of lanes. The model of a stage is a fixed cost per lane
plus a cost per token, which gives its time for other numbers of lanes and chunks; each chunk adds the fixed cost of a
lane again, and the transport gives its bytes (`All2AllTraits.chunk_factors`).

A layer with linear attention has other times than one with full attention: each kind is measured for itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import mean

import msgspec
import torch

from model_runner import ModelRunner, Step
from model_runner.auto import Proposal
from model_runner.parallel import most_lanes, traits_in_lanes
from moe import All2AllTraits, EmulatedLink
from serving.workbench.arms.cells import Arm, arm_config
from serving.workbench.arms.programs import Programs, gather_steps, gather_texts, traced_step
from ubatch import SCHEDULES, ConfigError, Point, Schedule, SharedExpert, UBatchWrapper
from ubatch.schedules import (
    Candidate,
    Compute,
    Launch,
    LayerTimes,
    Op,
    Pass,
    RankLoad,
    UnevenTimes,
    Wait,
    median_programs,
    search_schedules,
)

_SHARED_LEAST = 0.03
"""Below this share of the compute, a `shared` stage is overhead of the runtime, not a shared expert."""
_AFTER = {"attn_gather": "attn_prepare", "attn_scatter": "attn_core"}
"""Transfers of tensor-parallel attention, and the stage that waits for them."""
_Sums = dict[str, float]
_NAMES = [field.name for field in fields(LayerTimes)]
_COMPUTE = ("attn_prepare", "attn_core", "experts", "shared")
_TRACED_STEPS = 5
_STAGE_LANES = (2, 4)
HANDOFF_S = 30e-6
"""Seconds of a hand-off of the baton with cold caches, see `ubatch bench handoff`."""


@dataclass(frozen=True)
class LayerStages:
    """Mean stage times of one lane in the MoE layers of each kind: those with linear attention have their own.

    Attributes:
        times: kind of layer -> times; see `ubatch.dbo_yield` for kinds.
        kinds: of every MoE layer, in order.
    """

    times: Mapping[str, LayerTimes]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class StageModel:
    """Stage times of one lane and layer: `fixed + whole / lanes` of each stage, in seconds. `fixed` every lane takes,
    independent of its tokens; of `whole` each lane takes its share.

    Attributes:
        fixed, whole: by kind of layer.
        kinds: see `LayerStages`.
    """

    fixed: Mapping[str, LayerTimes]
    whole: Mapping[str, LayerTimes]
    kinds: tuple[str, ...]
    num_experts: int
    top_k: int
    traits: All2AllTraits

    @classmethod
    def fit(
        cls,
        few: tuple[int, LayerStages],
        many: tuple[int, LayerStages],
        num_experts: int,
        top_k: int,
        traits: All2AllTraits,
    ) -> StageModel:
        """Fit the model to times of one lane at two numbers of lanes, the smaller number first.

        Raises:
            ConfigError: the numbers are not in order, or the steps are not of the same layers.
        """
        (a, at_few), (b, at_many) = few, many
        if not 1 <= a < b:
            raise ConfigError(f"stage times of {a} and {b} lanes: the smaller number must come first, and be smaller.")
        if at_few.kinds != at_many.kinds:
            raise ConfigError("stage times of other layers: the two steps must be of one model.")
        fixed: dict[str, LayerTimes] = {}
        whole: dict[str, LayerTimes] = {}
        for kind in at_few.times:
            parts = {}
            for name in _NAMES:
                at_a, at_b = (getattr(each.times[kind], name) for each in (at_few, at_many))
                slope = min(max(0.0, (at_a - at_b) / (1 / a - 1 / b)), at_a * a)
                parts[name] = max(0.0, at_a - slope / a), slope
            fixed[kind], whole[kind] = (LayerTimes(**{name: part[i] for name, part in parts.items()}) for i in (0, 1))
        return cls(fixed, whole, at_few.kinds, num_experts, top_k, traits)

    def times(self, lanes: int, chunks: int, chunk_dispatch: bool) -> list[UnevenTimes]:
        """Stage times of one lane in each layer, all chunks together; see `ubatch.schedules.search.TimesOf`."""
        of_kind = {kind: self._times(kind, lanes, chunks, chunk_dispatch) for kind in self.fixed}
        return [of_kind[kind] for kind in self.kinds]

    def _times(self, kind: str, lanes: int, chunks: int, chunk_dispatch: bool) -> UnevenTimes:
        cut = (self.num_experts, self.top_k, chunks)
        dispatch_bytes, combine_bytes = self.traits.chunk_factors(*cut, chunk_dispatch=chunk_dispatch)
        dispatch_shares, combine_shares = self.traits.chunk_shares(*cut, chunk_dispatch=chunk_dispatch)
        again = {
            "experts": (chunks, 1.0),
            "dispatch": (chunks if chunk_dispatch else 1, dispatch_bytes),
            "combine": (chunks, combine_bytes),
        }
        values = {}
        for name in _NAMES:
            count, factor = again.get(name, (1, 1.0))
            fixed, whole = (getattr(part[kind], name) for part in (self.fixed, self.whole))
            values[name] = count * fixed + factor * whole / lanes
        return UnevenTimes(**values, dispatch_shares=dispatch_shares, combine_shares=combine_shares)

    def search(self, *, max_lanes: int, max_chunks: int, keep: int) -> list[Candidate]:
        """The simulator's best schedules among those that the transport supports; see `search_schedules`."""
        return search_schedules(
            self.times,
            len(self.kinds),
            max_lanes=max_lanes,
            max_chunks=min(max_chunks, self.traits.max_chunks),
            combine_chunks=self.traits.cuts_combine is not None,
            handoff_s=HANDOFF_S,
            keep=keep,
        )


def layer_times(program: Sequence[Op]) -> LayerStages:
    """Mean stage times of the MoE layers of one lane's program, by kind of layer.

    The transport's own compute counts for the stage before its launch, and a dense layer for the MoE layers of its
    kind.

    Raises:
        ConfigError: the program has no MoE layer.
    """
    totals: dict[str, _Sums] = {}
    kinds: list[str] = []
    sums: _Sums = defaultdict(float)  # of the current layer
    kind, own = "", 0

    def end_layer() -> None:
        nonlocal sums, own
        _add(totals.setdefault(kind, defaultdict(float)), sums)
        kinds.extend([kind] * own)
        sums, own = defaultdict(float), 0

    for op, stage in _stages(program):
        match op:
            case Compute(seconds):
                sums[stage] += seconds
            case Launch():
                sums[stage] += max(op.seconds, op.receive_s or 0.0)
                own += stage == "combine"
            case Pass(Point.ATTN_PREPARE, layer):
                kind = layer
            case Pass(Point.LAYER):
                end_layer()
    end_layer()
    if not kinds:
        raise ConfigError("the traced step has no MoE layer whose tokens travel; there is nothing to schedule.")
    for dense in totals.keys() - set(kinds):
        _add(totals[kinds[0]], totals.pop(dense))
    _fold_shared(totals.values())
    layers = Counter(kinds)
    times = {kind: LayerTimes(**{name: own[name] / layers[kind] for name in _NAMES}) for kind, own in totals.items()}
    return LayerStages(times, tuple(kinds))


def with_loads(program: Sequence[Op], loads: Sequence[RankLoad]) -> list[Op]:
    """A lane's program of a step with balanced experts, as it is with these loads of its rank in every MoE layer.

    Raises:
        ConfigError: the program has another number of MoE layers.
    """
    layers = len(layer_times(program).kinds)
    if layers != len(loads):
        raise ConfigError(f"loads of {len(loads)} layers were given for {layers}. Give those of every layer.")
    found: list[Op] = []
    layer, combined = 0, False
    for op, stage in _stages(program):
        match op:
            case Compute(seconds) if stage == "experts":
                op = Compute(loads[layer].experts * seconds)
            case Launch() if stage in ("dispatch", "combine"):
                there, back = loads[layer].sent, loads[layer].received
                if stage == "combine":
                    there, back, combined = back, there, True
                received = op.seconds if op.receive_s is None else op.receive_s
                op = replace(op, seconds=op.seconds * there, receive_s=received * back)
            case Pass(Point.LAYER) if combined:
                layer, combined = layer + 1, False
        found.append(op)
    return found


def _stages(program: Sequence[Op]) -> Iterator[tuple[Op, str]]:
    """Every operation with the field of `LayerTimes` that its time counts for; points and waits have none."""
    stage, before_launch, launched = "attn_prepare", "attn_core", False
    for op in program:
        match op:
            case Compute():
                yield op, before_launch if launched else stage
                launched = False
            case Launch(key):
                way = _transfer(key)
                yield op, way
                before_launch, launched = stage if stage != "shared" else before_launch, True
                stage = stage if way in _AFTER or key.startswith("dispatch_counts") else "shared"
            case Wait(key):
                yield op, ""
                if _transfer(key) in _AFTER:
                    stage = _AFTER[_transfer(key)]
                elif not key.startswith("dispatch_counts"):
                    stage = "experts" if key.startswith("dispatch") else "attn_prepare"
            case Pass(point):
                yield op, ""
                if point == Point.ATTN_PREPARE:
                    stage = "attn_core"
                elif point in (Point.OUTPUT, Point.LAYER):
                    stage = "attn_prepare"


def _add(total: _Sums, more: _Sums) -> None:
    for name, seconds in more.items():
        total[name] += seconds


def _fold_shared(totals: Collection[_Sums]) -> None:
    """Count a `shared` stage that is too short for a shared expert as the experts'."""
    compute = sum(seconds for total in totals for name, seconds in total.items() if name in _COMPUTE)
    if sum(total["shared"] for total in totals) < _SHARED_LEAST * compute:
        for total in totals:
            total["experts"] += total.pop("shared", 0.0)


def _transfer(key: str) -> str:
    """The field of `LayerTimes` for a transfer. Gathers and scatters of dense layers count as those of attention."""
    if key.startswith(("combine", "dispatch")):
        return "combine" if key.startswith("combine") else "dispatch"
    return "attn_scatter" if "_scatter" in key else "attn_gather"


def slowest_layer_times(steps: Sequence[Sequence[Programs]]) -> LayerStages:
    """`layer_times` of the slowest rank: the mean over each rank's lanes, then the maximum over ranks, stage by stage,
    from the medians over the steps (step -> rank -> programs)."""
    found = [[layer_times(program) for program in median_programs(samples)] for samples in zip(*steps, strict=True)]

    def slowest(kind: str, name: str) -> float:
        return max(mean(getattr(lane.times[kind], name) for lane in lanes) for lanes in found)

    first = found[0][0]
    times = {kind: LayerTimes(**{name: slowest(kind, name) for name in _NAMES}) for kind in first.times}
    return LayerStages(times, first.kinds)


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


# -- steps -------------------------------------------------------------------------------------------------------------


class NoStageTimes(ConfigError):
    """The stage times that a search needs cannot be measured; raised on every rank."""


class ArmSteps:
    """Runs a runner's model in arms. Every rank makes one and calls the same methods.

    Args:
        runner: the runner with the model; its overlap settings are replaced by each arm's.
        link: the emulated link between the runner's ranks; None for a real one.
    """

    def __init__(self, runner: ModelRunner, link: EmulatedLink | None = None) -> None:
        self._runner = runner
        self._link = link
        self._wrappers: dict[str, UBatchWrapper] = {}

    def __enter__(self) -> ArmSteps:
        return self

    def __exit__(self, *error: object) -> None:
        for wrapper in self._wrappers.values():
            wrapper.close()

    def run(self, arm: Arm, batch: Step) -> bool:
        """Vote, plan and run a step; returns whether it ran in this arm, the same on every rank."""
        wrapper = self._wrapper(arm)
        step = self._runner.agree(batch, Proposal(wrapper.ubatch_config))
        if step.decision.engaged == arm.is_serial:
            return False
        with self._runner.together():
            self._runner.run(step, wrapper)
        return True

    def serves(self, lanes: int) -> bool:
        """Whether the transport supports this number of lanes."""
        most = most_lanes(self._runner.all2all)
        return most is None or lanes <= most

    def search(self, batch: Step, find: Callable[[StageModel], list[Arm]]) -> list[Arm]:
        """Run `find` on the stage model on rank 0, and send its arms to all ranks. Errors as in `stage_model`."""
        model, group = self.stage_model(batch), self._runner.group
        found = msgspec.json.encode(find(model)).decode() if group is None or group.rank == 0 else ""
        return msgspec.json.decode(gather_texts(found, group)[0], type=list[Arm])

    @torch.inference_mode()
    def stage_model(self, batch: Step) -> StageModel:
        """Measure the model of stage times for steps like this batch, the same on every rank.

        Raises:
            NoStageTimes: no tokens are sent to experts, or batch or transport do not allow the lanes to measure.
        """
        config, group = self._runner.config, self._runner.group
        if group is None or group.size == 1:
            raise NoStageTimes("stages are measured between ranks that share experts, and there is one rank.")
        if not config.num_experts:
            raise NoStageTimes("stages are measured of steps that send tokens to experts, and the model is dense.")
        if not self.serves(_STAGE_LANES[-1]):
            raise NoStageTimes(
                f"stages are measured with up to {_STAGE_LANES[-1]} lanes, and {type(self._runner.all2all).__name__} "
                f"serves {most_lanes(self._runner.all2all)}."
            )
        measured = []
        for lanes in _STAGE_LANES:
            stages = self._stages(batch, lanes)
            if stages is None:
                raise NoStageTimes(
                    f"stages are measured with {lanes} lanes, and a step of {batch.num_tokens} tokens in "
                    f"{len(batch.shares)} requests is not split into as many. Make the step larger."
                )
            measured.append((lanes, stages))
        at_few, at_many = measured
        tokens = -(-batch.num_tokens // self._runner.tensor_parallel_size)
        return StageModel.fit(
            at_few,
            at_many,
            config.num_experts,
            config.num_experts_per_tok,
            traits_in_lanes(self._runner.all2all, batch.mode, tokens, at_few[0]),
        )

    def _stages(self, batch: Step, lanes: int) -> LayerStages | None:
        """Stage times of one lane, the mean over the lanes; None if the batch cannot be split into `lanes` lanes."""
        arm = Arm(f"one by one x{lanes}", SCHEDULES["mlp_shared_overlap"].with_lanes(lanes).one_by_one())
        if not self.run(arm, batch):
            return None
        samples = [traced_step(lambda: self.run(arm, batch), self._link).programs for _ in range(_TRACED_STEPS)]
        return slowest_layer_times(gather_steps(samples, self._runner.group))

    def _wrapper(self, arm: Arm) -> UBatchWrapper:
        if arm.name not in self._wrappers:
            self._wrappers[arm.name] = UBatchWrapper(self._runner.model, arm_config(self._runner.dbo, arm.schedule))
        return self._wrappers[arm.name]
