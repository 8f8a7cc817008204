"""What steps feel of experts that move, and whether they generate the same tokens.

Every expert of every layer changes its rank, again and again, and steps with this going on take turns with steps
without, A B B A. Prompts have half of the other parts' tokens: many steps are needed, and what moves in a step does not
depend on its length, so short steps feel it most.

    median    of the ratios of every step while experts move to every other step of its block: ratios of single steps,
              as the median of few times is higher than that of many, where some are long
    p99       of all steps while experts move, over that of all others
    steps     that a full rearrangement takes

The same tokens: greedy ones of three runs.

    without   experts in the order of their ids
    moved     experts in other places, all of them moved there
    moving    all experts change their ranks meanwhile
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from model_runner import GenerationOutput, SamplingParams, generate
from serving.progress import progress
from serving.workbench.bench.eplb.skewed import SkewedModels, on_next_ranks, placement_of, prompts_of
from serving.workbench.bench.statistics import Interval, Rows, print_arms, resampled, table
from serving.workbench.bench.step_setting import StepSetting, open_batch, slowest_rank

MOVING = 2
"""Steps of a block while experts move: the shorter a block, the less has the machine changed in it."""
_STILL = 3
"""Steps of a block in which nothing moves, before those and again behind them."""
_SHORTER = 2
"""Tokens of a prompt in the other parts, over those here."""


@dataclass(frozen=True)
class MovingResult:
    """Figures of steps in two lanes.

    Attributes:
        tokens: of a rank, in each step.
        steps: measured, in all; `moving_steps` of them while experts moved.
        median, p99: see the module's top.
        rearrangements: steps that each full rearrangement took.
        moved_bytes: between ranks, in all.
        arms_ms: median of every block, slowest rank.
        steps_ms: raw times of all steps, slowest rank.
    """

    tokens: int
    steps: int
    moving_steps: int
    median: Interval
    p99: Interval
    rearrangements: Sequence[int]
    moved_bytes: int
    arms_ms: Mapping[str, Sequence[float]]
    steps_ms: Mapping[str, Sequence[float]]

    def print(self) -> None:
        steps = f"{self.steps} steps of {self.tokens} tokens"
        print(f"\nmoving: {steps}, {self.moving_steps} while experts moved, {self.moved_bytes / 1e6:.0f} MB in all")
        print_arms(self.arms_ms, ".1f")
        print(table({"over steps without": "", "": ".3f"}, [("median", self.median), ("p99", self.p99)]))
        print(f"  steps of a full rearrangement   {', '.join(map(str, self.rearrangements)) or 'none ended'}")


def measure_moving(models: SkewedModels, moving_steps: int) -> MovingResult:
    """Move experts back and forth. Every rank calls it; all get the same.

    Args:
        moving_steps: to measure while experts move, at least.
    """
    others, rearranger = models.settings["with"], models.rearranger
    blocks: dict[str, list[list[float]]] = {"still": [], "moving": []}
    rearrangements: list[int] = []
    taken, moved = 0, 0

    def still(count: int) -> list[float]:
        with rearranger.paused():
            return [setting.timed(schedule) for _ in range(count)]

    def moving(count: int) -> list[float]:
        nonlocal taken, moved
        times = []
        for _ in range(count):
            if not rearranger.mover.busy:
                rearranger.begin(on_next_ranks(placement_of(setting)))
            times.append(setting.timed(schedule))
            taken += 1
            for news in rearranger.news():
                moved += news.num_bytes
                if news.over:
                    rearrangements.append(taken)
                    taken = 0
        return times

    prompts = [prompt[: max(1, len(prompt) // _SHORTER)] for prompt in prompts_of(others)]
    with open_batch(others.runner, prompts, models.link) as setting:
        schedule = setting.schedule(2)
        still(1)
        moving(1)
        for _ in progress(range(-(-moving_steps // MOVING)), desc="moving", show=dist.get_rank() == 0):
            before, between, after = still(_STILL), moving(1 + MOVING), still(1 + _STILL)
            blocks["still"].append(before + after[1:])  # in the first one, what was on its way arrives
            blocks["moving"].append(between[1:])  # in the first one, nothing was on its way yet
        rearranger.finish()
    slowest = {name: _slowest(of) for name, of in blocks.items()}
    return _result(sum(map(len, prompts)), slowest, rearrangements, moved)


def _slowest(blocks: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each step of each block, the largest value over the ranks."""
    return list(slowest_rank({str(number): block for number, block in enumerate(blocks)}).values())


