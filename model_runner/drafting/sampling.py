"""Chains of drafts: each is chosen from the draft network's logits, and run to get the next one's.

    chosen     the most likely token, or one that is drawn

Drawn drafts are for acceptance by rejection: a draft is right more often if it follows the distribution that it is
checked against, and the check must know which one it was drawn from. A greedy request's drafts are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model_runner.drafting.network import DraftNetwork
from model_runner.sampling.sampler import fall
from model_runner.step.request import Request
from ubatch import ForwardContext, set_forward_context
from ubatch.streams.small_copies import to_device

__all__ = ["DraftDraws", "choose_drafts", "draft_chain"]


@dataclass(frozen=True)
class DraftDraws:
    """How the drafts of a chain are drawn, where any are.

    Attributes:
        temperatures: `[R, 1]` float32; 1 where nothing is drawn.
        draws: `[R, steps]` float64, from 0 to 1.
        is_drawn: `[R]` bool.
    """

    temperatures: Tensor
    draws: Tensor
    is_drawn: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], num_steps: int, device: torch.device) -> DraftDraws:
        """Those of sampled requests are drawn, at their temperature.

        Args:
            requests: whose drafts.
            num_steps: drafts of each.
            device: of the logits.
        """
        drawn = [not request.params.greedy for request in requests]
        pairs = list(zip(requests, drawn, strict=True))
        temperatures = torch.tensor([request.params.temperature if own else 1.0 for request, own in pairs])
        # The draw of a place does not depend on how many steps it took to get there.
        draws = [
            [request.draft_draw(request.num_output_tokens + step) if own else 0.0 for step in range(num_steps)]
            for request, own in pairs
        ]
        host = (temperatures[:, None], torch.tensor(draws, dtype=torch.float64), torch.tensor(drawn))
        return cls(*to_device(host, device))


def choose_drafts(logits: Tensor, draws: DraftDraws | None, step: int) -> tuple[Tensor, Tensor | None]:
    """The next draft of every request, and what it was drawn from.

    Args:
        logits: `[R, vocab]`.
        draws: None where nothing is drawn.
        step: which of its draws.

    Returns:
        `[R]` int64, and `[R, vocab]` float32 or None.
    """
    best = logits.argmax(dim=-1)
    if draws is None:
        return best, None
    probabilities = (logits.float() / draws.temperatures).softmax(dim=-1)
    drawn = fall(probabilities, draws.draws[:, step, None]).squeeze(1)
    return torch.where(draws.is_drawn, drawn, best), probabilities


def draft_chain(
    network: DraftNetwork,
    context: ForwardContext,
    plans: Sequence[Any],
    positions: Tensor,
    hidden: Tensor,
    draws: DraftDraws | None,
) -> tuple[Tensor, Tensor | None]:
    """One draft more than there are plans, of every request.

    Args:
        network: drafts.
        context: of every step, but for its plan.
        plans: of attention, one per draft that is run: all but the last.
        positions: `[R]` int64, the places of the first drafts.
        hidden: `[R, hidden_size]`, from which those come.
        draws: as for `choose_drafts`.

    Returns:
        `[R, drafts]` int64, and `[R, drafts, vocab]` float32 or None: what they were drawn from.
    """
    chosen, sources = [], []
    for step in range(len(plans) + 1):
        drafts, source = choose_drafts(network.compute_logits(hidden), draws, step)
        chosen.append(drafts)
        if source is not None:
            sources.append(source)
        if step < len(plans):
            with set_forward_context(replace(context, attn_metadata=plans[step])):
                hidden = network(drafts, positions + step, hidden)
    return torch.stack(chosen, dim=1), torch.stack(sources, dim=1) if sources else None
