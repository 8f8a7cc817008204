"""What counting the experts' load costs: the counts of all layers, and a copy of them, timed alone.

The kernel is called as a step calls it when it has no map to apply; with a map the counts come with it. A copy is made
every step here, which is more often than a server makes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from moe.expert_map import map_and_count
from serving.workbench.arms.cells import Cell, Grid, make_batch
from serving.workbench.bench.eplb.skewed import SkewedModels, expert_loads, sparse_layers
from serving.workbench.bench.statistics import Arm, Interval, bootstrap, paired, table
from serving.workbench.bench.step_setting import StepSetting, interleave_on_ranks
from ubatch.schedules import SERIAL

_CALLS, _CONTEXT = 50, 128


@dataclass(frozen=True)
class CountingResult:
    """Figures by kind of step, `prefill` (the measured batch) and `decode` (one token of as many requests).

    Attributes:
        counting_us: of all layers of a step, and of one copy of the counts.
        share: of the step's time.
        arms_ms: raw block means, slowest rank.
    """

    counting_us: Mapping[str, Interval]
    share: Mapping[str, Interval]
    arms_ms: Mapping[str, Sequence[float]]

    def print(self) -> None:
        print("\ncounting, timed alone")
        rows = [(kind, self.counting_us[kind], self.share[kind]) for kind in self.share]
        print(table({"step": "", "us": ".1f", "share": ".3%"}, rows))


def measure_counting(models: SkewedModels, blocks: int) -> CountingResult:
    """Time counting, and steps beside it. Every rank calls it; all get the same."""
    setting = models.settings["without"]
    runner, batch = setting.runner, setting.batch
    loads = expert_loads(runner)
    layers, top_k = len(sparse_layers(runner)), runner.config.num_experts_per_tok
    random = torch.Generator().manual_seed(0)

    def counting(tokens: int) -> Callable[[], float]:
        ids = torch.rand(tokens, runner.config.num_experts, generator=random).topk(top_k).indices

        def run() -> float:
            before = time.perf_counter()
            for _ in range(_CALLS):
                for layer in range(layers):
                    map_and_count(ids, None, loads.of_layer(layer))
                loads.snapshot()
            return (time.perf_counter() - before) * 1e3 / _CALLS

        return run

    sizes = {"prefill": batch.num_tokens, "decode": len(batch.shares)}
    arms: dict[str, Arm] = {f"{kind} counting": counting(tokens) for kind, tokens in sizes.items()}
    grid = Grid(("decode",), sizes["decode"], 0, _CONTEXT, 0, 0)
    with make_batch(runner, Cell("decode", sizes["decode"]), grid, dist.get_rank()) as decodes:
        decode = StepSetting(runner, decodes, models.link)
        arms |= {"prefill": partial(setting.timed, SERIAL), "decode": partial(decode.timed, SERIAL)}
        found = interleave_on_ranks(arms, blocks, "counting")
        decode.close()
    return CountingResult(
        {kind: bootstrap([ms * 1e3 for ms in found[f"{kind} counting"]]) for kind in sizes},
        {kind: paired(found[f"{kind} counting"], found[kind]) for kind in sizes},
        found,
    )
