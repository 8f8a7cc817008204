"""How soon experts are balanced again when others become popular, while the ranks step.

The server's own balancer decides from counted loads, and the runners move; only the processes between are left out.
Popularity is dealt out anew in every layer, in the middle of running steps, and so that the placement in force is as
skewed as that by ids was. A shift is over when the placement in force is `GOOD` times as balanced for the new loads as
the best one, the mean over the layers.

    interval   plans every `step_interval` steps, early ones off; shifts come at different times between two plans
    early      plans when balancedness has fallen, too
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from moe import ExpertPlacement
from moe.balance import EplbConfig, Floats, part_steps, plan_placement
from serving.balance import Balancer, LoadBook
from serving.workbench.bench.eplb import skewed
from serving.workbench.bench.statistics import table
from serving.workbench.bench.step_setting import open_batch
from ubatch.schedules import SERIAL

GOOD = 0.9
_TOKENS = 16
"""Tokens of a prompt: steps are counted, not timed."""


@dataclass(frozen=True)
class Shift:
    """What one shift did.

    Attributes:
        before: balancedness of the new loads in the old placement; `best` in the best one.
        steps: until balanced again; None if that took longer than twice what was asked.
        rearrangements: begun meanwhile.
    """

    before: float
    best: float
    steps: int | None
    rearrangements: int


@dataclass(frozen=True)
class ShiftResult:
    """Shifts by mode, and the most steps that one may take."""

    window_size: int
    step_interval: int
    most: dict[str, int]
    shifts: dict[str, list[Shift]]

    def print(self) -> None:
        print(f"\nshifts of popularity (window {self.window_size} steps, interval {self.step_interval})")
        head = {"plans": "", "before": ".2f", "best": ".2f", "steps": "d", "asked": "d", "rearrangements": "d"}
        rows = [
            (mode, each.before, each.best, each.steps, self.most[mode], each.rearrangements)
            for mode, shifts in self.shifts.items()
            for each in shifts
        ]
        print(table(head, rows))


def measure_shifts(models: skewed.SkewedModels, config: EplbConfig, balancedness: float, shifts: int) -> ShiftResult:
    """Shift popularity again and again. Every rank calls it; all get the same.

    Args:
        config: with window and interval.
        balancedness: right after a shift.
        shifts: in each mode.
    """
    interval, window = config.step_interval, config.window_size
    most = {"interval": interval + window, "early": 2 * window}
    random = np.random.default_rng(0)
    found: dict[str, list[Shift]] = {}
    for mode, limit in most.items():
        own = config if mode == "early" else replace(config, balancedness_fall=0.0)
        with _Server(models, own) as server:
            found[mode] = []
            for number in range(shifts):
                server.run(window + number * interval // shifts)
                placement = skewed.placement_of(server.setting)
                order = skewed.skewed_order(models.loads["without"], placement, balancedness, random)
                skewed.set_biases(server.setting.runner, models.biases.gather(1, order))
                found[mode].append(server.recover(2 * limit))
    skewed.set_biases(models.settings["with"].runner, models.biases)
    return ShiftResult(window, interval, most, found)


class _Server:
    """The ranks step and tell their loads; rank 0 plans."""

    def __init__(self, models: skewed.SkewedModels, config: EplbConfig) -> None:
        self._rearranger, self._stack = models.rearranger, ExitStack()
        runner = models.settings["with"].runner
        generator = torch.Generator().manual_seed(dist.get_rank())
        size = len(models.settings["with"].batch.shares), _TOKENS
        prompts = torch.randint(0, runner.config.vocab_size, size, generator=generator).tolist()
        self.setting = self._stack.enter_context(open_batch(runner, prompts, models.link))
        self._part, self._step = part_steps(config.window_size), 0
        self._loop = asyncio.new_event_loop()
        self._orders: list[tuple[ExpertPlacement, Sequence[int]]] = []
        self._counts = self._snapshot()
        self._book = LoadBook(skewed.placement_of(self.setting), window_size=config.window_size)
        expert_bytes, link = self._rearranger.mover.expert_bytes, models.link.bytes_per_s
        self._balancer = Balancer(config, self._book, self._send, expert_bytes, link if link < float("inf") else None)
        self._number = 0

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._balancer.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        if not any(error):
            self._rearranger.finish()
        self._stack.close()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._run_step()

    def recover(self, most: int) -> Shift:
        """Run until the experts are balanced for what is popular now."""
        with self._rearranger.paused():
            loads = np.sum([skewed.loads_of(self.setting) for _ in range(self._part)], axis=0)
        self._counts = self._snapshot()
        begun, before = self._begun, self._balance(loads)
        best = float(plan_placement(loads, skewed.placement_of(self.setting)).balancedness(loads).mean())
        for steps in range(1, most + 1):
            self._run_step()
            if self._balance(loads) >= GOOD * best:
                return Shift(before, best, steps, self._begun - begun)
        return Shift(before, best, None, self._begun - begun)

    def _balance(self, loads: Floats) -> float:
        return float(skewed.placement_of(self.setting).balancedness(loads).mean())

    @property
    def _begun(self) -> int:
        return self._rearranger.number

    def _run_step(self) -> None:
        self.setting.step(SERIAL)
        self._step += 1
        if self._step % self._part == 0:
            self._tell()
        self._loop.run_until_complete(asyncio.sleep(0))  # a plan that is made is sent
        orders = [self._orders.pop(0) if self._orders else None]
        dist.broadcast_object_list(orders)
        if orders[0] is not None:
            self._rearranger.begin(*orders[0])
        for news in self._rearranger.news():
            self._balancer.moved(self._number, news.layers, news.num_bytes, news.failure, over=news.over)

    def _tell(self) -> None:
        """All ranks' counts since they were told last go to rank 0."""
        now = self._snapshot()
        own = now - self._counts
        self._counts = now
        of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, own)
        if dist.get_rank() == 0:
            self._loop.run_until_complete(self._counted(of_ranks))

    async def _counted(self, of_ranks: Sequence[torch.Tensor]) -> None:
        for rank, counts in enumerate(of_ranks):
            self._book.add(rank, self._part, counts.numpy())
            self._balancer.counted(rank, self._part)

    def _send(self, number: int, placement: ExpertPlacement, layers: Sequence[int]) -> None:
        self._number = number
        self._orders.append((placement, layers))

    def _snapshot(self) -> torch.Tensor:
        return skewed.expert_loads(self.setting.runner).snapshot()
