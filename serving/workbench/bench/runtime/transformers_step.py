"""`ubatch bench transformers`: a model that transformers itself shards, with and without this project's wrapper.

Every rank has prompts of its own (`DistributedConfig(fsdp_size=ranks, ep_size=ranks)`). In all arms the tokens reach
their experts through `ep_implementation="ubatch"` over an emulated link, whose bandwidth is set so that communication
takes a chosen share of compute. Arms and figures are those of `ubatch bench overlap`; `serial_unsplit` is the model of
transformers without a wrapper:

    over_not_wrapped   serial_unsplit / overlapped
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor, nn

from moe import EmulatedLink, register_with_transformers
from serving.ranks import run_ranks
from serving.workbench.bench.runtime.overlap import OverlapResult, as_json, measure_overlap, print_result
from serving.workbench.bench.statistics import paired
from serving.workbench.bench.step_setting import Setting, StepOptions, model_folder
from ubatch import CommGroup, Schedule, UBatchConfig, UBatchError
from ubatch.schedules import SERIAL


class Options(StepOptions):
    """What to measure."""

    lanes: int = Field(2, ge=2, description="of the wrapped model")
    ratio: float = Field(1.0, gt=0, description="communication as a multiple of split compute")


class TransformersSetting(Setting):
    """One rank's part of a model that transformers shards with `ep_implementation="ubatch"` over `link`, and its
    prompts `[sequences, length]`."""

    def __init__(self, model: nn.Module, ids: Tensor, link: EmulatedLink, group: CommGroup, how: UBatchConfig) -> None:
        # No proof: the arms are compared before they are timed.
        super().__init__(model, replace(how, verify="off"), group, link)
        self._ids = ids

    def step(self, schedule: Schedule) -> Tensor:
        """Logits of all prompts, `[sequences, length, vocab]`; `SERIAL` runs the model without a wrapper."""
        with torch.inference_mode(False), torch.no_grad():  # `fully_shard` refuses inference tensors
            if schedule == SERIAL:
                return self._logits(self.model)
            wrapper = self.wrapper(schedule)
            if not wrapper.statistics().calls:
                self._logits(wrapper)  # a warm-up: the first call may run unsplit
            engaged = wrapper.statistics().engaged
            logits = self._logits(wrapper)
        if wrapper.statistics().engaged == engaged:
            raise UBatchError(f"{schedule.describe()}: the call declined: {wrapper.statistics().last_reason}.")
        return logits

    def _logits(self, model: nn.Module) -> Tensor:
        logits: Tensor = model(self._ids, use_cache=False).logits
        return logits


@contextmanager
def open_transformers(rank: int, options: Options, folder: Path) -> Iterator[TransformersSetting]:
    """This rank's shard and prompts over an emulated link, which starts infinitely fast; every rank calls it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    group = CommGroup.from_process_group(timeout_s=300.0)
    link = options.link()
    register_with_transformers(group, all2all_backend=options.all2all_backend, link=link)
    layout = DistributedConfig(fsdp_size=options.ranks, ep_size=options.ranks, ep_implementation="ubatch")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=options.torch_dtype, distributed_config=layout)
    ids = torch.tensor(options.prompts(model.config.vocab_size, rank))
    with closing(TransformersSetting(model.eval(), ids, link, group, options.overlap)) as setting:
        yield setting


def run(options: Options) -> int:
    with model_folder(options) as model:
        result: OverlapResult = run_ranks(_measure_on_rank, options.ranks, options, model)
    print(options.describe())
    print_result(result)
    over_not_wrapped = paired(result.arms_ms["serial_unsplit"], result.arms_ms[f"overlapped_{options.lanes}"])
    print(f"  wrapped, over not wrapped   {over_not_wrapped:.3f}")
    options.write({"over_not_wrapped": over_not_wrapped, **as_json([result])})
    return 1 if result.lanes[options.lanes].void else 0


def _measure_on_rank(rank: int, world_size: int, options: Options, folder: Path) -> OverlapResult:
    with open_transformers(rank, options, folder) as setting:
        return measure_overlap(setting, lanes=(options.lanes,), ratio=options.ratio, blocks=options.blocks)
