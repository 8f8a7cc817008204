"""One rank's model, one batch and an emulated link, for measuring steps under any schedule."""

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from model_runner import (
    ModelRunner,
    RandomDeepseekV3,
    RandomQwen3Moe,
    Request,
    SamplingParams,
    ScheduledRequest,
    Step,
    build_input_batch,
    make_random_checkpoint,
)
from model_runner.auto import Proposal
from model_runner.decoder import DecoderConfig
from moe import EmulatedLink, all2all_backends
from serving.hub import fetch_weights, find_checkpoint
from serving.options.flags.fields import one_of
from serving.workbench.arms.cells import arm_config
from serving.workbench.arms.programs import Programs, gather_steps, traced_step
from serving.workbench.bench.options import ENGINE, BlockOptions, Dtype, LatencyUs, Ranks
from serving.workbench.bench.statistics import Arm, interleave_arms
from ubatch import SCHEDULES, CommGroup, ConfigError, Schedule, UBatchConfig, UBatchError, UBatchWrapper
from ubatch.schedules import SERIAL

RANDOM_MODELS: Mapping[str, type[RandomQwen3Moe] | type[RandomDeepseekV3]] = {
    "qwen3-moe": RandomQwen3Moe,
    "deepseek-v3": RandomDeepseekV3,
}
Random = Annotated[
    Literal["qwen3-moe", "deepseek-v3"],
    Field(description="architecture of the random model of about 100 M parameters; deepseek-v3 has shared experts"),
]


class ModelOptions(BlockOptions):
    """The model."""

    measures = (*ENGINE, "serving/workbench/arms", "serving/workbench/bench/step_setting.py")
    of_random: ClassVar[tuple[str, ...]] = ("layers",)
    """Options that a checkpoint leaves no choice of."""

    model: Path | None = Field(
        default=None, description="checkpoint folder, or name on the hub; random weights if not given"
    )
    random: Random = "qwen3-moe"
    layers: int | None = Field(default=None, ge=2, description="of the random model; 8 if not given")

    @property
    def size(self) -> RandomQwen3Moe | RandomDeepseekV3:
        """Of the random model."""
        size = RANDOM_MODELS[self.random]()
        return size if self.layers is None else replace(size, num_hidden_layers=self.layers)


_MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Between steps that are cut differently, in all numbers together: a library's products may depend on the cut."""


