"""Runs steps of a batch in a given arm, and measures the time of every stage."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from model_runner import ModelRunner, Step
from model_runner.auto import Proposal
from model_runner.parallel import most_lanes, traits_in_lanes
from moe import EmulatedLink
from serving.workbench.arms.cells import Arm, arm_config
from serving.workbench.arms.programs import gather_steps, gather_texts, traced_step
from serving.workbench.arms.stages import LayerStages, StageModel, slowest_layer_times
from ubatch import SCHEDULES, ConfigError, UBatchWrapper

_TRACED_STEPS = 5
_STAGE_LANES = (2, 4)


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