def _result(
    tokens: int, blocks: Mapping[str, list[list[float]]], rearrangements: list[int], moved: int
) -> MovingResult:
    medians = {name: [median(block) for block in of] for name, of in blocks.items()}
    flat = {name: [value for block in of for value in block] for name, of in blocks.items()}
    return MovingResult(
        tokens=tokens,
        steps=sum(map(len, flat.values())),
        moving_steps=len(flat["moving"]),
        median=ratio_of_steps(blocks["moving"], blocks["still"]),
        p99=ratio_of_p99(blocks["moving"], blocks["still"]),
        rearrangements=rearrangements,
        moved_bytes=moved,
        arms_ms=medians,
        steps_ms=flat,
    )


def ratio_of_steps(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> Interval:
    """Median ratio of two steps of the same block, with its 95% interval, by resampling blocks (seeded)."""
    ratios = np.asarray(numerators)[:, :, None] / np.asarray(denominators)[:, None, :]

    def middle(rows: Rows) -> Any:
        return np.median(ratios[rows], axis=(-3, -2, -1))

    return resampled(len(numerators), middle)


def ratio_of_p99(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> Interval:
    """Ratio of the 99th percentiles over all blocks, with its 95% interval, by resampling blocks (seeded)."""
    both = np.asarray(numerators), np.asarray(denominators)

    def ratio(rows: Rows) -> Any:
        above, below = (np.percentile(of[rows], 99, axis=(-2, -1)) for of in both)
        return above / below

    return resampled(len(numerators), ratio)


# -- the same tokens ---------------------------------------------------------------------------------------------------


_TIE = 1e-4
"""Two tokens whose log probabilities differ by less may change places by rounding."""


@dataclass(frozen=True)
class SameResult:
    """Generated tokens of all ranks, of `moved` and `moving`.

    Attributes:
        tokens: generated, over all prompts.
        different: tokens that another token was expected for, and that are no tie. Those behind a tie do not count.
        ties: prompts that go on differently after a tie.
        switched: layers whose experts have changed their ranks meanwhile.
    """

    tokens: int
    different: int
    ties: int
    switched: int

    @property
    def void(self) -> bool:
        """Whether tokens differ, or no experts moved meanwhile."""
        return self.different > 0 or not self.switched

    def print(self) -> None:
        print(f"\nsame tokens: {self.different} of {self.tokens} differ ({self.ties} prompts behind a tie left out)")
        print(f"  layers switched meanwhile   {self.switched}")
        if not self.switched:
            print("  void: no experts changed their ranks while tokens were generated; generate more (without --quick)")


def compare_tokens(models: SkewedModels, new_tokens: int) -> SameResult:
    """Generate all runs. Every rank calls it, with its own prompts."""
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=2)

    def run(setting: StepSetting) -> list[GenerationOutput]:
        return generate(setting.runner, prompts_of(setting), params)

    balanced = models.settings["with"]
    without, moved = run(models.settings["without"]), run(balanced)
    models.rearranger.begin(on_next_ranks(placement_of(balanced)))
    moving = run(balanced)
    switched = sum(len(news.layers) for news in models.rearranger.news())
    models.rearranger.finish()
    counts = torch.tensor([count_different(without, moved), count_different(without, moving)]).sum(dim=0)
    dist.all_reduce(counts)
    tokens, different, ties = counts.tolist()
    return SameResult(tokens, different, ties, switched)


def count_different(expected: Sequence[GenerationOutput], found: Sequence[GenerationOutput]) -> tuple[int, int, int]:
    """Tokens, different ones and ties, as in `SameResult`."""
    tokens = different = ties = 0
    for one, other in zip(expected, found, strict=True):
        tokens += len(one.token_ids)
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
        first = next((place for place, (a, b) in pairs if a != b), None)
        if first is None:
            continue
        (_, best), (_, second) = one.logprobs[first].top
        if best - second < _TIE:
            ties += 1
        else:
            different += sum(a != b for a, b in zip(one.token_ids[first:], other.token_ids[first:], strict=True))
    return tokens, different, ties
