"""Whether balanced experts generate what others generate: greedy tokens of three runs.

without   experts in the order of their ids
moved     experts in other places, all of them moved there
moving    all experts change their ranks meanwhile
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from model_runner import GenerationOutput, SamplingParams, generate
from serving.workbench.bench.eplb.skewed import SkewedModels, on_next_ranks, placement_of, prompts_of
from serving.workbench.bench.step_setting import StepSetting

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