class StepOptions(ModelOptions):
    """The steps, and the link under them."""

    dtype: Dtype = Field(default="float32", description="of the model and its transfers")
    ranks: Ranks = 2
    sequences: int = Field(default=8, ge=2, description="prompts per rank and step")
    sequence_length: int = Field(default=128, ge=1, description="tokens of a prompt")
    latency_us: LatencyUs = 20.0
    schedule: Annotated[str, one_of(SCHEDULES)] = Field(
        default="mlp_shared_overlap", description=f"one of {', '.join(SCHEDULES)}"
    )
    all2all_backend: Annotated[str, one_of(all2all_backends())] = Field(
        default="torch_dist", description="what carries the data under the emulated link"
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype`, as torch's."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def overlap(self) -> UBatchConfig:
        """How the lanes run."""
        return UBatchConfig(schedule=self.schedule, timeout_s=300.0)

    def link(self) -> EmulatedLink:
        """The link, which starts infinitely fast."""
        return EmulatedLink(self.latency_us * 1e-6, float("inf"))

    def runner(self, model: Path, group: CommGroup, link: EmulatedLink, **more: Any) -> ModelRunner:
        """This rank's part of the model; `more` as of `ModelRunner`."""
        transport, dtype = self.all2all_backend, self.torch_dtype
        return ModelRunner(
            model, group=group, all2all_backend=transport, link=link, dbo=self.overlap, dtype=dtype, **more
        )

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """The random tokens of a batch."""
        size = (self.sequences, self.sequence_length)
        return torch.randint(0, vocab_size, size, generator=torch.Generator().manual_seed(seed)).tolist()

    def describe(self) -> str:
        """The step of a rank, in a line."""
        model = f"random {self.random}" if self.model is None else str(self.model)
        tokens = f"{self.sequences} prompts of {self.sequence_length} tokens"
        return f"{model} in {self.dtype}, {self.ranks} ranks, each with {tokens}"


class Setting(ABC):
    """One rank's model, batch and link, to run steps under any schedule; subclasses run the model.

    Args:
        model: this rank's model.
        config: gives the schedule, the time-out and the rest of each wrapper's settings.
        group: the ranks that run a step together; None for a single rank.
        link: the emulated link between them.

    Attributes:
        wall_ms: time of the last timed step.
        cpu_ms: its CPU time, over all threads of this rank, which share one core.
    """

    def __init__(self, model: nn.Module, config: UBatchConfig, group: CommGroup | None, link: EmulatedLink) -> None:
        self.model, self.config, self.group, self.link = model, config, group, link
        self.wall_ms = self.cpu_ms = 0.0
        self._wrappers: dict[Schedule, UBatchWrapper] = {}

    @abstractmethod
    def step(self, schedule: Schedule) -> Tensor:
        """Run one step; returns its output for every token."""

    def schedule(self, lanes: int) -> Schedule:
        """The schedule of the settings, with `lanes` lanes; `SERIAL` for one lane."""
        return SERIAL if lanes == 1 else self.config.resolved_schedule().with_lanes(lanes)

    def wrapper(self, schedule: Schedule) -> UBatchWrapper:
        """The model under a schedule, with a threshold that every step reaches."""
        if schedule not in self._wrappers:
            self._wrappers[schedule] = UBatchWrapper(self.model, arm_config(self.config, schedule))
        return self._wrappers[schedule]

    def timed(self, schedule: Schedule) -> float:
        """Milliseconds of a step, measured from when all ranks are ready."""
        dist.barrier(self.group.pg if self.group is not None else None)
        start, cpu_start = time.perf_counter(), time.process_time()
        self.step(schedule)
        self.cpu_ms = (time.process_time() - cpu_start) * 1e3
        self.wall_ms = (time.perf_counter() - start) * 1e3
        return self.wall_ms

    def check_equal(self, schedules: Sequence[Schedule]) -> None:
        """Check that every schedule computes the same as an unsplit step, within rounding.

        Raises:
            UBatchError: it does not.
        """
        plain = self.step(SERIAL)
        for schedule in schedules:
            error = float((self.step(schedule).float() - plain.float()).norm() / plain.float().norm())
            if not error <= _MOST_ERROR[plain.dtype]:
                raise UBatchError(f"{schedule.describe()} computes something else: relative error {error:.2g}.")

    def close(self) -> None:
        for wrapper in self._wrappers.values():
            wrapper.close()


class StepSetting(Setting):
    """A batch for the model of this project's runner, over the emulated link `link`."""

    def __init__(self, runner: ModelRunner, batch: Step, link: EmulatedLink) -> None:
        super().__init__(runner.model, runner.dbo, runner.group, link)
        self.runner, self.batch = runner, batch

    @property
    def has_shared_experts(self) -> bool:
        """Whether a token visits experts that need no communication."""
        config = self.runner.config
        return isinstance(config, DecoderConfig) and config.moe is not None and config.moe.shared_intermediate_size > 0

    def step(self, schedule: Schedule) -> Tensor:
        """Vote, plan and run one step; hidden states `[tokens, hidden]`."""
        wrapper = self.wrapper(schedule)
        step = self.runner.agree(self.batch, Proposal(wrapper.ubatch_config))
        if step.decision.engaged != schedule.overlaps:
            raise UBatchError(f"{schedule.describe()}: the ranks decided otherwise: {step.decision.reason}.")
        with self.runner.together():
            return self.runner.run(step, wrapper)


@contextmanager
def model_folder(options: ModelOptions) -> Iterator[Path]:
    """The given checkpoint's folder, or one with random weights that is deleted at the end.

    Raises:
        ConfigError: a size of the random model is given together with a checkpoint.
    """
    if options.model is not None:
        for name in options.of_random:
            if name in options.model_fields_set and (given := getattr(options, name)) is not None:
                raise ConfigError(f"{name} is {given}, but {options.model} has its own. Leave one of them out.")
        located = find_checkpoint(options.model, "--model")
        fetch_weights(located, "--model")
        yield located.folder
        return
    with tempfile.TemporaryDirectory() as folder:
        yield make_random_checkpoint(Path(folder) / f"random-{options.random}", options.size)


@contextmanager
def open_setting(rank: int, options: StepOptions, model: Path) -> Iterator[StepSetting]:
    """This rank's model and batch over an emulated link, which starts infinitely fast; every rank calls it."""
    group, link = CommGroup.from_process_group(timeout_s=300.0), options.link()
    with (
        options.runner(model, group, link) as runner,
        open_batch(runner, options.prompts(runner.config.vocab_size, rank), link) as setting,
    ):
        yield setting


@contextmanager
def open_batch(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], link: EmulatedLink, kind: type[StepSetting] = StepSetting
) -> Iterator[StepSetting]:
    """Steps that prefill these prompts."""
    setting = kind(runner, prefill_batch(runner, prompts), link)
    try:
        yield setting
    finally:
        setting.close()
        for share in setting.batch.shares:
            runner.release(share.request)


def prefill_batch(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> Step:
    """The batch of a step that prefills all prompts; its KV blocks stay allocated."""
    shares = []
    for index, prompt in enumerate(prompts):
        request = Request(index, list(prompt), SamplingParams(max_tokens=1))
        runner.admit(request, len(prompt))
        shares.append(ScheduledRequest(request, len(prompt)))
    return build_input_batch(shares, runner.request_table, runner.kv_cache.spec, runner.device)


@dataclass(frozen=True)
class StepLoad:
    """Compute and communication of one step; each value is the largest over the ranks.

    Attributes:
        compute_s: CPU seconds, the transport's own included.
        num_bytes: bytes sent in the busier direction.
        transfers: number of transfers.
    """

    compute_s: float
    num_bytes: float
    transfers: float

    def bandwidth(self, ratio: float, latency_s: float) -> float:
        """Bandwidth, in bytes per second, at which the link is busy `ratio` times as long as the step computes.

        Raises:
            UBatchError: the latencies alone take longer.
        """
        travel_s = ratio * self.compute_s - self.transfers * latency_s
        if travel_s <= 0:
            raise UBatchError(f"{self.transfers:.0f} latencies of {latency_s * 1e6:g} us exceed {ratio:g}x compute.")
        return self.num_bytes / travel_s


def measure_load(setting: Setting, lanes: int) -> StepLoad:
    """Measure a step under the runner's own schedule, lanes one by one. Every rank calls it; all get the same."""
    link, serial = setting.link, setting.schedule(lanes).one_by_one()
    times = []
    with link.at_once():
        for _ in range(5):
            link.reset_statistics()
            start = time.process_time()
            setting.step(serial)
            times.append(time.process_time() - start)
    carried = link.statistics()
    facts = torch.tensor(
        [sorted(times)[2], max(carried.bytes_sent, carried.bytes_received), carried.transfers], dtype=torch.float64
    )
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    return StepLoad(*facts.tolist())


def calibrate(setting: Setting, lanes: int, ratio: float) -> float:
    """Set the link's bandwidth so that its busy time is `ratio` times the CPU time of the split step."""
    setting.link.bytes_per_s = measure_load(setting, lanes).bandwidth(ratio, setting.link.latency_s)
    return setting.link.bytes_per_s


class SplitCompute:
    """An arm that runs a schedule's lanes one after the other without waiting, and records the times of their stages.

    The link delivers at once, and records how long it would have been busy; see `serving.workbench.arms.programs`.

    Args:
        name: behind the names of its three figures: milliseconds of the step (`split`), of the CPU (`split_compute`),
            and of the busy link (`communication`).
    """

    def __init__(self, setting: Setting, schedule: Schedule, name: str = "") -> None:
        self._setting = setting
        self._schedule = schedule.one_by_one()
        self._names = [f"{figure}{name}" for figure in ("split", "split_compute", "communication")]
        self._around_ms: list[float] = []
        self._programs: list[Programs] = []

    def __call__(self) -> dict[str, float]:
        """Run a step; returns its figures."""
        setting, link = self._setting, self._setting.link
        link.reset_statistics()
        traced = traced_step(lambda: setting.timed(self._schedule), link)
        self._programs.append(traced.programs)
        self._around_ms.append(setting.wall_ms - traced.lanes_s * 1e3)
        return dict(zip(self._names, (setting.wall_ms, setting.cpu_ms, link.statistics().busy_s * 1e3), strict=True))

    def steps(self) -> list[list[Programs]]:
        """Every rank's programs of all steps but the first, for the simulator; every rank calls it."""
        return gather_steps(self._programs[1:] or self._programs, self._setting.group)

    def around_ms(self) -> float:
        """Milliseconds of a step outside its lanes, such as the vote; every rank calls it."""
        return slowest_rank({"": [median(self._around_ms)]})[""][0]


def interleave_on_ranks(arms: Mapping[str, Arm], blocks: int, label: str) -> dict[str, list[float]]:
    """`interleave_arms` on every rank; for each block, the slowest rank's."""
    return slowest_rank(interleave_arms(arms, blocks, label=label, show=bool(label) and dist.get_rank() == 0))


def slowest_rank(arms: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """For each block, the largest value over the ranks: a step ends when its slowest rank ends."""
    table = torch.tensor(list(arms.values()), dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return dict(zip(arms, table.tolist(), strict=True))
